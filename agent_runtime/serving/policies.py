"""Policies on the volume that gateway and engine share: one folder for each version, which exists only if it is
complete.
"""

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, StringConstraints

from agent_runtime.serving.fetching import fetch_folder
from agent_runtime.serving.safetensors import check_folder
from agent_runtime.serving.sources import open_source
from rollout_api.base import ApiModel

KEPT: Final = 2
"""Number of most recently requested policies to keep: the served one and the next. Older ones are deleted."""


class PolicyRequest(ApiModel):
    """Body of POST /policy/fetch."""

    version: Annotated[int, Field(ge=0, le=2**53)]
    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None


class Policies:
    """Fetches policies into the shared volume `folder`, each once, even if requested repeatedly.

    `environ` returns the credentials of stores; it is called at each fetch, because credentials are rotated.
    `checked`: files of weights are checked after the fetch, for an engine that ends if it cannot load them.
    """

    def __init__(self, folder: Path, environ: Callable[[], Mapping[str, str]], *, checked: bool = False) -> None:
        self.folder, self.environ, self._checked = folder, environ, checked
        self._running: dict[PolicyRequest, asyncio.Task[Path]] = {}

    async def fetch(self, wanted: PolicyRequest) -> Path:
        """Return the folder of a version, fetched if missing. Repeated requests wait for the same fetch, and a
        cancelled request does not stop it. Raises the errors of the fetch.
        """
        task = self._running.get(wanted)
        if task is None:
            task = asyncio.create_task(self._fetch(wanted))
            self._running[wanted] = task
            task.add_done_callback(lambda _: self._running.pop(wanted, None))
        return await asyncio.shield(task)

    async def _fetch(self, wanted: PolicyRequest) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = self.folder / str(wanted.version)
        await asyncio.to_thread(self._make_room, folder)
        async with open_source(wanted.uri, None, self.environ()) as source:
            await fetch_folder(source, folder, writer=socket.gethostname(), digest=wanted.digest)
        if self._checked:
            await asyncio.to_thread(check_folder, folder)
        os.utime(folder)
        return folder

    def _make_room(self, wanted: Path) -> None:
        # Staging folders of fetches that failed are as large as policies. Other writers may share the volume.
        fetching = {wanted.name, *(str(request.version) for request in self._running)}
        for path in self.folder.glob(f".*.{socket.gethostname()}"):
            if path.name.split(".")[1] not in fetching:
                shutil.rmtree(path, ignore_errors=True)
        versions = [path for path in self.folder.iterdir() if path.name.isdigit() and path != wanted]
        for path in sorted(versions, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
