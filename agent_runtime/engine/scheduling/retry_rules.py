"""When to retry a rollout, or its grading, after an infrastructure failure."""

import random
from collections.abc import Sequence

from rollout_api.records import FailedRecord
from rollout_api.rollout_job import Attempts

LARGEST_BACKOFF_SECONDS = 300.0
"""Longer waits only delay a group, because a component that is still down after this time will probably stay down."""


def retry_delay(failures: Sequence[FailedRecord], attempts: Attempts, jitter: random.Random) -> float | None:
    """Seconds to wait before the next attempt. None: no attempt is left, and the rollout is InfraFailed."""
    counted = sum(failure.counted for failure in failures)
    if counted >= attempts.limit:
        return None
    if not failures or not failures[-1].counted:
        return 0.0
    return backoff(counted, attempts, jitter)


def backoff(counted: int, attempts: Attempts, jitter: random.Random) -> float:
    """Return the seconds to wait after this many counted failures.

    The delay doubles with each failure. Up to half of it is subtracted at random, so that members that failed together
    do not retry together.
    """
    full = min(LARGEST_BACKOFF_SECONDS, attempts.backoff_seconds * 2.0 ** (counted - 1))
    return full * (1 - jitter.random() / 2)
