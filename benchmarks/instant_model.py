"""A model server that answers immediately, so that a turn takes only the time that the engine needs.

It implements the part of OpenAI's chat completions that we and the peers need: keep-alive, plain bodies, and streams, which
are slow on purpose: one word per second. The answers of a conversation are tool calls of `noop`, and text in its last turn.
With `together`, the server holds the first answers until that many conversations have begun. Otherwise the first
conversation would end before the last one begins, and they would not run at the same time.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchmarks.conversation import END_SECONDS, ROOT
from benchmarks.measuring import pin_to_core

NAME = "instant"
TOOL = "noop"
BODY_BYTES = 281  # of an answer: a short tool call
WORDS = 20  # of a stream
WORD_SECONDS = 1.0
MODEL_CORE = 1  # core of the model server; the measured process has core 0 for itself


def answer_body(turn: int, turns: int) -> bytes:
    """Return the completion of a turn, counted from 0: `BODY_BYTES` of JSON."""
    call = {"id": f"c{turn}", "type": "function", "function": {"name": TOOL, "arguments": "{}"}}
    return _completion({"content": "done"} if turn + 1 >= turns else {"tool_calls": [call]}).ljust(BODY_BYTES)


def _completion(message: dict[str, Any]) -> bytes:
    reason = "tool_calls" if "tool_calls" in message else "stop"
    completion = {
        "id": "x",
        "created": 0,
        "model": NAME,
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
    }
    return json.dumps(completion, separators=(",", ":")).encode()


def _http(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _chunk(data: str) -> bytes:
    return f"{len(data):x}\r\n{data}\r\n".encode()


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    event = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": NAME, "choices": [choice]}
    return _chunk(f"data: {json.dumps(event, separators=(',', ':'))}\n\n")


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_STREAM_END = _event({}, "stop") + _chunk("data: [DONE]\n\n") + _chunk("")


def _stream(write: Callable[[bytes], None]) -> None:
    loop = asyncio.get_running_loop()
    write(_STREAM_HEAD + _event({"role": "assistant", "content": "word "}))
    for number in range(1, WORDS):
        loop.call_later(number * WORD_SECONDS, write, _event({"content": "word "}))
    loop.call_later(WORDS * WORD_SECONDS, write, _STREAM_END)


def _answers_with(text: str) -> tuple[bytes, bytes]:
    """Return the complete answer with this text as a plain body and as a stream."""
    stream = _STREAM_HEAD + _event({"role": "assistant", "content": text}) + _STREAM_END
    return _http(_completion({"content": text})), stream


class _Connection(asyncio.Protocol):
    def __init__(self, server: "_Server") -> None:
        self._server = server
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (request := self._next_request()) is not None:
            self._server.answer(request, self._write)

    def _next_request(self) -> bytes | None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self._received[:end]).lower()
        marker = head.find(b"content-length:")
        length = int(head[marker + 15 :].split(b"\r\n", 1)[0]) if marker >= 0 else 0
        total = end + 4 + length
        if len(self._received) < total:
            return None
        request = bytes(self._received[:total])
        del self._received[:total]
        return request

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


class _Server:
    def __init__(self, turns: int, delay_seconds: float, together: int, text: str | None = None) -> None:
        self._fixed_answer = None if text is None else _answers_with(text)
        self._answers = [_http(answer_body(turn, turns)) for turn in range(turns)]
        self._models = _http(json.dumps({"object": "list", "data": [{"id": NAME, "object": "model"}]}).encode())
        self._delay, self._together = delay_seconds, together
        self._held: list[Callable[[], None]] = []

    def answer(self, request: bytes, write: Callable[[bytes], None]) -> None:
        if not request.startswith(b"POST"):
            write(self._models)
            return
        is_streamed = b'"stream":true' in request or b'"stream": true' in request
        if self._fixed_answer is not None:
            write(self._fixed_answer[is_streamed])
            return
        if is_streamed:
            _stream(write)
            return
        # The turn is the number of tool messages, so the server stores no conversation.
        turn = request.count(b'"tool_call_id"')
        answer = self._answers[min(turn, len(self._answers) - 1)]
        if self._delay:
            asyncio.get_running_loop().call_later(self._delay, write, answer)
        elif (
            turn == 0 and self._together and b'"tools"' in request
        ):  # a request without tools only checks whether the server answers
            self._held.append(lambda: write(answer))
            if len(self._held) == self._together:
                held, self._held = self._held, []
                for write_held in held:
                    write_held()
        else:
            write(answer)


def instant_model(
    turns: int, *, delay_seconds: float = 0.0, together: int = 0, text: str | None = None
) -> AbstractContextManager[str]:
    """Yield the base URL of such a server, in a separate process on another core.

    `together`: hold the first answers until this many conversations wait for their first one. `text`: answer every request
    with this text.
    """
    options = ["--turns", str(turns), "--delay", str(delay_seconds), "--together", str(together)]
    options += [] if text is None else ["--text", text]
    return server_process("benchmarks.instant_model", options)


@contextmanager
def server_process(module: str, options: Sequence[str]) -> Iterator[str]:
    """Start a server in a separate process on MODEL_CORE; yield its URL, which the process prints as its first line."""
    command = [sys.executable, "-m", module, *options]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: pin_to_core(MODEL_CORE)
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()
            server.wait(END_SECONDS)


async def _serve(turns: int, delay_seconds: float, together: int, text: str | None) -> None:
    server = _Server(turns, delay_seconds, together, text)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1", flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--together", type=int, default=0)
    parser.add_argument("--text")
    options = parser.parse_args()
    asyncio.run(_serve(options.turns, options.delay, options.together, options.text))
