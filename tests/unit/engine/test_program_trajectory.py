"""No content of a program's own trajectory file costs a rollout its result."""

import hashlib
import json
from typing import Any

import pytest

from agent_runtime.engine.program import program as program_trajectory
from agent_runtime.engine.program.program import collect
from agent_runtime.sandboxes.base import FileError, FileStat, WorkspaceLimit
from rollout_api.records import ObjectDigest
from rollout_api.rollout_job import AgentTrajectory

ATIF = {
    "schema_version": "ATIF-v1.7",
    "agent": {"name": "a", "version": "1"},
    "steps": [{"step_id": 1, "source": "user", "message": "hi"}],
}


class OneFile:
    """A workspace with one file, or with a failure instead of it."""

    def __init__(self, content: bytes | Exception | None, kind: Any = "file") -> None:
        self.content, self.kind = content, kind

    async def stat(self, path: str, *, key: str | None = None) -> FileStat | None:
        if isinstance(self.content, Exception):
            raise self.content
        return None if self.content is None else FileStat(path, self.kind, len(self.content), 0o644, 0.0)

    async def read(self, path: str, *, key: str | None = None, limit: int = 1 << 20) -> bytes:
        assert isinstance(self.content, bytes)
        return self.content[:limit]


async def stored(file: bytes, atif: bytes | None) -> tuple[ObjectDigest, ObjectDigest | None]:
    def digest(key: str, data: bytes) -> ObjectDigest:
        return ObjectDigest(key=key, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))

    return digest("file", file), None if atif is None else digest("atif", atif)


@pytest.mark.parametrize(
    ("workspace", "note"),
    [
        (OneFile(None), "t.json: the program did not write this file"),
        (OneFile(b"", "folder"), "t.json: expected a file, found a folder"),
        (OneFile(b"x" * 101), "t.json: 101 bytes, but at most 100 are kept"),
        (OneFile(FileError("t.json", "a loop of links")), "t.json: a loop of links"),
        (OneFile(WorkspaceLimit("Memory", "used up")), "t.json: the workspace was ended (Memory)"),
    ],
)
async def test_unreadable_trajectory_file_is_recorded_as_a_note(
    workspace: Any, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_trajectory, "FILE_BYTES", 100)
    own = await collect(workspace, AgentTrajectory(path="t.json"), "run/0", stored)
    assert (own.note, own.file, own.atif) == (note, None, None)


async def test_a_broken_file_is_kept_as_it_is() -> None:
    own = await collect(OneFile(b"{"), AgentTrajectory(path="t.json"), "run/0", stored)  # type: ignore[arg-type]
    assert own.note.startswith("t.json: it is not JSON")
    assert (own.file is not None, own.atif, own.bytes) == (True, None, 1)


async def test_valid_file_has_no_note() -> None:
    data = json.dumps(ATIF).encode()
    own = await collect(OneFile(data), AgentTrajectory(path="t.json"), "run/0", stored)  # type: ignore[arg-type]
    assert (own.note, own.format, own.bytes) == ("", "ATIF", len(data))
    assert own.file is not None
    assert own.atif is not None
