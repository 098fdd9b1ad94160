"""What becomes of the job that this runner works on, as the API server knows it."""

import asyncio
from enum import Enum
from typing import Any, Protocol

from agent_runtime.kube.api import ApiError
from rollout_api.conditions import Metadata

ASK_SECONDS = 5.0
"""An API server that does not answer within that is away: then the job is taken to go on."""
CANCELLED_STATUSES = frozenset({401, 403, 404})
"""Gone, or denied: the roles of a job, or of a whole namespace, go while it is being deleted."""


class JobApi(Protocol):
    """The calls about the runner's own RolloutJob and RolloutShard (KubeApi has them)."""

    async def get_job(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        """The RolloutJob."""

    async def get_shard(self, name: str, *, patience_seconds: float) -> dict[str, Any]:
        """The RolloutShard."""

    async def apply_report(self, name: str, report: dict[str, Any], *, patience_seconds: float) -> None:
        """Server-side apply of the RolloutShard's status."""


class Fate(Enum):
    """What becomes of the job."""

    CANCELLED = "cancelled"
    """Deleted: nothing more is wanted of it than what is sealed."""
    GOES_ON = "goes on"
    """Suspension, eviction, a node that is emptied: another pod goes on with it, sooner or later."""


def fate_of(job: Metadata, answer: dict[str, Any] | ApiError) -> Fate:
    """What the answer to `get` of the RolloutJob says of it."""
    if isinstance(answer, ApiError):
        return Fate.CANCELLED if answer.status in CANCELLED_STATUSES else Fate.GOES_ON
    metadata = answer.get("metadata", {})
    if metadata.get("uid") != job.uid or metadata.get("deletionTimestamp"):
        return Fate.CANCELLED
    return Fate.GOES_ON


async def ask_fate(api: JobApi, job: Metadata) -> Fate:
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return fate_of(job, await api.get_job(job.name, patience_seconds=ASK_SECONDS))
    except ApiError as error:
        return fate_of(job, error)
    except TimeoutError:
        return Fate.GOES_ON
