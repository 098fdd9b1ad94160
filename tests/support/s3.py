"""S3 for tests: a real server (versitygw) that supports create-only writes, and a careless one that does not."""

import asyncio
import contextlib
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from tests.support.ports import free_port, wait_for_port

BUILD_SCRIPT = Path(__file__).parents[2] / "hack" / "versitygw"
BUCKET = "rollouts"


@dataclass(frozen=True)
class S3:
    """Location of a server, and how to reach it."""

    port: int

    def environ(self, port: int | None = None) -> dict[str, str]:
        """Return settings for `Store.open`. Another port is that of a proxy in front of it."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
        }

    def uri(self, prefix: str) -> str:
        """Return a prefix of the bucket, which exists."""
        return f"s3://{BUCKET}/{prefix}"


@contextlib.contextmanager
def serve_s3(within: Path | None = None) -> Iterator[S3]:
    """Run versitygw on a temporary folder, in the system's or `within` another. It is built first if missing."""
    program = subprocess.run([BUILD_SCRIPT], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="versitygw-", dir=within) as folder:
        (Path(folder) / BUCKET).mkdir()
        with (Path(folder) / "log").open("w+") as log:
            server = subprocess.Popen(
                [
                    program,
                    "--access",
                    "test",
                    "--secret",
                    "test-secret",
                    "--port",
                    f"127.0.0.1:{port}",
                    "posix",
                    folder,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                wait_for_port(port, server, Path(folder) / "log")
                yield S3(port)
            finally:
                server.terminate()
                server.wait(10)


@contextlib.asynccontextmanager
async def careless_s3() -> AsyncIterator[S3]:
    """Serve S3's requests for single objects, and ignore `If-None-Match`, as some servers do."""
    objects: dict[str, bytes] = {}

    async def answer(request: web.Request) -> web.Response:
        if request.method == "PUT":
            objects[request.path] = await request.read()
            return web.Response(headers={"ETag": '"1"'})
        if request.method == "POST":  # bulk deletion
            keys = re.findall("<Key>(.*?)</Key>", await request.text())
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return web.Response(text=f"<DeleteResult>{deleted}</DeleteResult>", content_type="application/xml")
        if request.path not in objects:
            return web.Response(status=404)
        headers = {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        return web.Response(body=objects[request.path], headers=headers)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with serving(application) as port:
        yield S3(port)


@contextlib.asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[int]:
    """Serve the application on loopback; yields the port."""
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await asyncio.wait_for(runner.cleanup(), 10)
