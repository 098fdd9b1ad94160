"""Limits of what the operator keeps in memory for tenants: messages, and answers of programs in their pods.

All tenants share one process with a fixed amount of memory. Anything of theirs that outlives the call that read it is cut
or counted here.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

import aiohttp

MOST_CHARACTERS: Final = 1024
"""Longest message: of an error, an Event, a condition, a fact. API servers, registries and webhooks quote what tenants
wrote, and an API server accepts no longer message in an Event.
"""
HELD_BYTES: Final = 96 * 2**20
"""Most bytes of answers that are held at one time, of all namespaces together."""
SMALL_BYTES: Final = 2**16
"""Answers up to this size are not counted while they are read: the buffers of a connection are as large. So small answers
never wait for room.
"""


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text of at most `most` characters. The middle is left out: the start says what failed, and the end why."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 3]} … {text[-end:]}"


def digest(*texts: str) -> bytes:
    """Return a key for texts of any length."""
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).digest()


class ByteBudget:
    """Counts the bytes that are held for tenants, by namespace.

    A namespace may hold half of what then stays free. So however many of them hold what they may, there is room for
    another one, as in the buffers of network switches (Choudhury and Hahne, "Dynamic queue length thresholds", 1998).
    """

    def __init__(self, total: int = HELD_BYTES) -> None:
        self._total = total
        self._held: Counter[str] = Counter()
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, namespace: str, beyond: int = SMALL_BYTES) -> AsyncIterator["Held"]:
        """Count bytes for a namespace until the block ends: those of answers larger than `beyond`."""
        held = Held(self, namespace, beyond)
        try:
            yield held
        finally:
            held.shrink(0)

    def has_room(self, namespace: str, size: int) -> bool:
        """Return whether the namespace may hold `size` more bytes; a third of the total if nothing is held."""
        free = self._total - self._held.total() - size
        return 2 * (self._held[namespace] + size) <= free

    def add(self, namespace: str, size: int) -> None:
        """Count more bytes, or fewer if `size` is negative."""
        self._held[namespace] += size
        if not self._held[namespace]:
            del self._held[namespace]
        if size < 0:
            self._freed.set()
            self._freed = asyncio.Event()

    async def freed(self) -> None:
        """Wait until some bytes are no longer held."""
        await self._freed.wait()


class Held:
    """Bytes that one operation holds."""

    def __init__(self, budget: ByteBudget, namespace: str, beyond: int) -> None:
        self._budget, self._namespace, self.beyond = budget, namespace, beyond
        self.size = 0
        self.waits = False
        """Whether it waits for room."""

    async def grow(self, size: int) -> None:
        """Hold `size` bytes in all, after waiting for room. The caller limits the time."""
        self.waits = True
        while not self._budget.has_room(self._namespace, size - self.size):
            await self._budget.freed()
        self.waits = False
        self._set(size)

    def shrink(self, size: int) -> None:
        """Hold only `size` bytes from now on."""
        self._set(min(size, self.size))

    def _set(self, size: int) -> None:
        self._budget.add(self._namespace, size - self.size)
        self.size = size


def pod_session() -> aiohttp.ClientSession:
    """Return a session for requests to programs in tenants' pods."""
    return aiohttp.ClientSession(
        # The connector's own limit, of all namespaces together, would delay the requests of other tenants too.
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        # Responses are not decompressed, because a small one could become very large.
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def read_answer(response: aiohttp.ClientResponse, most: int, held: Held) -> bytes | None:
    """Return the body of a response; None if it has more than `most` bytes.

    `held` then counts twice its bytes, for the answer and what is made of it, unless that is small.
    """
    if (response.content_length or 0) > most:
        return None
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > most:
            return None
        if len(data) > held.beyond and not held.size:
            await held.grow(2 * max(SMALL_BYTES, response.content_length or most))
    return bytes(data)
