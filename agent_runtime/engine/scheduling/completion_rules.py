"""When a group is complete, when a rollout is too old for the trainer, and when a job is aborted. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollout_api.records import Outcome, PolicySpan, Record, ResponseRecord


@dataclass(frozen=True)
class GroupPlan:
    """`cancel`: members to end now. `finished`: every member has an outcome."""

    cancel: tuple[int, ...]
    finished: bool


def plan_group(
    size: int, ended: Mapping[int, Outcome], *, min_completed: int, cancel_stragglers: bool, stopped: bool = False
) -> GroupPlan:
    """Decide after a member ended. `ended` has members by outcome; all others are waiting or running.

    A group is complete with `min_completed` Completed members. Stragglers continue unless they must be cancelled. A
    member lost to infrastructure is replaced by its own next attempt, without affecting the others. A `stopped` group
    needs no further members.
    """
    completed = sum(outcome is Outcome.COMPLETED for outcome in ended.values())
    waiting = tuple(member for member in range(size) if member not in ended)
    cancel = waiting if stopped or (cancel_stragglers and completed >= min_completed) else ()
    return GroupPlan(cancel=cancel, finished=not waiting)


class StalePolicy(Exception):
    """The rollout is too old for the trainer; the message has its lag."""


def numbers(spans: Iterable[PolicySpan]) -> list[int]:
    """Return the versions of spans in order, without unknown ones and names used by a user's own model."""
    return [int(span.version) for span in spans if span.version is not None and span.version.isdecimal()]


def versions_of(records: Iterable[Record]) -> list[int]:
    """Return the versions that produced a rollout's tokens, in order."""
    return [
        version for record in records if isinstance(record, ResponseRecord) for version in numbers(record.policy_spans)
    ]


def stale_message(first: int | None, newest: int | None, max_lag: int | None) -> str | None:
    """Return why a rollout is stale, or None. `first` is the version of the first token whose version is known."""
    if first is None or newest is None or max_lag is None or newest - first <= max_lag:
        return None
    return (
        f"its first token is of policy {first} and the newest is {newest}: {newest - first} versions, more than "
        f"model.maxPolicyLag {max_lag} allows"
    )


class NewestPolicy:
    """The newest policy version in the answers of this process's rollouts and of sealed rollouts."""

    def __init__(self, version: int | None = None) -> None:
        self.version = version

    def see(self, versions: Iterable[int]) -> None:
        """Record the versions of an answered call."""
        self.version = max((*versions, *(() if self.version is None else (self.version,))), default=None)


class PolicyLag:
    """How far one rollout is behind the newest policy. At most `most` versions are allowed; None: any number."""

    def __init__(self, newest: NewestPolicy | None = None, most: int | None = None) -> None:
        self._newest, self._most = newest or NewestPolicy(), most
        self._first: int | None = None
        """Version of the first token whose version is known."""

    def see(self, spans: Iterable[PolicySpan]) -> None:
        """Record the versions of an answered call of the rollout."""
        versions = numbers(spans)
        self._newest.see(versions)
        if self._first is None and versions:
            self._first = versions[0]

    def refuse_if_stale(self) -> None:
        """Raise StalePolicy if further work on this rollout would be useless."""
        if message := stale_message(self._first, self._newest.version, self._most):
            raise StalePolicy(message)


FEWEST_ENDED = 20
"""With fewer ended rollouts, one bad node would exceed the fraction and abort the job."""

LOST = frozenset({Outcome.INFRA_FAILED, Outcome.VERIFIER_FAILED})


def abort_reason(outcomes: Mapping[Outcome, int], max_fraction: float) -> str | None:
    """Return why the job must stop, or None, given its ended rollouts by outcome. Cancelled ones do not count."""
    ended = sum(count for outcome, count in outcomes.items() if outcome is not Outcome.CANCELLED)
    lost = sum(count for outcome, count in outcomes.items() if outcome in LOST)
    if ended < FEWEST_ENDED or lost <= max_fraction * ended:
        return None
    return (
        f"{lost} of {ended} ended rollouts were lost to infrastructure, more than "
        f"completion.maxInfraFailureFraction {max_fraction:g} allows"
    )
