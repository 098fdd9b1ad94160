"""Whether this runner's job still exists, according to the API server."""

import asyncio
from enum import Enum
from typing import Any, Protocol

from agent_runtime.kube.api import ApiError
from rollout_api.conditions import Metadata

ASK_SECONDS = 5.0
"""An API server that does not respond within this time is unavailable: then the job is assumed to continue."""
CANCELLED_STATUSES = frozenset({401, 403, 404})
"""Not found, or denied: the roles of a job, or of a whole namespace, are removed while it is being deleted."""


class JobApi(Protocol):
    """Calls for the runner's own RolloutJob and RolloutShard (implemented by KubeApi)."""

    async def get_job(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        """The RolloutJob."""

    async def get_shard(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        """The RolloutShard."""

    async def apply_report(self, name: str, report: dict[str, Any], *, patience_seconds: float) -> None:
        """Server-side apply of the RolloutShard's status."""


class JobState(Enum):
    """Whether work on the job continues."""

    CANCELLED = "cancelled"
    """Deleted: nothing beyond the sealed rollouts is needed."""
    CONTINUES = "continues"
    """After a suspension, an eviction or a drained node another pod resumes it."""


def job_state_of(job: Metadata, answer: dict[str, Any] | ApiError) -> JobState:
    """Return the state for the response to `get` of the RolloutJob."""
    if isinstance(answer, ApiError):
        return JobState.CANCELLED if answer.status in CANCELLED_STATUSES else JobState.CONTINUES
    metadata = answer.get("metadata", {})
    if metadata.get("uid") != job.uid or metadata.get("deletionTimestamp"):
        return JobState.CANCELLED
    return JobState.CONTINUES


async def fetch_job_state(api: JobApi, job: Metadata) -> JobState:
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return job_state_of(job, await api.get_job(job.name, patience_seconds=ASK_SECONDS))
    except ApiError as error:
        return job_state_of(job, error)
    except TimeoutError:
        return JobState.CONTINUES
