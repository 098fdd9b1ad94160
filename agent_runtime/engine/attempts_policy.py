"""When a rollout that was lost to infrastructure is tried again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.records import FailedRecord
from rollout_api.rollout_job import Attempts

INTERRUPTED = "Interrupted"
"""Reason of an attempt that was lost because no runner held it for a while."""
UNCOUNTED = frozenset({INTERRUPTED, "Preempted"})
"""Reasons that use up no attempt: the cluster took the place back, and may do so as often as it wants to."""

LARGEST_BACKOFF_SECONDS = 300.0
"""Longer waits only delay a group; what takes longer to come back is not coming back for this job."""
SELF_INFLICTED_LOSSES = 2
"""Unexplained deaths of the sandbox under a rollout's own tool call that make it the policy's doing (DESIGN: Outcomes)."""


@dataclass(frozen=True)
class Retry:
    """Try again after so many seconds."""

    delay_seconds: float


@dataclass(frozen=True)
class GiveUp:
    """No attempt is left: the rollout is InfraFailed."""


@dataclass(frozen=True)
class BlamePolicy:
    """The rollout itself kills its sandboxes: Completed with ResourceLimit."""


def after_failures(
    failures: Sequence[FailedRecord], attempts: Attempts, jitter: random.Random
) -> Retry | GiveUp | BlamePolicy:
    """What follows the latest of a rollout's failed attempts.

    The back-off doubles with each counted failure; up to a half is taken off at random, so that members of a group that
    failed together do not come back together.
    """
    if sum(failure.during_tool_call for failure in failures) >= SELF_INFLICTED_LOSSES:
        return BlamePolicy()
    counted = sum(failure.counted for failure in failures)
    if counted >= attempts.limit:
        return GiveUp()
    if not failures or not failures[-1].counted:
        return Retry(0.0)
    full = min(LARGEST_BACKOFF_SECONDS, attempts.backoff_seconds * 2.0 ** (counted - 1))
    return Retry(full * (1 - jitter.random() / 2))
