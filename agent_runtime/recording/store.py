"""Object storage below one prefix: create-only writes with a definite outcome, and retries while storage is
unavailable. All guarantees of the recording depend on `Store.create`: if several writers create one key, exactly one
succeeds, even if responses are lost.
"""

import asyncio
import atexit
import contextlib
import errno
import hashlib
import os
import random
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, PreconditionError
from obstore.store import LocalStore, MemoryStore

from agent_runtime.recording import local_files, obstore_threads
from agent_runtime.recording.remote_objects import SCHEMES, RemoteObjects, remote_objects
from rollout_api.records import ObjectDigest

atexit.register(obstore_threads.leave_python)

Objects = RemoteObjects | LocalStore | MemoryStore
T = TypeVar("T")

PATIENCE_SECONDS: Final = 600.0
"""How long an operation is retried while storage is unavailable: longer than a rolling restart of a self-hosted store.
"""

PART_BYTES: Final = 8 << 20
"""Size of a part of a multipart upload, and of a piece of a streamed read. S3 accepts 10,000 parts, so 80 GB at this
size.
"""

INLINE_BYTES: Final = 1 << 20
"""In a local folder, objects up to this size are written on the event loop's thread, which takes a quarter of the CPU
time.
"""

READS_AT_ONCE: Final = 64
"""Concurrent reads. They hide a store's latency of 20–40 ms, and stay far below the 256 descriptors that some systems
allow.
"""

LARGE_AT_ONCE: Final = 4
"""Concurrent requests of a store with more than `INLINE_BYTES`. Each has `REQUEST_SECONDS`, and over a slow link too
many of them would repeatedly time out.
"""

SPARED_FRACTION: Final = 0.05
"""Fraction of this machine's disk that large objects waiting for upload must leave free, because the run also needs it.
"""

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 15.0

TRANSIENT_CODES: Final[Mapping[str, str]] = {
    "RequestTimeout": "",
    "RequestTimeTooSkewed": "set this machine's clock",
    "ExpiredToken": "renew the credentials",
    "ExpiredTokenException": "renew the web identity token",
    "TokenRefreshRequired": "renew the credentials",
    "IDPCommunicationError": "",
    "BadDigest": "",
    "XAmzContentSHA256Mismatch": "",
    "IncompleteBody": "",
    "NoSuchUpload": "",
    "OperationAborted": "",
    "ConditionalRequestConflict": "",
    "SlowDown": "",
    "Throttling": "",
    "ThrottlingException": "",
    "RequestLimitExceeded": "",
    "InternalError": "",
    "ServiceUnavailable": "",
}
"""Error codes of S3 and STS that are retried, whatever the status. The value is the remedy if retries fail."""

FINAL_CODES: Final[Mapping[str, str]] = {
    "AccessDenied": "allow these credentials to list the bucket, and to get and put objects below the prefix",
    "NoSuchBucket": "create the bucket, or correct output.uri",
    "InvalidAccessKeyId": "correct AWS_ACCESS_KEY_ID",
    "XAdminUserNotFound": "correct AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "correct AWS_SECRET_ACCESS_KEY",
    "InvalidToken": "correct AWS_SESSION_TOKEN",
    "AuthorizationHeaderMalformed": "set AWS_REGION to the region of the bucket",
    "PermanentRedirect": "set AWS_REGION to the region of the bucket",
    "NotImplemented": "use storage that supports create-only writes (If-None-Match: *)",
    "QuotaExceeded": "make room in the bucket, and run the same command again to resume",
}
"""Error codes that are not retried, with the remedy. Other codes are final depending on their status."""

_ABSENT_CODES: Final = frozenset({"", "NoSuchKey", "BlobNotFound"})
_TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429})
_UNEXPLAINED_STATUSES: Final = frozenset({400, 403})
"""Statuses that, without a code (as in every response to HEAD), may mean a time-out or an expired token as well as a
refusal.
"""
_TRANSIENT_OS_ERRORS: Final = frozenset({errno.EAGAIN, errno.EMFILE, errno.ESTALE})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


_METADATA_SERVICE: Final = "169.254.169.254"
"""Address at which a machine in a cloud gets credentials. Stores ask there if the environment has none."""


class StorageError(Exception):
    """Storage refuses a request permanently. The message names the URI and the remedy."""


