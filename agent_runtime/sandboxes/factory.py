"""Which provider a job gets."""

from __future__ import annotations

from pathlib import Path

from agent_runtime.extensions import load_object
from agent_runtime.sandboxes.base import SandboxFailure, SandboxProvider
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.rollout_job import RolloutJobSpec
from rollout_api.sandbox import Provider

# Imported when a job names them: not everybody has what they need.
OTHERS = {
    Provider.CONTAINER: "agent_runtime.sandboxes.container.provider:ContainerProvider",
    Provider.KODO: "agent_runtime.integrations.kodo:KodoProvider",
}
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
    run_dir, base_dir = run_dir.absolute(), base_dir.absolute()
    places = job.runners.concurrency * PLACES_PER_ROLLOUT
    if wanted is Provider.LOCAL:
        output = [] if "://" in job.output.uri else [Path(job.output.uri).absolute()]
        return LocalProvider(run_dir, job.sandbox, places=places, private=output, base_dir=base_dir)
    if wanted not in OTHERS:
        raise SandboxFailure(
            "ProviderUnavailable",
            "sandbox.provider Cluster is for runners in a cluster; apply the job there (docs/jobs-on-a-cluster.md), or set "
            "it to Local or Container, which run sandboxes on this machine",
        )
    provider: SandboxProvider = load_object(OTHERS[wanted], "sandbox.provider")(
        run_dir, job.sandbox, places=places, base_dir=base_dir
    )
    return provider
