"""A task's folder as tar.gz: packed for a server, and unpacked there from an untrusted sender."""

import gzip
import io
import tarfile
import zlib
from pathlib import Path
from typing import Final

from agent_runtime.recording.extraction import UnsafeMember, extract_member

UNPACKED_BYTES: Final = 1 << 30
"""Most bytes of a task's files, of which each has at most 64 MiB (docs/harbor.md). Larger ones belong in its image."""
MEMBERS: Final = 20_000
"""Most entries of an archive."""
DEPTH: Final = 100
"""Most folders above an entry. Python walks and removes folders recursively and fails at 1,000."""
BETWEEN_BYTES: Final = 1 << 20
"""Limit of bytes outside of file contents: the headers of one entry, which `tarfile` reads into memory, or the end of
the tar.
"""


class BadArchive(ValueError):
    """An archive that is refused; the message says why."""


class _Unzipped(gzip.GzipFile):
    """Limits the bytes that are read to `left`. Unlike in `tarfile`, the checksum at the end is verified."""

    left = BETWEEN_BYTES

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.left -= len(data)
        if self.left < 0:
            raise BadArchive(f"the archive has more than {BETWEEN_BYTES} bytes outside of files")
        return data


def pack(folder: Path) -> bytes:
    """Return the folder as tar.gz under its own name, as PR #83's client sends it. Raises FileNotFoundError."""
    real = folder.resolve()
    if not real.is_dir():
        raise FileNotFoundError(f"{folder}: the task folder does not exist")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        tar.add(real, arcname=real.name)
    return buffer.getvalue()


def unpack(archive: Path, folder: Path) -> None:
    """Unpack below a folder. Raises BadArchive for an archive that is damaged, leaves the folder, has special files, or
    is too large.
    """
    total, real = 0, {folder}
    try:
        with _Unzipped(archive) as content, tarfile.open(fileobj=content, mode="r|", errorlevel=1) as tar:
            for number, member in enumerate(tar):
                if number >= MEMBERS:
                    raise BadArchive(
                        f"the archive has more than {MEMBERS} entries; put large files into the task's image"
                    )
                total += max(member.size, 0)
                if total > UNPACKED_BYTES:
                    raise BadArchive(
                        f"the archive has more than {UNPACKED_BYTES} bytes unpacked; put large files into the "
                        "task's image"
                    )
                if not (member.isreg() or member.isdir()):
                    raise BadArchive(f"{member.name!r} is neither a file nor a folder; replace it by a file")
                if member.name.count("/") > DEPTH:
                    raise BadArchive(
                        f"{member.name[:DEPTH]!r} … is nested in more than {DEPTH} folders; remove it from the archive"
                    )
                content.left = member.size + BETWEEN_BYTES
                extract_member(tar, member, folder, real)
            # read up to the checksum, because a tar that is truncated in a header looks complete
            while content.read(BETWEEN_BYTES):
                pass
    except BadArchive:
        raise
    except UnsafeMember as error:
        raise BadArchive(f"{error}; remove it from the archive") from error
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error) as error:
        raise BadArchive(f"the archive is not a tar.gz of a task's folder: {error}") from error