class SpoolFull(StorageError):
    """This machine's disk has no space for objects that wait for upload. `is_own`: these objects use more than half of
    that disk.
    """

    def __init__(self, bytes_: int, total: int, problem: str) -> None:
        super().__init__(
            f"{tempfile.gettempdir()}: {bytes_} bytes wait there for storage, on a disk of {total} bytes, and "
            f"{problem}; "
            "make room or set TMPDIR"
        )
        self.is_own = 2 * bytes_ > total > 0


class StorageUnavailable(StorageError):
    """Storage did not respond, or was busy, until the time limit."""


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """One object of a listing. `key` is relative to the store; `modified` is Unix seconds."""

    key: str
    size: int
    modified: float


# Defined here because `list` inside Store is a method.
Listing = list[ObjectMeta]
Names = list[str]
Contents = list[bytes | None]
Answers = tuple[type[Exception], ...]
RequestObserver = Callable[[str, float, bool], None]
"""Called after each request: operation, seconds, whether it failed."""

_TAKEN: Final[Answers] = (AlreadyExistsError, FileExistsError, PreconditionError)


def local_folder(uri: str) -> Path | None:
    """Return the folder of this machine that a storage URI names; None for other schemes than `file`."""
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else uri).expanduser().absolute()


@dataclass(frozen=True)
class Store:
    """Objects below one prefix of a bucket, container or folder."""

    uri: str
    objects: Objects
    prefix: str = ""
    """Empty, or ending with a slash."""
    patience_seconds: float = PATIENCE_SECONDS
    on_request: RequestObserver = lambda operation, seconds, failed: None
    made_by: str = ""
    """Key that alone creates the folder `prefix` on a disk; empty if any key does."""
    _large: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(LARGE_AT_ONCE), repr=False, compare=False
    )

    @classmethod
    def open(cls, uri: str, environ: Mapping[str, str], *, patience_seconds: float = PATIENCE_SECONDS) -> "Store":
        """Open storage at `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `file://` or a local
        path.

        `environ` has the settings under each vendor's names (AWS_ACCESS_KEY_ID and so on). A local folder is created.
        Remote storage is not contacted yet (`probe` does). Raises StorageError.
        """
        parts = urlsplit(uri)
        prefix = f"{path}/" if (path := parts.path.strip("/")) else ""
        try:
            if parts.scheme in SCHEMES:
                if not parts.netloc:
                    raise StorageError(
                        f"{parts.scheme}://: the bucket is missing; expected {parts.scheme}://BUCKET/PREFIX"
                    )
                objects = remote_objects(parts.scheme, parts.netloc, environ)
                return cls(uri.rstrip("/"), objects, prefix, patience_seconds)
            if (folder := local_folder(uri)) is None:
                raise StorageError(f"{uri}: scheme {parts.scheme!r} is not known; use s3, gs, az, file or a local path")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                file = next(path for path in (folder, *folder.parents) if path.is_file())
                raise StorageError(f"{uri}: {file} is a file, expected a folder; change the URI") from error
            return cls(uri.rstrip("/"), LocalStore(folder), "", patience_seconds)
        except (BaseError, OSError, ValueError) as error:
            raise StorageError(f"{uri}: cannot be opened: {first_line(error)}") from error

    def below(self, folder: str, made_by: str = "") -> "Store":
        """Return the same storage, one folder deeper. On a disk, only the key `made_by`, if given, creates that folder: if
        it is moved, deleted or unmounted, other writes wait for it instead of making another one.
        """
        return replace(self, uri=f"{self.uri}/{folder}", prefix=f"{self.prefix}{folder}/", made_by=made_by)

    async def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key exists. Return True if the object has `data`, False if it has other content.

        Writing the same bytes again succeeds, so a lost response is harmless. A caller that must distinguish its write
        from an equal one of another writer adds a random value.
        """
        pauses = self._pauses(key)
        while True:
            try:
                await self._retried("create", key, lambda: self._put(key, data, "create"), _TAKEN)
                return True
            except _TAKEN:
                existing = await self.get(key)
            if existing is not None:
                return existing == data
            # S3 answers 409 while another conditional write of the key is in progress.
            await pauses.wait("another write of the same key did not end")

    async def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing an existing one."""
        await self._retried("put", key, lambda: self._put(key, data, "overwrite"))

    async def put_file(self, key: str, file: IO[bytes]) -> None:
        """Write an object of any size from a file, replacing an existing one. It becomes visible when complete."""

        async def write() -> None:
            async with self._large:
                file.seek(0)
                self._require_folder(key)
                await obstore.put_async(self.objects, self.prefix + key, file, chunk_size=PART_BYTES, max_concurrency=2)

        await self._retried("put", key, write)

    async def modified(self, key: str) -> float | None:
        """Return the Unix time at which an object was written, None if it does not exist."""
        meta = await self._head(key)
        return None if meta is None else meta["last_modified"].timestamp()

    async def get(self, key: str) -> bytes | None:
        """Return the object's bytes, or None if it does not exist."""

        async def read() -> bytes:
            if isinstance(self.objects, LocalStore):
                return bytes(obstore.get(self.objects, self.prefix + key).bytes())
            return bytes(await (await obstore.get_async(self.objects, self.prefix + key)).bytes_async())

        return await self._found("get", key, read)

    async def get_all(self, keys: Sequence[str]) -> Contents:
        """Yield the bytes of many objects, in the order of their keys, read concurrently."""
        found: dict[str, bytes | None] = {}
        waiting = iter(keys)

        async def read() -> None:
            for key in waiting:
                found[key] = await self.get(key)

        await asyncio.gather(*(read() for _ in range(min(len(keys), READS_AT_ONCE))))
        return [found[key] for key in keys]

    async def create_stream(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectDigest:
        """Write an object of any size in bounded memory; return its digest, whose key is the one given here.

        Up to 8 MiB it is one create-only write. A larger object is buffered on disk and becomes a multipart upload,
        which obstore cannot make conditional. So the key is checked first, and each writer must use its own key (the
        journal's keys include its epoch, which has a single holder). Nothing is visible before the last part. Raises
        errors of `chunks`, SpoolFull, and StorageError if another object exists.
        """
        digest, size = hashlib.sha256(), 0
        with tempfile.SpooledTemporaryFile(max_size=PART_BYTES) as spool:
            async for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                write_spool(spool, chunk)
            if size < PART_BYTES:
                spool.seek(0)
                created = await self.create(key, spool.read())
            elif created := await self._head(key) is None:
                await self.put_file(key, spool)
        if not created:
            raise StorageError(f"{self.uri}/{key}: a different object already has this key")
        return ObjectDigest(key=key, sha256=digest.hexdigest(), bytes=size)

    @property
    def is_local(self) -> bool:
        """Whether the objects are files of this machine."""
        return isinstance(self.objects, LocalStore)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """Yield the object's bytes in pieces, each piece retried separately. Raises StorageError if it does not exist."""
        if (meta := await self._head(key)) is None:
            raise StorageError(f"{self.uri}/{key}: the object does not exist")
        size = meta["size"]
        for start in range(0, size, PART_BYTES):
            end = min(start + PART_BYTES, size)

            async def read(start: int = start, end: int = end) -> bytes:
                async with self._large:
                    return bytes(await obstore.get_range_async(self.objects, self.prefix + key, start=start, end=end))

            yield await self._retried("get", key, read)

    async def list(self, prefix: str) -> Listing:
        """Yield all objects below a folder, at any depth. `prefix` is a whole folder name, not the beginning of one."""

        async def read() -> Listing:
            found: Listing = []
            async for batch in obstore.list(self.objects, prefix=(self.prefix + prefix) or None):
                found += [
                    ObjectMeta(item["path"].removeprefix(self.prefix), item["size"], item["last_modified"].timestamp())
                    for item in batch
                ]
            return found

        return await self._retried("list", prefix, read)

    async def folders(self, prefix: str = "") -> Names:
        """Return the names of the folders directly below a folder, sorted. The number of deeper objects does not affect
        its cost.
        """

        async def read() -> Names:
            listing = await obstore.list_with_delimiter_async(self.objects, prefix=(self.prefix + prefix) or None)
            return sorted(path.rsplit("/", 1)[-1] for path in listing["common_prefixes"])

        return await self._retried("list", prefix, read)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Missing ones, and ones behind a link in a local folder, are skipped."""
        for start in range(0, len(keys), 1000):  # S3 deletes at most 1,000 in one request
            batch = [self.prefix + key for key in keys[start : start + 1000]]

            async def remove(batch: Sequence[str] = batch) -> None:
                if isinstance(self.objects, LocalStore):
                    for path in batch:
                        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                            local_files.delete(self._folder, path)
                else:
                    await obstore.delete_async(self.objects, batch)

            await self._retried("delete", keys[start], remove)

    async def probe(self) -> None:
        """Check that this storage is reliable, before anything is recorded.

        Raises StorageError if it is not writable, or if a create-only write overwrites (some S3 servers ignore the
        condition): recording there would silently lose results.
        """
        if isinstance(self.objects, LocalStore) and not os.access(self._folder, os.W_OK | os.X_OK):
            raise StorageError(f"{self.uri}: {self._folder} is not writable; change its permissions or the URI")
        hasty = replace(self, patience_seconds=min(self.patience_seconds, 15))
        key = f".probe-{secrets.token_hex(8)}"
        if not await hasty.create(key, b"first"):
            raise StorageError(f"{self.uri}: {key} existed before it was written; this storage is unreliable")
        second = await hasty.create(key, b"second")
        existing = await hasty.get(key)
        # credentials without the right to delete, which protects records, leave 5 bytes behind
        with contextlib.suppress(StorageError):
            await hasty.delete([key])
        if second or existing != b"first":
            raise StorageError(
                f"{self.uri}: this storage ignores the condition If-None-Match: * and overwrites objects, so two "
                "runners could damage each other's records; use storage that supports the condition (AWS S3, "
                "GCS, Azure, "
                "versitygw, a recent MinIO or Ceph, or a local folder)"
            )

    @cached_property
    def _folder(self) -> str:
        """The folder of a LocalStore; computing it takes as long as writing a file."""
        assert isinstance(self.objects, LocalStore)
        return str(self.objects.prefix)

    def _require_folder(self, key: str) -> None:
        if self.made_by not in ("", key) and self.is_local and not os.path.isdir(f"{self._folder}/{self.prefix}"):
            raise OSError(errno.ESTALE, "the folder has been moved, deleted or unmounted; put it back")

    async def _put(self, key: str, data: bytes, mode: Literal["create", "overwrite"]) -> None:
        self._require_folder(key)
        if isinstance(self.objects, LocalStore) and len(data) <= INLINE_BYTES:
            if mode == "create" and local_files.is_plain(self.prefix + key):
                local_files.create(f"{self._folder}/{self.prefix}{key}", data)
            else:
                obstore.put(self.objects, self.prefix + key, data, mode=mode, use_multipart=False)
        else:
            async with self._large if len(data) > INLINE_BYTES else contextlib.nullcontext():
                await obstore.put_async(self.objects, self.prefix + key, data, mode=mode, use_multipart=False)

    async def _head(self, key: str) -> Any:
        async def read() -> Any:
            return await obstore.head_async(self.objects, self.prefix + key)

        return await self._found("head", key, read)

    async def _found(self, name: str, key: str, operation: Callable[[], Awaitable[T]]) -> T | None:
        """Return the operation's result, or None if the object does not exist."""
        try:
            return await self._retried(name, key, operation, (FileNotFoundError,))
        except FileNotFoundError as error:
            if _code(error) in _ABSENT_CODES:
                return None
            raise self._classified(key, error) from error  # e.g. NoSuchBucket; the object may exist

    async def _retried(self, name: str, key: str, operation: Callable[[], Awaitable[T]], answers: Answers = ()) -> T:
        """Return the operation's result, retried while storage is unavailable. Exceptions in `answers` are raised."""
        pauses = self._pauses(key)
        while True:
            started, failure = time.perf_counter(), None
            try:
                return await operation()
            except answers:
                raise
            except (BaseError, OSError) as error:
                failure = self._classified(key, error)
                if not isinstance(failure, StorageUnavailable):
                    raise failure from error
            finally:
                self.on_request(name, time.perf_counter() - started, failure is not None)
            await pauses.wait(str(failure))

    def _classified(self, key: str, error: Exception) -> StorageError:
        return classified(f"{self.uri}/{key}", error, on_disk=self.is_local)

    def _pauses(self, key: str) -> "_Pauses":
        return _Pauses(f"{self.uri}/{key}", self.patience_seconds, time.monotonic() + self.patience_seconds)


@dataclass
class _Pauses:
    """Growing pauses between retries, with full jitter so that many runners do not return at once."""

    where: str
    patience_seconds: float
    deadline: float
    pause: float = _FIRST_PAUSE_SECONDS

    async def wait(self, reason: str) -> None:
        """Sleep before the next attempt. Raises StorageUnavailable at the time limit."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise StorageUnavailable(
                f"{self.where}: storage did not accept the request for {self.patience_seconds:.0f} seconds. What is "
                f"recorded is kept; run the same command again to continue. The last answer: {reason}"
            )
        await asyncio.sleep(min(left, random.uniform(0, self.pause)))
        self.pause = min(self.pause * 2, _LONGEST_PAUSE_SECONDS)


class DiskCache(Protocol):
    """Copies of stored objects that this process keeps in the folder of its spools."""

    def release(self) -> None:
        """Delete the copies that are not being read."""


disk_caches = weakref.WeakSet[DiskCache]()
"""All caches of this process. They are released when an object that waits for storage needs their space."""


def write_spool(spool: tempfile.SpooledTemporaryFile[bytes], data: bytes, *, is_cache: bool = False) -> None:
    """Append to an object that waits for storage, on this machine's disk from `PART_BYTES` on. Raises SpoolFull.

    If the disk is full, caches are released first, except for an object that `is_cache` itself.
    """
    size = spool.tell() + len(data)
    is_short = _is_short(size)
    if is_short and not is_cache:
        for cache in disk_caches:
            cache.release()
        is_short = _is_short(size)
    if is_short:
        disk = shutil.disk_usage(tempfile.gettempdir())
        raise SpoolFull(size, disk.total, f"only {disk.free} are free")
    with spool_errors(size):
        spool.write(data)


def _is_short(size: int) -> bool:
    """Whether the spools' disk has too little space for an object to reach this size."""
    disk = shutil.disk_usage(tempfile.gettempdir())
    # Some in-memory file systems report a size of 0.
    return disk.total > 0 and size > PART_BYTES and disk.free - PART_BYTES < SPARED_FRACTION * disk.total


@contextlib.contextmanager
def spool_errors(size: int) -> Iterator[None]:
    """Convert errors of the disk, for an object of this size, into SpoolFull."""
    try:
        yield
    except OSError as error:
        total = shutil.disk_usage(tempfile.gettempdir()).total
        raise SpoolFull(size, total, f"more cannot be written ({error})") from error


def classified(where: str, error: Exception, *, on_disk: bool) -> StorageError:
    """Classify a failure: StorageUnavailable if a retry may help, StorageError if not.

    The store's own code decides, then the status, then the operating system's error number.
    """
    text, code, status = first_line(error), _code(error), _status(error)
    if code in TRANSIENT_CODES:
        return StorageUnavailable("; ".join(filter(None, (text, TRANSIENT_CODES[code]))))
    if code in FINAL_CODES:
        return StorageError(f"{where}: {text}; {FINAL_CODES[code]}")
    if status in _TRANSIENT_STATUSES:
        return StorageUnavailable(text)
    if status in _UNEXPLAINED_STATUSES and not code:
        return StorageUnavailable(f"{text} (without an error code); check credentials, region and bucket")
    if status is not None and 400 <= status < 500:
        return StorageError(f"{where}: the request was refused; check credentials, region and bucket: {text}")
    if "Received redirect without LOCATION" in text:
        return StorageError(f"{where}: the bucket is in another region; set AWS_REGION: {text}")
    number = _os_error(error, text) if on_disk else None
    if number in _FULL:
        return StorageError(f"{where}: the disk is full; make room and run the same command again to resume: {text}")
    if number is not None and number not in _TRANSIENT_OS_ERRORS:
        return StorageError(f"{where}: the folder refuses it; check its permissions and content: {text}")
    if not isinstance(error, GenericError | OSError):
        return StorageError(f"{where}: {text}")
    return StorageUnavailable(text)


def _code(error: Exception) -> str:
    """Return the store's error code, from the XML of a refused request or the line on a refused deletion; empty without
    one.
    """
    found = re.search(r"<Code>(\w+)</Code>|\(code: (\w+)\)", str(error))
    return (found[1] or found[2]) if found else ""


def _status(error: Exception) -> int | None:
    found = re.search(r"status code: (\d{3})", str(error))
    return None if found is None else int(found[1])


def _os_error(error: Exception, text: str) -> int | None:
    """Return the errno of a failure, which obstore includes in its message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", text)
    return int(found[1]) if found else None


def first_line(error: Exception) -> str:
    """Return what an error of object storage says, without its dump of internal structures."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    # obstore appends a dump of its internal structures after an empty line. The store's own XML answer may precede it; its
    # code and message are the most useful parts: NoSuchBucket, InvalidAccessKeyId.
    text = str(error)
    answer = re.search(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?", text)
    told = f" {': '.join(filter(None, answer.groups()))}" if answer else ""
    line = text.split("\n", 1)[0].partition("<?xml")[0].rstrip() + told
    if _METADATA_SERVICE in line:
        return f"the environment has no credentials, such as AWS_ACCESS_KEY_ID, and neither has this machine ({line})"
    return line
