"""Sources of weights: object storage, a folder, or a model hub."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import aiohttp

from agent_runtime.recording.store import PART_BYTES, Store
from agent_runtime.serving.fetching import FetchError, RemoteFile, Source

HUB: Final = "https://huggingface.co"
"""Default hub; HF_ENDPOINT overrides it."""
TRIES: Final = 6
"""Attempts of a failing request to the hub: a minute in total."""
PAUSE_SECONDS = 1.0
"""Pause after the first attempt; doubles, with jitter."""
SILENCE_SECONDS: Final = 60.0


@asynccontextmanager
async def open_source(uri: str, revision: str | None, environ: Mapping[str, str]) -> AsyncIterator[Source]:
    """Return the source at `hf://ORG/NAME`, `s3://`, `gs://`, `az://` or `file://`. Raises FetchError for another URI.

    `revision` is a commit, branch or tag, for a hub only. `environ` has settings and credentials under each vendor's
    names; HF_ENDPOINT and HF_TOKEN for the hub.
    """
    parts = urlsplit(uri)
    if parts.scheme == "hf":
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
            yield HubSource(f"{parts.netloc}{parts.path}".strip("/"), revision or "main", environ, session)
    elif parts.scheme in ("s3", "gs", "az", "file"):
        if parts.scheme == "file" and not Path(unquote(parts.path)).is_dir():
            raise FetchError(f"{uri}: the folder does not exist")
        yield StoreSource(Store.open(uri, environ))
    else:
        raise FetchError(f"{uri}: expected hf://, s3://, gs://, az:// or file://")


class StoreSource:
    """Objects below a prefix."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri

    async def files(self) -> Sequence[RemoteFile]:
        return [RemoteFile(found.key, found.size) for found in await self._store.list("") if found.key]

    def read(self, path: str) -> AsyncIterator[bytes]:
        return self._store.stream(path)


class HubSource:
    """A model repository (Hugging Face Hub API: /api/models/REPO/revision/REV?blobs=true, /REPO/resolve/COMMIT/FILE)."""

    def __init__(
        self, repository: str, revision: str, environ: Mapping[str, str], session: aiohttp.ClientSession
    ) -> None:
        self._repository, self._revision, self._session = repository, revision, session
        self._hub = environ.get("HF_ENDPOINT", HUB).rstrip("/")
        self._commit = revision
        token = environ.get("HF_TOKEN")
        # Without compression, a download can resume at a byte of the file after a broken connection.
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self.uri = f"hf://{repository}@{revision}"

    async def files(self) -> Sequence[RemoteFile]:
        """Return all files of the revision. A branch is resolved once, so that all files belong to one commit."""
        url = f"{self._hub}/api/models/{self._repository}/revision/{quote(self._revision, safe='')}?blobs=true"
        body: dict[str, Any] = json.loads(b"".join([piece async for piece in self._get(url, is_whole=True)]))
        self._commit = str(body["sha"])
        return [
            RemoteFile(sibling["rfilename"], sibling.get("size"), (sibling.get("lfs") or {}).get("sha256"))
            for sibling in body["siblings"]
        ]

    def read(self, path: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes in pieces."""
        return self._get(f"{self._hub}/{self._repository}/resolve/{self._commit}/{quote(path)}")

    async def _get(self, url: str, *, is_whole: bool = False) -> AsyncIterator[bytes]:
        """Yield the body in pieces. After a broken connection the download continues where it stopped. With `is_whole`
        the body is one piece and is requested again from its beginning, because a listing may change between requests.
        """
        done = tries = 0
        while True:
            try:
                headers = self._headers | ({"Range": f"bytes={done}-"} if done else {})
                async with self._session.get(url, headers=headers) as response:
                    await self._check(response)
                    if is_whole:
                        yield await response.read()
                        return
                    repeated = done if response.status == 200 else 0
                    async for piece in response.content.iter_chunked(PART_BYTES):
                        new = piece[repeated:]
                        repeated = max(0, repeated - len(piece))
                        if new:
                            done += len(new)
                            tries = 0
                            yield new
                return
            except (aiohttp.ClientError, TimeoutError, OSError):
                tries += 1
                if tries == TRIES:
                    raise
            await asyncio.sleep(random.uniform(0.5, 1.0) * PAUSE_SECONDS * 2.0**tries)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status < 400:
            return
        words = (await response.text())[:200]
        if response.status in (401, 403):
            raise FetchError(
                f"{self.uri}: the hub refuses access ({response.status}); add a token with access to the model as "
                "HF_TOKEN "
                f"to the Secret of model.secretRef: {words}"
            )
        if response.status < 500 and response.status not in (408, 429):
            raise FetchError(f"{self.uri}: the hub answers {response.status}; check name and revision: {words}")
        response.raise_for_status()
