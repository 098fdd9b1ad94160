"""A workspace in a plain folder: real files and real processes, without isolation."""

import asyncio
import os
import shutil
import stat
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from agent_runtime.sandboxes.base import Ancestors, Carried, CommandResult, FileError, FileStat, ignore_pauses
from tests.support.carrying import carry, packed, unpack
from tests.support.commands import run_here

WORKING_DIR = "/workspace"


class FolderWorkspace:
    """The part of the Workspace protocol that grading uses. Paths are below `root`; `VERIFIER_LOGS` stands for
    /logs/verifier.
    """

    handle: Mapping[str, object] = {}
    description: Mapping[str, object] = {"provider": "folder"}
    working_dir = WORKING_DIR

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / WORKING_DIR.lstrip("/")
        self.folder.mkdir(parents=True)

    async def set_steady(self, is_steady: bool) -> None:
        """Nothing pauses here."""

    async def failed_connections(self) -> Mapping[str, str | None]:
        """Networks are not controlled here."""
        return {}

    async def stood_still(self) -> float:
        """Standstills are not detected here."""
        return 0

    def _at(self, path: str) -> Path:
        return self.root / os.path.normpath(os.path.join(WORKING_DIR, path)).lstrip("/")

    async def run(
        self,
        command: str | Sequence[str],
        *,
        key: str,
        deadline_seconds: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        bounded: bool = False,
        pausing: Callable[[bool], None] = ignore_pauses,
        head_bytes: int = 65_536,
        tail_bytes: int = 65_536,
    ) -> CommandResult:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {"PATH": path, "HOME": str(self.root), "VERIFIER_LOGS": str(self._at("/logs/verifier"))}
        return await run_here(
            command, cwd=self._at(cwd or "."), deadline_seconds=deadline_seconds, env=variables | dict(env or {})
        )

    async def read(self, path: str, *, key: str | None = None, limit: int = 1 << 20, **_: Any) -> bytes:
        try:
            return self._at(path).read_bytes()[:limit]
        except OSError as error:
            raise FileError(path, str(error)) from error

    async def write(
        self, path: str, data: bytes, *, key: str, mode: str = "644", replace: bool = False, **_: Any
    ) -> None:
        place = self._at(path)
        try:
            if replace:
                await self.remove(path, key=key)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            place.chmod(int(mode, 8))
        except OSError as error:
            raise FileError(path, str(error)) from error

    async def remove(self, path: str, *, key: str, **_: Any) -> None:
        place = self._at(path)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)

    async def stat(self, path: str, *, key: str | None = None, **_: Any) -> FileStat | None:
        place = self._at(path)
        try:
            info = place.lstat()
        except FileNotFoundError:
            return None
        kind: Literal["link", "folder", "file"] = (
            "link" if stat.S_ISLNK(info.st_mode) else "folder" if stat.S_ISDIR(info.st_mode) else "file"
        )
        return FileStat(place.name, kind, info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime)

    async def list(self, path: str, *, key: str | None = None) -> list[FileStat]:
        found = [await self.stat(f"{path}/{entry}") for entry in sorted(os.listdir(self._at(path)))]
        return [entry for entry in found if entry is not None]

    async def tar(self, path: str, *, parts: Sequence[str] = (".",)) -> AsyncIterator[bytes]:
        yield await asyncio.to_thread(packed, self._at(path), parts)

    async def untar(
        self, path: str, data: AsyncIterator[bytes], *, key: str, ancestors: Ancestors = "refuse", **_: Any
    ) -> None:
        whole = b"".join([chunk async for chunk in data])
        await asyncio.to_thread(unpack, self._at(path), whole, ancestors)

    async def carry(
        self, path: str, rules: Sequence[Mapping[str, Any]], data: AsyncIterator[bytes], *, key: str
    ) -> Carried:
        whole = b"".join([chunk async for chunk in data])
        return Carried(await asyncio.to_thread(carry, self._at(path), whole, rules))


@pytest.fixture
def new_workspace(tmp_path: Path) -> Callable[[], FolderWorkspace]:
    """Create workspaces, each in a separate folder."""
    made: list[FolderWorkspace] = []

    def make() -> FolderWorkspace:
        made.append(FolderWorkspace(tmp_path / str(len(made))))
        return made[-1]

    return make


@pytest.fixture
def workspace(new_workspace: Callable[[], FolderWorkspace]) -> FolderWorkspace:
    """One workspace."""
    return new_workspace()
