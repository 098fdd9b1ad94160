"""A model server that speaks OpenAI's and Anthropic's form and has one answer to everything, for programs that want one."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

COMPLETION_TOKENS = 5


@contextmanager
def answering(answer: str, key: str = "") -> Iterator[str]:
    """The server's address, without `/v1`. With a `key` it wants that one."""
    loop = asyncio.new_event_loop()
    ready, over = threading.Event(), asyncio.Event()
    ports: list[int] = []

    async def chat(request: web.Request) -> web.Response:
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": "Incorrect API key provided"}}, status=401)
        choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": COMPLETION_TOKENS, "total_tokens": 9 + COMPLETION_TOKENS}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
        )

    async def messages(_: web.Request) -> web.Response:
        message = {"type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": answer}]}
        usage = {"input_tokens": 9, "output_tokens": COMPLETION_TOKENS}
        return web.json_response(message | {"stop_reason": "end_turn", "usage": usage})

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", chat)
        application.router.add_post("/v1/messages", messages)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        ready.set()
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
