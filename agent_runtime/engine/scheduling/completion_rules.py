"""When a group is done, when a rollout is too old for the trainer, and when a job is given up. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollout_api.records import Outcome, PolicySpan, Record, ResponseRecord


@dataclass(frozen=True)
class GroupState:
    """`ended` members by their outcome; all others are waiting or running."""

    size: int
    ended: Mapping[int, Outcome]


@dataclass(frozen=True)
class GroupPlan:
    """`cancel`: members to end now. `finished`: every member has an outcome."""

    cancel: tuple[int, ...]
    finished: bool


def plan_group(state: GroupState, *, min_completed: int, cancel_stragglers: bool, stopped: bool = False) -> GroupPlan:
    """What to do after a member ended.

    A group is complete with `min_completed` Completed members. Stragglers go on unless they are to be cancelled; a member
    lost to infrastructure is repaired on its own, by its next attempt, and never touches the others. Of a group that was
    `stopped` no member is needed any more.
    """
    completed = sum(outcome is Outcome.COMPLETED for outcome in state.ended.values())
    waiting = tuple(member for member in range(state.size) if member not in state.ended)
    cancel = waiting if stopped or (cancel_stragglers and completed >= min_completed) else ()
    return GroupPlan(cancel=cancel, finished=not waiting)


class StalePolicy(Exception):
    """The rollout is of no use to the trainer any more; the message says how old it is."""


def numbers(spans: Iterable[PolicySpan]) -> list[int]:
    """The versions of spans in order: unknown ones, and names that a model of one's own may use, left out."""
    return [int(span.version) for span in spans if span.version is not None and span.version.isdecimal()]


def versions_of(records: Iterable[Record]) -> list[int]:
    """The versions that made a rollout's tokens, in order."""
    return [
        version for record in records if isinstance(record, ResponseRecord) for version in numbers(record.policy_spans)
    ]


def stale_message(first: int | None, newest: int | None, max_lag: int | None) -> str | None:
    """Why a rollout is stale, or None. `first` made its first token whose version is known."""
    if first is None or newest is None or max_lag is None or newest - first <= max_lag:
        return None
    return (
        f"its first token is of policy {first} and the newest is {newest}: {newest - first} versions, more than "
        f"model.maxPolicyLag {max_lag} allows"
    )


class NewestPolicy:
    """The newest version that any rollout of this process has seen at work."""

    def __init__(self) -> None:
        self.version: int | None = None

    def see(self, versions: Iterable[int]) -> None:
        """A call was answered by these."""
        self.version = max((*versions, *(() if self.version is None else (self.version,))), default=None)


class PolicyLag:
    """How far one rollout lies behind the newest policy. `most` versions are allowed, any number where it is None."""

    def __init__(self, newest: NewestPolicy | None = None, most: int | None = None) -> None:
        self._newest, self._most = newest or NewestPolicy(), most
        self._first: int | None = None
        """Version of the first token whose version is known."""

    def see(self, spans: Iterable[PolicySpan]) -> None:
        """A call of the rollout was answered by these."""
        versions = numbers(spans)
        self._newest.see(versions)
        if self._first is None and versions:
            self._first = versions[0]

    def refuse_if_stale(self) -> None:
        """Raise StalePolicy where more work on this rollout would be for nothing."""
        if message := stale_message(self._first, self._newest.version, self._most):
            raise StalePolicy(message)


FEWEST_ENDED = 20
"""Below this many ended rollouts a fraction says little: one bad node would abort the job."""

LOST = frozenset({Outcome.INFRA_FAILED, Outcome.VERIFIER_FAILED})


def abort_reason(outcomes: Mapping[Outcome, int], max_fraction: float) -> str | None:
    """Why the job must stop, or None, from its ended rollouts by outcome. Cancelled ones count for neither side."""
    ended = sum(count for outcome, count in outcomes.items() if outcome is not Outcome.CANCELLED)
    lost = sum(count for outcome, count in outcomes.items() if outcome in LOST)
    if ended < FEWEST_ENDED or lost <= max_fraction * ended:
        return None
    return (
        f"{lost} of {ended} ended rollouts were lost to infrastructure, more than "
        f"completion.maxInfraFailureFraction {max_fraction:g} allows"
    )
