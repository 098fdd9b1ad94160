"""Which provider a job gets."""

from __future__ import annotations

from pathlib import Path

from agent_runtime.sandboxes.base import SandboxFailure, SandboxProvider
from agent_runtime.sandboxes.local import LocalProvider
from rollout_api.rollout_job import RolloutJobSpec
from rollout_api.sandbox import Provider

# A rollout at work has one workspace; the grading of one that ended, and a group's preparation, want one beside it.
PLACES_PER_ROLLOUT = 2


def open_provider(
    job: RolloutJobSpec, run_dir: Path, override: Provider | None = None, *, base_dir: Path = Path()
) -> SandboxProvider:
    """The provider that the job asks for, or `override`; not yet opened. Raises SandboxFailure when there is none here.

    `run_dir` is where a provider keeps what the next process needs to find live sandboxes; paths of images start at
    `base_dir`.
    """
    wanted = override or job.sandbox.provider
    if wanted is not Provider.LOCAL:
        raise SandboxFailure(
            "ProviderUnavailable",
            f"sandbox.provider {wanted.value} is not available here; set it to {Provider.LOCAL.value}, which runs "
            "sandboxes on this machine",
        )
    output = [] if "://" in job.output.uri else [Path(job.output.uri).absolute()]
    places = job.runners.concurrency * PLACES_PER_ROLLOUT
    return LocalProvider(run_dir.absolute(), job.sandbox, places=places, private=output, base_dir=base_dir.absolute())
