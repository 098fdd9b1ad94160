"""The user's cache of unpacked images. Layers that several images share are stored once.

~/.cache/agent-rollouts/unpacked/     only readable by its owner, because programs in it may be set-uid
        layers/CHAIN          a layer over those below it; CHAIN is the image specification's ChainID, which stands for both
        layers/CHAIN.partial  being unpacked, by whoever holds locks/CHAIN; left by a kill, it is removed by the next one
        pulled/NAME           what a name of a registry came to, as an OCI layout

A folder gets its final name by a rename after all digests were verified, so a folder with that name is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import zstandard

from agent_runtime.executor.init.trees import remove
from agent_runtime.sandboxes.base import ImageLayers, SandboxFailure, StoredLayer
from agent_runtime.sandboxes.images.files import (
    STANDARD_PATH,
    ImageConfig,
    ImageError,
    Layer,
    OnDisk,
    open_files,
    read_image,
)
from agent_runtime.sandboxes.images.layer import unpack_layer

# Prefixes of image locations on disk, as in container tools: TRANSPORT:PATH[:NAME], containers-transports(5).
_TRANSPORTS = ("oci", "oci-archive", "docker-archive")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_READ_BYTES = 1 << 20
NO_CONFIG = ImageConfig(env={}, user=None, working_dir=None)


@dataclass(frozen=True)
class UnpackedImage:
    """An image whose folders can be mounted."""

    name: str
    """Name in the manifest."""
    digest: str | None
    """Digest of its configuration; None for a plain folder."""
    layers: Sequence[Path]
    """The topmost first, as overlayfs needs them."""
    config: ImageConfig

    @property
    def key(self) -> str:
        """Return a name for resources that all users of this image share; safe in file names."""
        described = f"{self.digest} {[str(layer) for layer in self.layers]} {self.config}"
        return hashlib.sha256(described.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Place:
    """Location of an image on disk, and which of the images there."""

    path: Path
    name: str | None = None


def place_of(reference: str, base_dir: Path) -> Place | None:
    """Return the location on disk that `sandbox.image` names; None for the name of an image in a registry."""
    transport, colon, rest = reference.partition(":")
    if colon and transport in _TRANSPORTS:
        path, _, name = rest.partition(":")
        return Place(base_dir / path, name or None)
    return Place(base_dir / reference) if reference.startswith(("/", "./", "../", "~/")) else None


def default_store() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-rollouts" / "unpacked"


@dataclass
class ImageStore:
    """Unpacks images into `folder`. Relative paths start at `base_dir`. `stop` cancels unpacking."""

    base_dir: Path
    folder: Path = field(default_factory=default_store)
    may_be_folder: Callable[[str], bool] = lambda reference: True
    """Whether this image may be a plain folder, all of which workspaces can read."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def unpack(self, reference: str) -> UnpackedImage:
        """Return the image's unpacked layers; blocks until they are unpacked. Raises ImageError with a remedy."""
        place = self._place(reference)
        if _is_root(place.path):
            if not self.may_be_folder(reference):
                raise ImageError(
                    f"image {reference}: is a folder of this machine, which a task of a data set or stream may not name. "
                    "Name it in tasks.folderImages, tasks.imageTemplate or tasks.dockerfiles.bases, or make an archive of it"
                )
            return UnpackedImage(reference, None, [place.path.resolve()], NO_CONFIG)
        with open_files(place.path) as files:
            image = read_image(files, place.name)
            return UnpackedImage(reference, image.digest, self._layers(image), image.config)

    def _place(self, reference: str) -> Place:
        place = place_of(os.path.expanduser(reference) if reference.startswith("~/") else reference, self.base_dir)
        if place is None:
            place = Place(self._pulled(reference))
        if not place.path.exists():
            raise ImageError(
                f"image {reference}: {place.path} does not exist; correct sandbox.image, or build the images of "
                "tasks.imageTemplate with `rolloutctl images MANIFEST`"
            )
        return place

    def layers(self, reference: str) -> ImageLayers:
        """Return the image's layers, from which a root can be made. Blocks while it is pulled. Raises ImageError."""
        place = self._place(reference)
        if _is_root(place.path):
            raise ImageError(
                f"image {reference}: a plain folder has no layers; make an archive of it, for example with `buildah "
                "push IMAGE oci-archive:FILE`"
            )
        with open_files(place.path) as files:
            image = read_image(files, place.name)
            layers = [
                StoredLayer(layer.diff_id, image.files.size(layer.file), partial(self._tar, place, layer))
                for layer in image.layers
            ]
        config = image.config
        return ImageLayers(
            layers, {"PATH": ":".join(STANDARD_PATH), **config.env}, config.user, config.entrypoint, config.command
        )

    async def _tar(self, place: Place, layer: Layer) -> AsyncIterator[bytes]:
        chunks = self._tar_chunks(place, layer)
        try:
            while chunk := await asyncio.to_thread(next, chunks, b""):
                yield chunk
        except (ImageError, EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
            raise SandboxFailure("ImageUnavailable", f"image {place.path}: {error}; fetch it again") from error

    def _tar_chunks(self, place: Place, layer: Layer) -> Iterator[bytes]:
        with open_files(place.path) as files, files.open(layer.file) as blob:
            tar = _Hashed(_uncompressed(io.BufferedReader(blob, _READ_BYTES)))
            content = io.BufferedReader(tar, _READ_BYTES)
            while chunk := content.read(_READ_BYTES):
                yield chunk
            if tar.digest != layer.diff_id:
                raise ImageError(f"a layer has the digest {tar.digest}, expected {layer.diff_id}")

    def has(self, reference: str) -> bool:
        return (self.folder / "pulled" / _file_name(reference)).exists()

    def _layers(self, image: OnDisk) -> list[Path]:
        unpacked: list[Path] = []
        chain = ""
        for layer in image.layers:
            chain = chain_id(chain, layer.diff_id)
            unpacked.insert(0, self._layer(image, layer, chain, unpacked))
        return unpacked

    def _layer(self, image: OnDisk, layer: Layer, chain: str, below: Sequence[Path]) -> Path:
        # Without root, unpacked files have no owners, so root and other users have separate copies.
        owners = os.geteuid() == 0

        def make(folder: Path) -> None:
            folder.mkdir(mode=0o755)
            try:
                with image.files.open(layer.file) as blob:
                    _unpack_blob(blob, layer, folder, below, owners=owners, stopping=self.stopping)
            except ImageError as error:
                raise ImageError(f"image {image.files.place}: layer {layer.diff_id[:19]}…: {error}") from error

        name = chain.removeprefix("sha256:") + ("" if owners else ".ownerless")
        return self._made(self.folder / "layers" / name, make)

    def _pulled(self, reference: str) -> Path:
        """Return a layout with the image of that name, pulled if missing, as with IfNotPresent in a cluster."""

        def pull(folder: Path) -> None:
            skopeo = shutil.which("skopeo")
            if skopeo is None:
                raise ImageError(
                    f"image {reference}: skopeo, which pulls images without Docker, is not installed; install it (`apt "
                    "install skopeo`), or give the image as an archive or folder (docs/images-on-a-laptop.md), or run "
                    "with --provider Container where Docker or podman is"
                )
            # --override-os: on other systems than Linux it would look for that system's image.
            command = [skopeo, "--override-os", "linux", "copy", "--quiet"]
            command += [f"docker://{_without_tag(reference)}", f"oci:{folder}:image"]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ImageError(f"image {reference} cannot be pulled: {pull_problem(reference, done.stderr)}")

        return self._made(self.folder / "pulled" / _file_name(reference), pull)

    def _made(self, place: Path, make: Callable[[Path], None]) -> Path:
        """Return the folder. If missing, `make` creates it under a temporary name, and it is renamed when complete."""
        if place.exists():
            return place
        with self._alone(place.name):
            if not place.exists():
                partial = place.with_name(f"{place.name}.partial")
                remove(partial)
                try:
                    make(partial)
                except ImageError:
                    remove(partial)
                    raise
                partial.rename(place)
        return place

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Lock the name against other processes; the lock ends with its process."""
        for folder in ("layers", "locks", "pulled"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        with (self.folder / "locks" / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _without_tag(reference: str) -> str:
    """Return a name that has a digest without its tag, as Docker reads it. skopeo refuses both together."""
    name, at, digest = reference.partition("@")
    above, slash, last = name.rpartition("/")
    return f"{above}{slash}{last.partition(':')[0]}{at}{digest}" if at else reference


def chain_id(below: str, diff_id: str) -> str:
    """Return the identifier of a layer and all layers below it:
    https://github.com/opencontainers/image-spec/blob/v1.1.0/config.md.
    """
    return f"sha256:{hashlib.sha256(f'{below} {diff_id}'.encode()).hexdigest()}" if below else diff_id


def _unpack_blob(
    blob: IO[bytes], layer: Layer, folder: Path, below: Sequence[Path], *, owners: bool, stopping: threading.Event
) -> None:
    packed = _Hashed(blob)
    source = io.BufferedReader(packed, _READ_BYTES)
    tar = _Hashed(_uncompressed(source))
    content = io.BufferedReader(tar, _READ_BYTES)
    try:
        unpack_layer(content, folder, below, owners=owners, stopped=stopping.is_set)
        for stream in (content, source):
            # The digest includes padding, which tarfile does not read.
            while stream.read(_READ_BYTES):
                pass
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise ImageError(f"cannot be read completely: {error}; fetch the image again") from error
    for found, expected in ((packed.digest, layer.blob_digest), (tar.digest, layer.diff_id)):
        if expected is not None and found != expected:
            raise ImageError(f"has the digest {found}, expected {expected}; fetch the image again")


def _uncompressed(stream: io.BufferedReader[Any]) -> Any:
    head = stream.peek(4)
    if head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=stream)
    if head.startswith(_ZSTD):
        return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    return stream


class _Hashed(io.RawIOBase):
    """A stream that is read from start to end and then has a digest."""

    def __init__(self, source: Any) -> None:
        self._source, self._hash = source, hashlib.sha256()

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        self._hash.update(data)
        buffer[: len(data)] = data
        return len(data)


def _is_root(path: Path) -> bool:
    return path.is_dir() and not (path / "oci-layout").exists() and not (path / "index.json").exists()


def _file_name(reference: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", reference)[:80]
    return f"{readable}-{hashlib.sha256(f'{reference} {platform.machine()}'.encode()).hexdigest()[:12]}"


def pull_problem(reference: str, log: str) -> str:
    """Return why skopeo failed, without the form of its log, and what to do."""
    said = re.findall(r'msg="((?:[^"\\]|\\.)*)"', log)
    why = said[-1].replace('\\"', '"') if said else log.strip()
    if reference.endswith((".tar", ".tar.gz", ".tgz")):
        return f"{why[-1000:]}; an archive is a path, so write ./{reference}"
    return f"{why[-1000:]}; check its name and the network, or use an archive (docs/images-on-a-laptop.md)"
