"""`rolloutctl` as a process, such as `rolloutctl proxy --relay`."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

from agent_runtime.proxy.serve import ADMIN_KEY_VARIABLE

KEY = "0123456789abcdef-the-admin-key"
ENVIRON = {**os.environ, ADMIN_KEY_VARIABLE: KEY}


@contextlib.asynccontextmanager
async def rolloutctl(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the process, and kill it at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rolloutctl.main", *arguments, env=ENVIRON, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said(process: asyncio.subprocess.Process, words: str) -> str:
    """Return the next line of its log with these words."""
    assert process.stderr is not None
    async with asyncio.timeout(300):
        while line := (await process.stderr.readline()).decode():
            if words in line:
                return line
    raise AssertionError(f"it ended without saying {words!r}")


async def url_of(proxy: asyncio.subprocess.Process) -> str:
    """Return where a proxy listens, once it does."""
    return "http://127.0.0.1:" + (await said(proxy, "at http://")).rsplit(":", 1)[1].strip()
