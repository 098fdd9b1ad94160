"""Objects that this process has read from remote storage, kept on its disk: if many sandboxes need the same layer, storage
is read once.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from agent_runtime.recording.store import PART_BYTES, SpoolFull, Store, write_spool
from agent_runtime.shared_tasks import has_failed, shared

MOST_KEPT_BYTES: Final = 1 << 30
"""Kept by one process. A layer of a Dockerfile's step has some 10 MB compressed; the largest, of a compiler, some 200."""


class Downloads:
    """The objects that were needed last, as they are stored. Their files have no names, so no crash leaves any behind."""

    def __init__(self, store: Store, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._store, self._most_bytes = store, most_bytes
        # The one that was needed longest ago first.
        self._tasks: dict[str, asyncio.Task[tempfile.SpooledTemporaryFile[bytes]]] = {}

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """Yield the object's bytes in pieces. Raises StorageError."""
        if self._store.is_local:
            async for piece in self._store.stream(key):
                yield piece
            return
        task = shared(self._tasks, key, partial(self._download, key))
        self._tasks[key] = self._tasks.pop(key)
        try:
            file = await asyncio.shield(task)
        except SpoolFull:
            async for piece in self._store.stream(key):
                yield piece
            return
        self._remove_excess()
        offset = 0
        while piece := await asyncio.to_thread(os.pread, file.fileno(), PART_BYTES, offset):
            offset += len(piece)
            yield piece

    def forget(self, key: str) -> None:
        """Read the object from storage again when it is needed next."""
        self._tasks.pop(key, None)

    async def _download(self, key: str) -> tempfile.SpooledTemporaryFile[bytes]:
        file = tempfile.SpooledTemporaryFile(max_size=0)  # noqa: SIM115 - its readers outlive this call
        file.rollover()
        async for piece in self._store.stream(key):
            if file.tell() + len(piece) > self._most_bytes:
                raise SpoolFull(file.tell(), self._most_bytes, "no more is kept")
            await asyncio.to_thread(write_spool, file, piece)
        file.flush()
        return file

    def _remove_excess(self) -> None:
        """Forget objects. A reader of one has its file until it is done."""
        kept = [(key, task) for key, task in self._tasks.items() if task.done() and not has_failed(task)]
        total = sum(os.fstat(task.result().fileno()).st_size for _, task in kept)
        for key, task in kept:
            if total <= self._most_bytes:
                return
            total -= os.fstat(task.result().fileno()).st_size
            del self._tasks[key]
