"""Selection of a job's provider."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from agent_runtime.extensions import Registry
from agent_runtime.recording.store import local_folder
from agent_runtime.sandboxes.base import SandboxFailure, SandboxProvider
from agent_runtime.sandboxes.images.store import ImageStore
from agent_runtime.sandboxes.local.provider import LocalProvider
from agent_runtime.tasks.place import SourcePlace
from rollout_api.rollout_job import RolloutJobSpec
from rollout_api.sandbox import Provider

# Imported on demand, because their dependencies are optional.
registry = Registry(
    "sandbox.provider",
    "agent_rollouts.sandbox_providers",
    {Provider.CONTAINER: "agent_runtime.sandboxes.container.provider:ContainerProvider"},
    optional={Provider.KODO: "agent-rollouts[kodo]"},
)
# A running rollout has one workspace; the grading of a finished one and a group's preparation need one more.
PLACES_PER_ROLLOUT = 2


def open_provider(
    job: RolloutJobSpec,
    run_dir: Path,
    override: Provider | None = None,
    *,
    base_dir: Path = Path(),
    private: Sequence[Path] = (),
) -> SandboxProvider:
    """Return the job's provider, or `override`, not opened yet. Raises SandboxFailure if it is unavailable here.

    `run_dir` has the records with which the next process finds live sandboxes; paths of images start at `base_dir`.
    Workspaces on this machine's root cannot see `private`, the job's output and its tasks' source.
    """
    wanted = override or job.sandbox.provider
    run_dir, base_dir = run_dir.absolute(), base_dir.absolute()
    places = job.runners.concurrency * PLACES_PER_ROLLOUT
    if wanted is Provider.LOCAL:
        # Only existing paths can be masked; a run creates its output folder before it opens its provider.
        output = local_path(job.output.uri, base_dir)
        tasks = SourcePlace(job.tasks.from_, base_dir, {}).local_path if job.tasks.from_ else None
        hidden = [path for path in (output, tasks, *private) if path is not None and path.exists()]
        images = image_store(job, base_dir)
        return LocalProvider(run_dir, job.sandbox, places=places, private=hidden, base_dir=base_dir, images=images)
    if wanted is Provider.CLUSTER:
        raise SandboxFailure(
            "ProviderUnavailable",
            "sandbox.provider Cluster is for runners in a cluster; apply the job there (docs/jobs-on-a-cluster.md), or "
            "set it to Local or Container, which run sandboxes on this machine",
        )
    provider: SandboxProvider = registry.find(wanted.value)(run_dir, job.sandbox, places=places, base_dir=base_dir)
    return provider


def image_store(job: RolloutJobSpec, base_dir: Path) -> ImageStore:
    """Return the store of a job's images. Only the job's author may name a plain folder of this machine as an image."""
    return ImageStore(base_dir, may_be_folder=partial(_is_of_author, job))


def _is_of_author(job: RolloutJobSpec, image: str) -> bool:
    """Whether the job's author has named an image, and not a data set or a recorded run, which may be of others."""
    tasks = job.tasks
    if tasks.inline is not None or image in (job.sandbox.image, *tasks.folder_images):
        return True
    bases = tasks.dockerfiles.bases if tasks.dockerfiles else {}
    # A base for names with a common beginning is itself a beginning.
    beginnings = tuple(base for name, base in bases.items() if name.endswith(("/", ":")))
    template = "[^/]+".join(map(re.escape, re.split(r"\{(?:name|digest)\}", tasks.image_template or "")))
    is_named = image in bases.values() or re.fullmatch(template, image) is not None
    return ".." not in image and (is_named or image.startswith(beginnings))


def local_path(uri: str, base_dir: Path) -> Path | None:
    """Return the folder of this machine that a manifest's storage URI names; None for object storage."""
    return local_folder(uri if "://" in uri else str(base_dir / uri))
