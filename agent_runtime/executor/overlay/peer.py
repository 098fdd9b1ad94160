"""The executor's side of a channel to the zygote or an init: asynchronous; received messages are untrusted."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence

from agent_runtime.executor.init.channel import (
    Assembler,
    Message,
    ProtocolError,
    StartRequest,
    close_all,
    decode,
    encode,
    packets,
    receive_packet,
    send_packet,
)

# The largest reply: `list` with 5,000 entries of at most 255 bytes of name and 4 KiB of link target, escaped.
_MAX_REPLY_BYTES = 64 * 1024 * 1024
# Limit of packets that are read in a row, so that one workspace cannot delay the others.
_PACKETS_AT_ONCE = 64

Listener = Callable[[Message, list[int]], None]


class PeerClosed(Exception):
    """The other side has closed, or sent an invalid message; `reason` says which."""


class Peer:
    """Numbers requests and passes replies to their callers. `gone` resolves, with a reason, at the end.

    With `numbers` of an earlier peer, it continues that one's.
    """

    def __init__(
        self, end: socket.socket, starts: socket.socket | None = None, numbers: Iterator[int] | None = None
    ) -> None:
        for socket_ in (end, starts):
            if socket_ is not None:
                socket_.setblocking(False)
        self._end = end
        # The socket for requests to start a command; their answers come through `end`.
        self._starts = starts or end
        self._loop = asyncio.get_running_loop()
        self._assembler = Assembler(_MAX_REPLY_BYTES)
        self.numbers = numbers or itertools.count(1)
        self._listeners: dict[int, Listener] = {}
        self._waiting: set[asyncio.Future[tuple[Message, list[int]]]] = set()
        self._turn = asyncio.Lock()
        self.gone: asyncio.Future[str] = self._loop.create_future()
        self._loop.add_reader(end.fileno(), self._readable)

    def number(self) -> int:
        """Return an unused request number."""
        return next(self.numbers)

    def listen(self, number: int, listener: Listener) -> None:
        """Call `listener` with every message of request `number` until `forget`."""
        self._listeners[number] = listener

    def forget(self, number: int) -> None:
        self._listeners.pop(number, None)

    async def send(self, number: int, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send request `number`. Raises PeerClosed, or ValueError for a message over the limit."""
        await self._send(self._end, packets(number, encode(message)), descriptors)

    def start_now(self, number: int, request: StartRequest, descriptors: Sequence[int]) -> bool:
        """Send a command to start as request `number`; False if that would block: use `start` then.

        Raises as `send`.
        """
        first, *more = packets(number, request.pack())
        return not more and not self._turn.locked() and self._sent(self._starts, first, descriptors)

    async def start(self, number: int, request: StartRequest, descriptors: Sequence[int]) -> None:
        """Like `start_now`, but wait until it can be sent. Raises as `send`."""
        await self._send(self._starts, packets(number, request.pack()), descriptors)

    async def _send(self, end: socket.socket, parts: list[bytes], descriptors: Sequence[int]) -> None:
        async with self._turn:
            for part in parts:
                while not self._sent(end, part, descriptors if part is parts[-1] else ()):
                    await self._writable(end)

    def _sent(self, end: socket.socket, packet: bytes, descriptors: Sequence[int]) -> bool:
        if not self.gone.done():
            try:
                send_packet(end, packet, descriptors)
                return True
            except BlockingIOError:
                return False
            except OSError as error:
                self.close(f"the channel failed: {error.strerror}")
        raise PeerClosed(self.gone.result())

    async def _writable(self, end: socket.socket) -> None:
        writable = asyncio.Event()
        self._loop.add_writer(end.fileno(), writable.set)
        self.gone.add_done_callback(lambda _: writable.set())
        try:
            await writable.wait()
        finally:
            if not self.gone.done():
                self._loop.remove_writer(end.fileno())

    async def ask(
        self, message: Message, descriptors: Sequence[int] = (), *, number: int | None = None
    ) -> tuple[Message, list[int]]:
        """Send a request and wait for its only reply: the message, and descriptors that the caller closes."""
        number = self.number() if number is None else number
        answer = self.expect(number)
        try:
            await self.send(number, message, descriptors)
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                close_all(answer.result()[1])
            raise
        finally:
            self.forget(number)
            answer.cancel()

    def expect(self, number: int) -> asyncio.Future[tuple[Message, list[int]]]:
        """Return a future of the first message of request `number`."""
        answer: asyncio.Future[tuple[Message, list[int]]] = self._loop.create_future()
        self._waiting.add(answer)
        answer.add_done_callback(self._waiting.discard)

        def take(message: Message, received: list[int]) -> None:
            if answer.done():
                close_all(received)
            else:
                answer.set_result((message, received))

        self.listen(number, take)
        if self.gone.done():
            self._fail(answer)
        return answer

    def _readable(self) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            descriptors: list[int] = []
            try:
                packet, descriptors = receive_packet(self._end)
                if not packet:
                    self.close("it has ended")
                    return
                whole = self._assembler.add(packet)
                message = whole and decode(whole[1])
            except BlockingIOError:
                return
            except (OSError, ProtocolError) as error:
                close_all(descriptors)
                self.close(f"it broke the protocol: {error}")
                return
            listener = self._listeners.get(whole[0]) if whole else None
            if message is None or listener is None:
                close_all(descriptors)
            else:
                listener(message, descriptors)
            # Do not try another read after a command's answer: usually there is no more data.
            if self.gone.done() or len(self._listeners) <= 1:
                return

    def finish(self, reason: str) -> None:
        """Process received messages, then close the channel."""
        if not self.gone.done():
            self._readable()
        self.close(reason)

    def close(self, reason: str) -> None:
        """Close the channel; waiting callers get PeerClosed."""
        if self.gone.done():
            return
        self._loop.remove_reader(self._end.fileno())
        for end in {self._end, self._starts}:
            self._loop.remove_writer(end.fileno())
            end.close()
        self.gone.set_result(reason)
        for answer in list(self._waiting):
            if not answer.done():
                self._fail(answer)

    def _fail(self, answer: asyncio.Future[tuple[Message, list[int]]]) -> None:
        answer.set_exception(PeerClosed(self.gone.result()))
        # Mark the exception as retrieved, so that asyncio logs nothing for a request without a waiting caller.
        answer.exception()
