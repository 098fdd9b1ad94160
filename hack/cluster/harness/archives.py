"""Docker archives of container images, read and written without a container engine."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Go's names for architectures that the kernel names differently.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


# Annotations of an OCI archive that hold the full name of an image, the preferred one first.
NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


class ArchiveError(ValueError):
    """A file is not an archive of named images; the text says what was expected."""


def image_names(archive: Path) -> list[str]:
    """Returns full names of the images in a docker or OCI archive. Raises ArchiveError."""
    expected = (
        f"{archive}: expected a docker or OCI archive, as `buildah push IMAGE docker-archive:FILE:NAME` writes it"
    )
    try:
        with tarfile.open(archive) as tar:
            members = {name.removeprefix("./"): name for name in tar.getnames()}
            if "manifest.json" in members:
                names = [name for image in _read(tar, members["manifest.json"]) for name in image["RepoTags"] or []]
            elif "index.json" in members:
                annotations = [image.get("annotations", {}) for image in _read(tar, members["index.json"])["manifests"]]
                names = [
                    found for a in annotations if (found := next((a[k] for k in NAME_ANNOTATIONS if k in a), None))
                ]
            else:
                raise ArchiveError(f"{expected}; it has neither manifest.json nor index.json")
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(f"{expected}; {error!r}") from error
    if not names:
        raise ArchiveError(f"{expected}; its images have no name")
    return names


def write_archive(
    archive: Path, reference: str, programs: Mapping[str, Path], modes: Mapping[str, int] | None = None
) -> None:
    """Writes a docker archive with one layer, which has the programs at the absolute paths that are the keys of
    `programs`; the first one is the entry point.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for target, source in programs.items():
            entry = tar.gettarinfo(str(source.resolve()), target.lstrip("/"))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mode, entry.mtime = (modes or {}).get(target, 0o755), 0
            with source.open("rb") as file:
                tar.addfile(entry, file)
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": [next(iter(programs))]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [reference], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for name, content in (
            ("layer.tar", layer.getvalue()),
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _read(tar: tarfile.TarFile, name: str) -> Any:
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is not a file")
    return json.load(file)
