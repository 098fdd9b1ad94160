"""The parts of an image, read from the formats in which tools write it to disk. Nothing is unpacked here.

The formats are an OCI layout (a folder, or a tar of one), as written by buildah, podman, skopeo and `docker buildx`,
and the archive of `docker save`. Specifications: https://github.com/opencontainers/image-spec, v1.1 (image-layout.md,
manifest.md, config.md), and for the archive manifest.json of https://github.com/moby/docker-image-spec.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_REF_NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
# Manifests and configurations are a few KiB; a larger file is neither.
_LARGEST_JSON = 4 << 20
_LARGEST_INDEX_DEPTH = 4
STANDARD_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""PATH of an image that sets none, as in container tools."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}


class ImageError(Exception):
    """An image cannot be read, pulled or unpacked; the message names it and the remedy."""


class ImageFiles(Protocol):
    """The files of an image on disk, by their names in the layout or archive."""

    place: Path

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Return the content of a file. Raises ImageError if it does not exist."""

    def has(self, name: str) -> bool:
        """Whether a file exists."""

    def size(self, name: str) -> int:
        """Return the bytes of an existing file."""


@dataclass(frozen=True)
class Layer:
    """One layer: the location of its tar, and its required digests."""

    file: str
    blob_digest: str | None
    """Digest of the file as stored, usually compressed; None if the format has none."""
    diff_id: str
    """Digest of the tar in it, as listed in an image's configuration."""


@dataclass(frozen=True)
class ImageConfig:
    """An image's settings for the programs that run in it."""

    env: Mapping[str, str]
    user: str | None
    working_dir: str | None
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()


@dataclass(frozen=True)
class OnDisk:
    """An image that can be unpacked; layers lowest first."""

    files: ImageFiles
    layers: Sequence[Layer]
    config: ImageConfig
    digest: str
    """Digest of its configuration: the image's id."""


@contextlib.contextmanager
def open_files(place: Path) -> Iterator[ImageFiles]:
    """Open a layout's folder, or a tar. Raises ImageError."""
    if place.is_dir():
        yield _Folder(place)
        return
    try:
        archive = tarfile.open(place, "r:")  # noqa: SIM115 (closed below)
    except (OSError, tarfile.TarError) as error:
        raise ImageError(
            f"image {place}: {error}; expected a tar as `buildah push IMAGE oci-archive:FILE` or `docker save` writes "
            "it, uncompressed"
        ) from error
    with archive:
        try:
            files = _Archive(place, archive)
        except tarfile.TarError as error:
            raise ImageError(f"image {place}: its tar cannot be read: {error}; it is not complete") from error
        yield files


class _Folder:
    def __init__(self, place: Path) -> None:
        self.place = place

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        try:
            return (self.place / name).open("rb")
        except OSError as error:
            raise ImageError(f"image {self.place}: {name}: {error.strerror}; the layout is incomplete") from error

    def has(self, name: str) -> bool:
        return (self.place / name).is_file()

    def size(self, name: str) -> int:
        return (self.place / name).stat().st_size


class _Archive:
    def __init__(self, place: Path, archive: tarfile.TarFile) -> None:
        self.place, self._archive = place, archive
        # A tar of a layout's folder has names that start with `./`.
        self._members = {posixpath.normpath(member.name): member for member in archive}

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        try:
            content = self._archive.extractfile(self._members[posixpath.normpath(name)])
        except (KeyError, tarfile.TarError) as error:
            raise ImageError(f"image {self.place}: {name} is not in the archive; the archive is incomplete") from error
        if content is None:
            raise ImageError(f"image {self.place}: {name} is not a file")
        return content

    def has(self, name: str) -> bool:
        return name in self._members and self._members[name].isreg()

    def size(self, name: str) -> int:
        return self._members[posixpath.normpath(name)].size


def read_image(files: ImageFiles, wanted: str | None = None) -> OnDisk:
    """Return the image of that name (`wanted`; None: the only one), for this machine's processor. Raises ImageError."""
    if files.has("index.json"):
        return _from_layout(files, wanted)
    if files.has("manifest.json"):
        return _from_docker_archive(files, wanted)
    raise ImageError(
        f"image {files.place}: neither index.json (an OCI layout) nor manifest.json (`docker save`) is in it; expected "
        "an image's archive or layout. For a plain root file system give its folder"
    )


def _from_layout(files: ImageFiles, wanted: str | None) -> OnDisk:
    index = _json(files, "index.json")
    manifest = _manifest(files, _choose(files, _list(files, "index.json", index, "manifests"), wanted), 0)
    config_digest = _digest(files, "config.digest", _mapping(files, "config", manifest.get("config")).get("digest"))
    config = _json(files, _blob(config_digest), digest=config_digest)
    blobs = [
        _digest(files, "layers", _mapping(files, "layers", layer).get("digest"))
        for layer in _list(files, "the manifest", manifest, "layers")
    ]
    diff_ids = _diff_ids(files, config, len(blobs))
    layers = [Layer(_blob(blob), blob, diff_id) for blob, diff_id in zip(blobs, diff_ids, strict=True)]
    return OnDisk(files, layers, _config(files, config), config_digest)


