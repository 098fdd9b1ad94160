"""Models from a hub: all files of one commit, gated ones with a token, and resumed downloads."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_runtime.serving import sources
from agent_runtime.serving.fetching import FetchError, fetch_folder
from agent_runtime.serving.sources import open_source

FILES = {"config.json": b"{}", "model-00001.safetensors": bytes(range(256)) * 40}
COMMIT = "c" * 40


class Hub:
    """Answers as the Hugging Face Hub does, for one model."""

    def __init__(self) -> None:
        self.needs_token = False
        self.breaks = self.listing_breaks = 0
        self.busy = 0
        self.asked: list[str] = []
        app = web.Application()
        app.add_routes(
            [
                web.get("/api/models/lab/small/revision/{revision}", self.model),
                web.get("/lab/small/resolve/{commit}/{path:.*}", self.file),
            ]
        )
        self.server = TestServer(app)

    def check(self, request: web.Request) -> None:
        self.asked.append(f"{request.path} {request.headers.get('Range', '')}".strip())
        if self.busy:
            self.busy -= 1
            raise web.HTTPTooManyRequests
        if self.needs_token and request.headers.get("Authorization") != "Bearer secret":
            raise web.HTTPUnauthorized(text="gated")

    async def model(self, request: web.Request) -> web.StreamResponse:
        self.check(request)
        assert request.query_string == "blobs=true"
        if request.match_info["revision"] != "main":
            raise web.HTTPNotFound
        siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
        listing = {"downloads": len(self.asked) * 1000, "sha": COMMIT, "siblings": siblings}
        if self.listing_breaks:
            self.listing_breaks -= 1
            answer = web.StreamResponse(headers={"Content-Length": "500"})
            await answer.prepare(request)
            await answer.write(json.dumps(listing).encode()[:50])
            assert request.transport is not None
            request.transport.close()
            return answer
        return web.json_response(listing)

    async def file(self, request: web.Request) -> web.StreamResponse:
        self.check(request)
        assert request.match_info["commit"] == COMMIT
        data = FILES[request.match_info["path"]]
        start = int(match[1]) if (match := re.match(r"bytes=(\d+)-", request.headers.get("Range", ""))) else 0
        answer = web.StreamResponse(status=206 if start else 200, headers={"Content-Length": str(len(data) - start)})
        await answer.prepare(request)
        if self.breaks and len(data) > 1000:
            self.breaks -= 1
            await answer.write(data[start : start + 1000])
            assert request.transport is not None
            request.transport.close()
            return answer
        await answer.write(data[start:])
        return answer


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    monkeypatch.setattr(sources, "PAUSE_SECONDS", 0.001)
    hub = Hub()
    async with hub.server:
        yield hub


async def fetch(hub: Hub, folder: Path, revision: str | None = None, **environ: str) -> None:
    settings = {"HF_ENDPOINT": str(hub.server.make_url("")), **environ}
    async with open_source("hf://lab/small", revision, settings) as source:
        await fetch_folder(source, folder, writer="w")


def there(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


async def test_all_files_of_one_commit_are_fetched(hub: Hub, tmp_path: Path) -> None:
    await fetch(hub, tmp_path / "m")
    assert there(tmp_path / "m") == FILES


async def test_broken_download_resumes_however_often(hub: Hub, tmp_path: Path) -> None:
    hub.breaks = 9  # more often than the retries of a request without progress
    await fetch(hub, tmp_path / "m")
    assert there(tmp_path / "m") == FILES
    assert any("bytes=" in asked for asked in hub.asked)


async def test_listing_that_breaks_is_requested_from_its_beginning(hub: Hub, tmp_path: Path) -> None:
    hub.listing_breaks = 3
    await fetch(hub, tmp_path / "m")
    assert there(tmp_path / "m") == FILES
    assert not any("bytes=" in asked for asked in hub.asked)


async def test_busy_hub_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    hub.busy = 3
    await fetch(hub, tmp_path / "m")
    assert there(tmp_path / "m") == FILES


async def test_a_gated_model_needs_the_token_and_the_field_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.needs_token = True
    with pytest.raises(FetchError, match=r"HF_TOKEN to the Secret of model\.secretRef"):
        await fetch(hub, tmp_path / "m")
    await fetch(hub, tmp_path / "m", HF_TOKEN="secret")
    assert there(tmp_path / "m") == FILES


async def test_missing_revision_is_reported(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="check name and revision"):
        await fetch(hub, tmp_path / "m", revision="nowhere")
