"""The events of a streamed response (platform.openai.com/docs/api-reference/responses-streaming). Pure."""

from typing import Any

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import ChatAnswer, ChatRequest, ErrorKind, JsonObject, sse
from agent_runtime.proxy.conversation import reasoning
from agent_runtime.proxy.protocols.openai_errors import openai_error
from agent_runtime.proxy.protocols.responses_items import (
    bare_response,
    call_items,
    message_item,
    reasoning_item,
    whole_response,
)
from agent_runtime.proxy.protocols.streamed_text import StreamedText


class ResponsesEncoder:
    """See `Encoder`. Items are numbered as they come: reasoning that is known only at the end follows the text then."""

    def __init__(self, request: ChatRequest, id: str, created: int) -> None:
        self._request, self._id, self._created = request, id, created
        self._sent = StreamedText()
        self._number = 0
        self._output: list[JsonObject] = []
        self._text_begun = False

    def start(self) -> bytes:
        response = bare_response(self._request, self._id, self._created)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, piece: str) -> bytes:
        head = b"" if self._text_begun else self._begin_text()
        self._sent.add(piece)
        return head + self._delta(piece)

    def end(self, answer: ChatAnswer) -> bytes:
        reply = answer.reply
        text, calls, thought = reply.text, call_items(self._id, reply.message), reasoning(reply.message)
        before = self._whole_reasoning(thought) if thought and not self._text_begun else b""
        message = self._end_text(text, reply) if self._text_begun or text or not calls else b""
        behind = self._whole_reasoning(thought) if thought and not before else b""
        called = b"".join([self._whole_call(call) for call in calls])
        response = whole_response(self._request, answer, self._output)
        return before + message + behind + called + self._event(f"response.{response['status']}", response=response)

    def error(self, kind: ErrorKind, message: str) -> bytes:
        """The error event; the openai package raises what stands under `error`."""
        error = openai_error(kind, message)["error"]
        return self._event("error", code=kind.code, message=message, param=None, error=error)

    def _begin_text(self) -> bytes:
        self._text_begun = True
        item = message_item(self._id, "", "stop") | {"status": "in_progress", "content": []}
        part = message_item(self._id, "", "stop")["content"][0]
        return self._added(item) + self._part("added", item["id"], part)

    def _delta(self, piece: str) -> bytes:
        return self._event("response.output_text.delta", **self._place(f"msg_{self._id}"), delta=piece, logprobs=[])

    def _end_text(self, text: str, reply: ModelReply) -> bytes:
        head = b"" if self._text_begun else self._begin_text()
        rest = self._sent.rest(text)
        item = message_item(self._id, self._sent.whole, reply.finish_reason)
        whole = self._sent.whole
        return (
            head
            + (self._delta(rest) if rest else b"")
            + self._event("response.output_text.done", **self._place(item["id"]), text=whole, logprobs=[])
            + self._part("done", item["id"], item["content"][0])
            + self._done(item)
        )

    def _whole_reasoning(self, thought: str) -> bytes:
        item = reasoning_item(self._id, thought)
        place = self._place(item["id"])
        return (
            self._added(item | {"content": []})
            + self._part("added", item["id"], {"type": "reasoning_text", "text": ""})
            + self._event("response.reasoning_text.delta", **place, delta=thought)
            + self._event("response.reasoning_text.done", **place, text=thought)
            + self._part("done", item["id"], item["content"][0])
            + self._done(item)
        )

    def _whole_call(self, item: JsonObject) -> bytes:
        place = {"item_id": item["id"], "output_index": len(self._output)}
        arguments = item["arguments"]
        return (
            self._added(item | {"status": "in_progress", "arguments": ""})
            + self._event("response.function_call_arguments.delta", **place, delta=arguments)
            + self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
            + self._done(item)
        )

    def _added(self, item: JsonObject) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _part(self, what: str, item_id: str, part: JsonObject) -> bytes:
        return self._event(f"response.content_part.{what}", **self._place(item_id), part=part)

    def _done(self, item: JsonObject) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place(self, item_id: str) -> JsonObject:
        """Where a piece belongs; the item that is open is the next of the output."""
        return {"item_id": item_id, "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = sse({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return event
