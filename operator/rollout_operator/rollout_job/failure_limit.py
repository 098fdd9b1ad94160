"""Whether runners that fail get anywhere: ten failures in a row without a new result are enough."""

from rollout_api.rollout_job import Restarts

FAILURES_WITHOUT_RESULT = 10
"""Kubernetes' back-off doubles from 10 s to 10 min: ten starts of one runner take some 40 min."""

FAILURES_OF_EACH = 3
"""Where there are many runners: a store that is away for a moment ends all of them at once, and that is no reason yet."""


def mark(before: Restarts | None, failed_pods: int, sealed: int, *, suspended: bool) -> Restarts:
    """Where failures are counted from: the last moment at which there was a new result.

    Pods that a suspension ends are no failures. Fewer failed pods than before mean that somebody deleted the Job, and
    the count has started again.
    """
    if before is None or suspended or sealed > before.sealed or failed_pods < before.failed_pods:
        return Restarts(failed_pods=failed_pods, sealed=sealed)
    return before


def failures(since: Restarts, failed_pods: int) -> int:
    """Runner pods that failed since then."""
    return failed_pods - since.failed_pods


def limit(runners_at_work: int) -> int:
    """Failures in a row that are too many for so many runners."""
    return max(FAILURES_WITHOUT_RESULT, FAILURES_OF_EACH * runners_at_work)
