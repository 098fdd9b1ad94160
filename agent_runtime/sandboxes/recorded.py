"""Executors that outlive the process that started them: each has a record, with which the next process finds it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from agent_runtime.sandboxes.base import ImageLayers, SandboxFailure
from agent_runtime.sandboxes.hosting import Executors, HostedProvider, Hosting
from agent_runtime.sandboxes.images.files import ImageError
from agent_runtime.sandboxes.images.store import ImageStore
from rollout_api.sandbox import SandboxTemplate

_ANSWER_SECONDS: Final = 5.0
"""Time for an executor to answer at the end of a stopped run, for which a person waits."""
RecordT = TypeVar("RecordT")
"""A dataclass of plain values."""


class ExecutorRecords(Generic[RecordT]):
    """A folder with one JSON file for each executor, readable only by its owner, because records hold tokens."""

    def __init__(self, folder: Path, kind: type[RecordT]) -> None:
        self.folder, self._kind = folder, kind

    def names(self) -> list[str]:
        """Return the names of all executors with a record."""
        return [path.stem for path in self.folder.glob("*.json")]

    def path(self, name: str) -> Path:
        """Return the file of a record."""
        return self.folder / f"{name}.json"

    def read(self, name: str) -> RecordT | None:
        """Return the record; None if there is no file. Raises SandboxFailure for a file that is not a record."""
        path = self.path(name)
        try:
            return self._kind(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise SandboxFailure(
                "SandboxLost", f"{path} is not a record of an executor ({error}); remove it and start again"
            ) from error

    def write(self, name: str, record: RecordT) -> Path:
        """Write the record atomically; return the path of its file."""
        path = self.path(name)
        partial = path.with_suffix(".partial")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as target:
            target.write(json.dumps(vars(record)))
        partial.replace(path)
        return path


class RecordedProvider(HostedProvider):
    """Base of providers whose executors have records.

    `run_dir` has the records; at most `places` workspaces exist at once; paths of images start at `base_dir`.
    """

    def __init__(
        self,
        run_dir: Path,
        template: SandboxTemplate,
        *,
        places: int,
        folder: str,
        base_dir: Path,
        images: ImageStore | None,
    ) -> None:
        super().__init__()
        self._records = run_dir / folder
        self._template, self._places = template, places
        self._images = images or ImageStore(base_dir)
        self._executors: Executors | None = None
        """Finds every executor of this run; None until `open`."""

    def _prepare(self) -> None:
        """Run the first step of `open`."""
        self._images.stopping.clear()
        self._records.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _hosting(
        self, mode: str, reason: str | None, environment: dict[str, str] | None = None, **described: Any
    ) -> Hosting:
        return Hosting(
            mode=mode,
            places=self._places,
            idle_seconds=self._template.idle_seconds,
            environment=environment or {},
            description={"provider": self.name, "mode": mode, "modeReason": reason, **described},
            provider=self.name,
        )

    async def image_layers(self, image: str) -> ImageLayers:
        """See ImageSource."""
        try:
            return await asyncio.to_thread(self._images.layers, image)
        except ImageError as error:
            raise SandboxFailure("ImageUnavailable", str(error)) from error

    async def close(self, *, keep: bool = False, at_most: float | None = None) -> None:
        """See SandboxProvider."""
        self._images.stopping.set()
        await self._release()
        if self._executors is None:
            return
        names = self._executors.names()
        if not keep:
            for name in names:
                if (executor := await self._executors.find(name)) is not None:
                    await executor.stop()
        elif at_most is not None:
            await asyncio.gather(*(self._end_after(self._executors, name, at_most) for name in names))

    async def _end_after(self, executors: Executors, name: str, seconds: float) -> None:
        """Have an executor end after this time. One that does not answer ends after its `idleSeconds`, so that it does
        not delay the end of this process.
        """
        with contextlib.suppress(SandboxFailure, TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                if (executor := await executors.find(name)) is not None:
                    await executor.client.end_after(seconds)
                    await executor.client.close()
