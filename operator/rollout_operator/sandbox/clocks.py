"""The clocks of a Sandbox that the operator keeps. Two more are kept where they cannot be missed: the executor ends
itself when idle, and the kubelet ends the pod after its lifetime (`activeDeadlineSeconds`)."""

from datetime import datetime, timedelta

from rollout_api.conditions import Condition
from rollout_operator.sandbox.conditions import moment

KEPT_AFTER_FINISHED = timedelta(seconds=60)
"""How long a Sandbox that has ended stays to be read: a watcher that was cut off comes back within seconds."""

MISSED_AFTER = timedelta(seconds=5)
"""Before that, a pod that cannot be seen may be one that cannot be seen yet: Pods and Sandboxes are watched apart."""

REFUSED_FOR = timedelta(seconds=60)
"""For so long a new Sandbox whose pod is refused in every way is tried again."""


def seconds_to_start(created: datetime, start_seconds: int, now: datetime) -> float:
    """What is left of the time to become ready; 0 or less: it is over."""
    return (created + timedelta(seconds=start_seconds) - now).total_seconds()


def seconds_to_admit(created: datetime, now: datetime) -> float:
    """How much longer a refused pod is asked for again; 0 or less: it is refused for good."""
    return (created + REFUSED_FOR - now).total_seconds()


def seconds_kept(finished: datetime, now: datetime) -> float:
    """How much longer a Sandbox that has ended is kept; 0 or less: it is to be deleted."""
    return (finished + KEPT_AFTER_FINISHED - now).total_seconds()


def seconds_until_missed(ready: Condition, now: datetime) -> float:
    """How long the pod of a Sandbox that became ready just now may be out of sight; 0 or less: it is gone."""
    since = moment(ready.last_transition_time) if ready.last_transition_time else now - MISSED_AFTER
    return (since + MISSED_AFTER - now).total_seconds()
