"""The executor's portable bundle on this machine: what a container of any image gets mounted, or copied into it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent_runtime.sandboxes.oci_files import ImageError
from agent_runtime.sandboxes.oci_store import ImageStore

VARIABLE = "ROLLOUT_EXECUTOR_IMAGE"
IMAGE = "agent-rollouts-executor"


def executor_bundle(store: ImageStore, environ: Mapping[str, str]) -> Path:
    """The folder with the launcher `executor` in it. Raises ImageError.

    It is the image that ROLLOUT_EXECUTOR_IMAGE names, a path or the name of one in a registry.
    """
    reference = environ.get(VARIABLE)
    if not reference:
        raise ImageError(
            f"{VARIABLE} is not set: it names the image {IMAGE} that is put into every container, as an archive "
            f"(`export {VARIABLE}=$(hack/images/build executor)`), or by its name in a registry"
        )
    image = store.unpack(reference)
    for layer in image.layers:
        if (layer / "executor").is_file() and (layer / "python").is_dir():
            return layer
    raise ImageError(f"{VARIABLE}={reference} is not the image {IMAGE}: there is no /executor in it")
