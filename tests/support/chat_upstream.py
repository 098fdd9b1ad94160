"""A server of OpenAI's chat completions without token ids. The first word of the last user message selects the answer."""

import asyncio
import json
import threading
import uuid
from typing import Any

from aiohttp import web

THOUGHT = "Let me think. " * 20
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 7,
    "total_tokens": 19,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 5},
}
NOT_TAKEN = "unheard_of"
"""A field that the server refuses."""


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"chatcmpl-tool-{uuid.uuid4().hex[:8]}", "type": "function", "function": function}


def _answer(word: str, text: str) -> tuple[dict[str, Any], str]:
    match word:
        case "tool":
            return {"content": None, "tool_calls": [_call("run", command="ls")]}, "tool_calls"
        case "parallel":
            calls = [_call("run", command="a"), _call("run", command="b")]
            return {"content": "Two.", "tool_calls": calls}, "tool_calls"
        case "patch":
            return {"content": None, "tool_calls": [_call("patch", input="*** Begin\n+x")]}, "tool_calls"
        case "reason":
            return {"content": "Forty-two.", "reasoning": THOUGHT}, "stop"
        case "reasontool":
            called = [_call("run", command="x")]
            return {"content": None, "reasoning": "I should run it.", "tool_calls": called}, "tool_calls"
        case "length":
            return {"content": "cut off he"}, "length"
        case "filter":
            return {"content": ""}, "content_filter"
    return {"content": f"You said: {text}"}, "stop"


_FAILURES = {
    "e500": (500, {"message": "boom", "type": "InternalServerError", "code": 500}),
    "e429": (429, {"message": "busy", "type": "rate", "code": 429}),
    "toolong": (400, {"message": "This model's maximum context length is 10 tokens.", "type": "BadRequestError"}),
}


class ChatUpstream:
    """`bodies` are the requests so far. Answers to "reason held" and "slow held" wait for `go_on` in their middle, and at
    their start; a test sets it when it has what must arrive before.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.go_on = threading.Event()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        text = next(message["content"] for message in reversed(body["messages"]) if message["role"] == "user")
        word, _, rest = text.partition(" ")
        if word in _FAILURES or NOT_TAKEN in body:
            refused = {"message": f"unexpected keyword {NOT_TAKEN}", "type": "BadRequestError", "code": 400}
            status, error = _FAILURES.get(word, (400, refused))
            return web.json_response({"error": error}, status=status)
        message, finish_reason = _answer(word, text)
        seconds = float(rest) if rest and rest.replace(".", "").isdigit() else 0.0
        if word == "slow":
            await asyncio.sleep(seconds)
            if rest == "held":
                await self._wait()
        head = {"id": "chatcmpl-x", "created": 1700000000, "model": body["model"]}
        message = {"role": "assistant", **message}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": USAGE})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            event = {**head, "object": "chat.completion.chunk", "choices": [choice], **fields}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        thought = message.get("reasoning", "")
        for start in range(0, len(thought), 28):
            await send({"reasoning": thought[start : start + 28]})
            if rest == "held":
                await self._wait()
        for piece in (message["content"] or "").split():
            await send({"content": f"{piece} "})
        for index, call in enumerate(message.get("tool_calls", [])):
            arguments = call["function"]["arguments"]
            begun = {**call["function"], "arguments": arguments[:3]}
            await send({"tool_calls": [{"index": index, **call, "function": begun}]})
            await send({"tool_calls": [{"index": index, "function": {"arguments": arguments[3:]}}]})
        await send({}, finish_reason)
        await send({}, finish_reason, choices=[], usage=USAGE)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _wait(self) -> None:
        if not await asyncio.to_thread(self.go_on.wait, 60):
            raise TimeoutError("the test did not get what must arrive before")
