"""A real browser, controlled through its DevTools protocol."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-port=0",
]


class Page:
    """One tab. `problems`: errors and warnings of its console; `requests`: URLs that it asked for beside the file's."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._listening = asyncio.create_task(self._listen())
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A call of the protocol."""
        self._number += 1
        reply = self._replies[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        return await asyncio.wait_for(reply, 60)

    async def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        reply = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in reply:
            raise AssertionError(f"{script}: {json.dumps(reply['exceptionDetails'])}")
        return reply["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true, also if the tab goes to another page. An exception counts as false."""
        waiting = (
            "new Promise((done, fail) => { const end = Date.now() + 30000; "
            f"const holds = () => {{ try {{ return {condition}; }} catch {{ return false; }} }}; const look = () => "
            f"holds() ? done(true) : Date.now() > end ? fail(new Error({condition!r} + ' never came true'))"
            " : setTimeout(look, 20); look(); })"
        )
        while True:
            try:
                await self.run(waiting)
            except AssertionError as error:
                if "navigated or closed" not in str(error):
                    raise
            else:
                return

    async def go(self, url: str) -> None:
        """Open another address, and wait until it is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until(f"document.readyState === 'complete' && location.href.startsWith({url.split('#')[0]!r})")

    async def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    async def _listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                reply = self._replies.pop(event["id"])
                if "error" in event:
                    reply.set_exception(AssertionError(str(event["error"])))
                else:
                    reply.set_result(event["result"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                self.problems.append(event["params"]["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])

    async def close(self) -> None:
        """Stop listening."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_in_browser(file: Path | str, *flags: str) -> AsyncIterator[Page]:
    """Open a file or a URL in a fresh browser, which is started with these flags."""
    url = file if isinstance(file, str) else file.resolve().as_uri()
    program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    assert program, f"pages are tested in a real browser: install one of {', '.join(BROWSERS)}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *FLAGS,
            *flags,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{port}/json") as reply:
                    tab = next(target for target in await reply.json() if target["type"] == "page")
                async with http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Runtime", "Log", "Page", "Network"):
                        await page.call(f"{domain}.enable")
                    await page.go(url)
                    yield page
                    await page.close()
        finally:
            process.terminate()
            await process.wait()


async def _port(file: Path) -> int:
    for _ in range(600):
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise AssertionError("the browser did not start in 30 s")
