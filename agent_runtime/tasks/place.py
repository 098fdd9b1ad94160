"""Location of a task source: its bytes, from a local file or from object storage."""

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError, PreconditionError

from agent_runtime.recording.remote_objects import SCHEMES, remote_objects
from agent_runtime.recording.store import first_line
from agent_runtime.tasks.problems import TaskProblem, TaskSourceError, TaskSourceUnavailable
from rollout_api.tasks import Dockerfiles, TaskSource

CHUNK_BYTES = 8 << 20
"""Bytes of one request when an object is read sequentially."""


@dataclass(frozen=True)
class SourcePlace:
    """A `tasks.from` with everything that readers need."""

    source: TaskSource
    base_dir: Path
    """Base of a relative `uri`: the manifest's folder."""
    environ: Mapping[str, str] = field(repr=False)
    """The environment in which the job runs, with the credentials of object storage."""
    image_template: str | None = None
    """`tasks.imageTemplate`."""
    dockerfiles: Dockerfiles | None = None
    """`tasks.dockerfiles`."""

    @property
    def uri(self) -> str:
        """Return the URI as written, which names the source in messages."""
        return self.source.uri

    @property
    def local_path(self) -> Path | None:
        """Return the file or folder; None in object storage."""
        scheme, separator, path = self.uri.partition("://")
        if not separator:
            return self.base_dir / Path(self.uri).expanduser()
        return self.base_dir / path if scheme == "file" else None

    @property
    def is_parquet(self) -> bool:
        """Whether the name is that of a Parquet file."""
        return self.uri.endswith(".parquet")

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the file. Raises only TaskSourceError that names it."""
        with self.open() as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """Return the file for libraries that seek in it. Raises only TaskSourceError that names it."""
        with self.readable():
            path = self.local_path
            if path is None:
                folder, _, name = self.uri.rpartition("/")
                yield _Remote(self._open_store(folder), name)
            else:
                with path.open("rb") as file:
                    yield file

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Convert errors of files and storage into TaskSourceError that names the source.

        TaskSourceUnavailable if object storage is unavailable or refuses.
        """
        try:
            yield
        except TaskSourceError:
            raise
        except OSError as error:
            where = "" if error.filename in (None, str(self.local_path)) else f"{error.filename}: "
            kind = TaskSourceUnavailable if "NoSuchBucket" in str(error) else TaskSourceError
            raise self.unreadable(where + (error.strerror or str(error)), kind) from error
        except PreconditionError as error:
            reason = "it was replaced while it was read; run the same command again"
            raise self.unreadable(reason, TaskSourceUnavailable) from error
        except (BaseError, ValueError) as error:
            kind = TaskSourceUnavailable if isinstance(error, BaseError) else TaskSourceError
            raise self.unreadable(first_line(error), kind) from error

    def refused(self, message: str, kind: type[TaskSourceError] = TaskSourceError) -> TaskSourceError:
        """Return a problem of the source as a whole."""
        return kind([TaskProblem(self.uri, None, message)])

    def unreadable(self, reason: str, kind: type[TaskSourceError] = TaskSourceError) -> TaskSourceError:
        """Return the error for a source that cannot be used as a whole."""
        return self.refused(f"cannot be read: {reason}; see tasks.from.uri", kind)

    def store_below(self) -> Any:
        """Return object storage below the `uri`, which is a folder there."""
        return self._open_store(self.uri.rstrip("/"))

    def _open_store(self, folder: str) -> Any:
        scheme, _, place = folder.partition("://")
        if scheme not in SCHEMES:
            raise ValueError(f"scheme {scheme!r} is not supported, expected {', '.join(SCHEMES)}, file or a path")
        bucket, _, prefix = place.partition("/")
        return remote_objects(scheme, bucket, self.environ, prefix=prefix or None)


class _Remote(io.RawIOBase):
    """An object as a file. Each read is one request for its bytes only: Parquet is read in small, distant pieces.

    All of them are of the same version. A read raises PreconditionError after the object was replaced.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name, self._position = store, name, 0
        meta = obstore.head(store, name)
        self._size, self._version = int(meta["size"]), meta["e_tag"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._size, self._position + len(buffer))
        if end <= self._position:
            return 0
        wanted: obstore.GetOptions = {"range": (self._position, end), "if_match": self._version}
        found = bytes(obstore.get(self._store, self._name, options=wanted).bytes())
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)
