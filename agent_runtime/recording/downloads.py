"""Objects that this process has read from remote storage, kept on its disk: if many sandboxes need the same layer, storage
is read once.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from agent_runtime.recording.store import PART_BYTES, SpoolFull, Store, disk_caches, spool_errors, write_spool
from agent_runtime.shared_tasks import has_failed, shared

MOST_KEPT_BYTES: Final = 1 << 30
"""Kept by one process. A layer of a Dockerfile's step has some 10 MB compressed; the largest, of a compiler, some 200."""

MOST_KEPT: Final = 128
"""Objects kept by one process. Each has an open file, of which a process usually may have 1,024."""


@dataclass
class _Kept:
    """An object on disk. Its file has no name, so closing it frees its space; that is done after the last reader."""

    file: tempfile.SpooledTemporaryFile[bytes]
    readers: int = 0

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size


class Downloads:
    """The objects that were needed last, as they are stored. Their files have no names, so no crash leaves any behind."""

    def __init__(self, store: Store, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._store, self._most_bytes = store, most_bytes
        # The one that was needed longest ago first.
        self._tasks: dict[str, asyncio.Task[_Kept]] = {}
        disk_caches.add(self)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """Yield the object's bytes in pieces. Raises StorageError."""
        if self._store.is_local:
            async for piece in self._store.stream(key):
                yield piece
            return
        task = shared(self._tasks, key, partial(self._download, key))
        self._tasks[key] = self._tasks.pop(key)
        try:
            kept = await asyncio.shield(task)
        except SpoolFull:
            async for piece in self._store.stream(key):
                yield piece
            return
        kept.readers += 1
        try:
            self._remove_excess()
            offset = 0
            while piece := await asyncio.to_thread(os.pread, kept.file.fileno(), PART_BYTES, offset):
                offset += len(piece)
                yield piece
        finally:
            kept.readers -= 1
            if not kept.readers and self._tasks.get(key) is not task:
                kept.file.close()

    def forget(self, key: str) -> None:
        """Read the object from storage again when it is needed next. A reader has its file until it is done."""
        task = self._tasks.pop(key, None)
        if task is not None and task.done() and not has_failed(task) and not task.result().readers:
            task.result().file.close()

    def release(self) -> None:
        """Forget all complete objects. Those that are being read keep their space until their readers are done."""
        for key, _ in self._complete():
            self.forget(key)

    def _complete(self) -> list[tuple[str, _Kept]]:
        return [(key, task.result()) for key, task in self._tasks.items() if task.done() and not has_failed(task)]

    async def _download(self, key: str) -> _Kept:
        with spool_errors(0):
            file = tempfile.SpooledTemporaryFile(max_size=0)  # noqa: SIM115 - its readers outlive this call
            file.rollover()
        try:
            async for piece in self._store.stream(key):
                if file.tell() + len(piece) > self._most_bytes:
                    raise SpoolFull(file.tell(), self._most_bytes, "no more is kept")
                await asyncio.to_thread(write_spool, file, piece, is_cache=True)
            with spool_errors(file.tell()):
                file.flush()
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()
            raise
        return _Kept(file)

    def _remove_excess(self) -> None:
        complete = self._complete()
        total = sum(kept.size() for _, kept in complete)
        for number, (key, kept) in enumerate(complete):
            if total <= self._most_bytes and len(complete) - number <= MOST_KEPT:
                return
            total -= kept.size()
            self.forget(key)
