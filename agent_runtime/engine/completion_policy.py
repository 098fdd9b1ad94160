"""When a group is done, and which of its members are not wanted any more."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_api.records import Outcome


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
    `stopped` nobody is needed any more.
    """
    completed = sum(outcome is Outcome.COMPLETED for outcome in state.ended.values())
    waiting = tuple(member for member in range(state.size) if member not in state.ended)
    cancel = waiting if stopped or (cancel_stragglers and completed >= min_completed) else ()
    return GroupPlan(cancel=cancel, finished=not waiting)
