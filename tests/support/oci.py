"""Images written by hand, for tests of their readers."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    "+gzip": gzip.compress,
    "+zstd": lambda data: zstandard.ZstdCompressor().compress(data),
}


def layer_tar(files: Mapping[str, bytes]) -> bytes:
    """Return a layer with those files; a name that ends in `/` is a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name.rstrip("/"))
            info.size, info.mode = len(content), 0o755
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Layout:
    """An OCI layout in progress."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifests = folder, list[dict[str, Any]]()
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = digest_of(data)
        (self.folder / "blobs/sha256" / digest.removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def image(
        self, layers: Sequence[bytes], *, packed: str = "", config: Mapping[str, Any] | None = None, **descriptor: Any
    ) -> dict[str, Any]:
        """Add an image; return its descriptor."""
        content = {
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
        }
        kind = "application/vnd.oci.image"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": self.blob(json.dumps(content).encode(), f"{kind}.config.v1+json"),
            "layers": [self.blob(PACKED[packed](layer), f"{kind}.layer.v1.tar{packed}") for layer in layers],
        }
        made = {**self.blob(json.dumps(manifest).encode(), f"{kind}.manifest.v1+json"), **descriptor}
        self.write([*self.manifests, made])
        return made

    def write(self, manifests: Sequence[dict[str, Any]]) -> None:
        """Write the index."""
        self.manifests = list(manifests)
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.manifests}))

    def archive(self, place: Path) -> Path:
        """Write the layout as an OCI archive."""
        with tarfile.open(place, "w") as archive:
            archive.add(self.folder, arcname=".")
        return place
