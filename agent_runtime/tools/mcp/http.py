"""MCP's Streamable HTTP transport: one session for each attempt, which is opened on demand and held by its own
coroutine.
"""

import asyncio

import httpx2
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client

CLOSE_SECONDS = 5.0
"""Time limit for closing the session at the server."""
TIMEOUT = httpx2.Timeout(30, read=300)
"""The default of the SDK's own client: a server may hold the stream of an answer open."""


class HttpSession:
    """A session with the server at `url`. The SDK requires that one asyncio task opens and closes it; calls may come
    from any task.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self._task: asyncio.Task[None] | None = None
        self._session: ClientSession | None = None

    async def open(self) -> ClientSession:
        """Return the session. A lost one is opened again. Raises the error of a failed attempt."""
        if self._task is None or self._task.done():
            self._opening: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
            self._closing = asyncio.Event()
            self._task = asyncio.create_task(self._live(self._opening, self._closing))
        return await asyncio.shield(self._opening)

    async def lose(self, session: ClientSession) -> None:
        """Have the next `open` replace this session."""
        if session is self._session:
            await self.close()

    async def close(self) -> None:
        task, self._task, self._session = self._task, None, None
        if task is None:
            return
        self._closing.set()
        await asyncio.wait([task], timeout=CLOSE_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _live(self, opening: asyncio.Future[ClientSession], closing: asyncio.Event) -> None:
        try:
            async with (
                httpx2.AsyncClient(headers=self._headers, timeout=TIMEOUT) as client,
                streamable_http_client(self._url, http_client=client) as (read, write),
                ClientSession(read, write) as session,
            ):
                await session.initialize()
                self._session = session
                opening.set_result(session)
                await closing.wait()
        except Exception as error:  # noqa: BLE001 - callers that wait for the session get the error
            if not opening.done():
                opening.set_exception(error)
        finally:
            opening.cancel()
