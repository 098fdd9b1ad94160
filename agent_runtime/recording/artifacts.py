"""Artifacts to and from storage in bounded memory: zstd frames of at most 1 MiB of tar each.

The policy controls their content. A single frame of a few KB could unpack to a gigabyte of zeros.
"""

import contextlib
import tarfile
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Final

import zstandard

from agent_runtime.recording.segments import RecordCorrupt, compress
from agent_runtime.recording.store import Store
from rollout_api.records import ArtifactsRecord, Record

FRAME_BYTES: Final = 1 << 20


class ArtifactsTooLarge(Exception):
    """The artifacts exceed `verifier.artifactsLimit`."""


class Packer:
    """Compresses a tar and counts its bytes."""

    def __init__(self, chunks: AsyncIterator[bytes], limit: int) -> None:
        self._chunks, self._limit = chunks, limit
        self.size = 0
        """Bytes of the tar so far."""

    async def packed(self) -> AsyncIterator[bytes]:
        """Yield the compressed tar. Raises ArtifactsTooLarge, and errors of the source."""
        pending = bytearray()
        async for chunk in self._chunks:
            self.size += len(chunk)
            if self.size > self._limit:
                raise ArtifactsTooLarge(
                    f"the artifacts take more than verifier.artifactsLimit, {self._limit} bytes; "
                    "name fewer in verifier.artifacts, or raise the limit"
                )
            pending += chunk
            while len(pending) >= FRAME_BYTES:
                yield compress(bytes(pending[:FRAME_BYTES]))
                del pending[:FRAME_BYTES]
        if pending:
            yield compress(bytes(pending))


async def unpacked(key: str, packed: AsyncIterator[bytes], size: int | None) -> AsyncIterator[bytes]:
    """Yield the tar of `size` bytes in pieces; None if the size is unknown. Raises RecordCorrupt if it is damaged or
    incomplete.
    """
    frame = zstandard.ZstdDecompressor().decompressobj()
    found, whole = 0, True
    async for chunk in packed:
        while chunk:
            try:
                piece = frame.decompress(chunk)
            except zstandard.ZstdError as error:
                raise RecordCorrupt(key, f"incomplete or damaged zstd frames ({error})") from error
            found += len(piece)
            if piece:
                yield piece
            whole = frame.eof
            chunk = frame.unused_data if whole else b""
            if whole:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if found != (found if size is None else size) or not whole:
        raise RecordCorrupt(key, f"{found} bytes unpacked, but {'more' if size is None else size} were stored")


@contextlib.asynccontextmanager
async def open_artifacts(store: Store, records: Sequence[Record]) -> AsyncIterator[tarfile.TarFile | None]:
    """Return the archive of an attempt's artifacts; None if it stored none. Raises RecordCorrupt."""
    stored = next((record for record in records if isinstance(record, ArtifactsRecord) and record.key), None)
    if stored is None or stored.key is None:
        yield None
        return
    with tempfile.SpooledTemporaryFile(FRAME_BYTES) as file:
        async for chunk in unpacked(stored.key, store.stream(stored.key), stored.bytes):
            file.write(chunk)
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                yield archive
        except tarfile.TarError as error:
            raise RecordCorrupt(stored.key, f"it is not a tar archive ({error})") from error