def _choose(files: ImageFiles, manifests: Sequence[Any], wanted: str | None) -> Mapping[str, Any]:
    entries = [_mapping(files, "index.json", entry) for entry in manifests]
    names = [{str((entry.get("annotations") or {}).get(key)) for key in _REF_NAMES} - {"None"} for entry in entries]
    if wanted is not None:
        entries = [entry for entry, has in zip(entries, names, strict=True) if wanted in has]
    known = ", ".join(sorted(name for has in names for name in has)) or "none with a name"
    if not entries:
        raise ImageError(f"image {files.place}: no image {wanted!r} in it; there are: {known}")
    if len(entries) > 1 and not any("platform" in entry for entry in entries):
        raise ImageError(f"image {files.place}: {len(entries)} images are in it ({known}); add :NAME to its path")
    return entries[0] if len(entries) == 1 else _for_this_machine(files, entries)


def _for_this_machine(files: ImageFiles, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    wanted = this_architecture()
    platforms = [_mapping(files, "platform", entry.get("platform") or {}) for entry in entries]
    for entry, known in zip(entries, platforms, strict=True):
        if known.get("os") == "linux" and known.get("architecture") == wanted:
            return entry
    there = ", ".join(sorted({f"{known.get('os')}/{known.get('architecture')}" for known in platforms}))
    raise ImageError(f"image {files.place}: it is for {there}, and this machine is linux/{wanted}")


def this_architecture() -> str:
    """Return the name of this machine's processor in images."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def _manifest(files: ImageFiles, entry: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    digest = _digest(files, "manifests.digest", entry.get("digest"))
    content: Mapping[str, Any] = _json(files, _blob(digest), digest=digest)
    if entry.get("mediaType") not in _INDEXES and "manifests" not in content:
        return content
    if depth == _LARGEST_INDEX_DEPTH:
        raise ImageError(f"image {files.place}: indexes are nested more than {depth} deep")
    entries = [_mapping(files, "manifests", inner) for inner in _list(files, "the index", content, "manifests")]
    return _manifest(files, _for_this_machine(files, entries), depth + 1)


def _from_docker_archive(files: ImageFiles, wanted: str | None) -> OnDisk:
    images = _json(files, "manifest.json", expected=list)
    entries = [_mapping(files, "manifest.json", entry) for entry in images]
    if wanted is not None:
        entries = [entry for entry in entries if wanted in (entry.get("RepoTags") or ())]
    if len(entries) != 1:
        names = ", ".join(tag for entry in images for tag in entry.get("RepoTags") or ()) or "none with a name"
        found = f"no image {wanted!r}" if not entries else f"{len(entries)} images"
        raise ImageError(f"image {files.place}: {found} in it ({names}); add the :NAME of one to its path")
    name = str(entries[0].get("Config"))
    with files.open(name) as file:
        digest = f"sha256:{hashlib.sha256(file.read(_LARGEST_JSON)).hexdigest()}"
    config = _json(files, name)
    tars = [str(layer) for layer in _list(files, "manifest.json", entries[0], "Layers")]
    diff_ids = _diff_ids(files, config, len(tars))
    layers = [Layer(tar, None, diff_id) for tar, diff_id in zip(tars, diff_ids, strict=True)]
    return OnDisk(files, layers, _config(files, config), digest)


def _diff_ids(files: ImageFiles, config: Mapping[str, Any], layers: int) -> list[str]:
    rootfs = _mapping(files, "rootfs", config.get("rootfs"))
    diff_ids = [_digest(files, "rootfs.diff_ids", value) for value in _list(files, "rootfs", rootfs, "diff_ids")]
    if len(diff_ids) != layers:
        raise ImageError(f"image {files.place}: {layers} layers, but {len(diff_ids)} in its rootfs.diff_ids")
    return diff_ids


def _config(files: ImageFiles, content: Mapping[str, Any]) -> ImageConfig:
    config = _mapping(files, "config", content.get("config") or {})
    variables = (str(variable).partition("=") for variable in config.get("Env") or ())
    return ImageConfig(
        env={name: value for name, _, value in variables if name},
        user=str(config.get("User") or "") or None,
        working_dir=str(config.get("WorkingDir") or "") or None,
        entrypoint=tuple(map(str, config.get("Entrypoint") or ())),
        command=tuple(map(str, config.get("Cmd") or ())),
    )


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _digest(files: ImageFiles, where: str, value: object) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ImageError(f"image {files.place}: {where} is {value!r}, expected sha256: and 64 hexadecimal digits")
    return value


def _mapping(files: ImageFiles, where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ImageError(f"image {files.place}: {where} is not a JSON object")
    return value


def _list(files: ImageFiles, where: str, content: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = content.get(key)
    if not isinstance(value, list):
        raise ImageError(f"image {files.place}: {where} has no list {key!r}")
    return value


def _json(files: ImageFiles, name: str, *, digest: str | None = None, expected: type = dict) -> Any:
    with files.open(name) as file:
        data = file.read(_LARGEST_JSON)
    if digest is not None and f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise ImageError(f"image {files.place}: {name} does not have the digest that it is named after; fetch it again")
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ImageError(f"image {files.place}: {name} is not JSON: {error}") from error
    if not isinstance(value, expected):
        raise ImageError(f"image {files.place}: {name} is not a JSON {'list' if expected is list else 'object'}")
    return value
