"""When a rollout that was lost to infrastructure is tried again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.records import FailedRecord
from rollout_api.rollout_job import Attempts

LARGEST_BACKOFF_SECONDS = 300.0
"""Longer waits only delay a group; what takes longer to come back is not coming back for this job."""


@dataclass(frozen=True)
class Retry:
    """Try again after so many seconds."""

    delay_seconds: float


@dataclass(frozen=True)
class GiveUp:
    """No attempt is left: the rollout is InfraFailed."""


def after_failures(failures: Sequence[FailedRecord], attempts: Attempts, jitter: random.Random) -> Retry | GiveUp:
    """What follows the latest of a rollout's failed attempts.

    The back-off doubles with each counted failure; up to a half is taken off at random, so that members of a group that
    failed together do not come back together.
    """
    counted = sum(failure.counted for failure in failures)
    if counted >= attempts.limit:
        return GiveUp()
    if not failures or not failures[-1].counted:
        return Retry(0.0)
    full = min(LARGEST_BACKOFF_SECONDS, attempts.backoff_seconds * 2.0 ** (counted - 1))
    return Retry(full * (1 - jitter.random() / 2))
