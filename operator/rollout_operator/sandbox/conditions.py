"""Conditions of a Sandbox: their order, and which of them are worth a write."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rollout_api.conditions import Condition

SCHEDULED, IMAGE_PULLED, OVERLAY, READY, FINISHED = "Scheduled", "ImagePulled", "Overlay", "Ready", "Finished"
ORDER = (SCHEDULED, IMAGE_PULLED, OVERLAY, READY, FINISHED)
MOST_CHARACTERS = 1024
"""Of a message. What a registry or a webhook says can be pages; a status is held in memory thousands of times."""


def condition(kind: str, holds: bool, reason: str, message: str = "") -> Condition:
    """A condition, its message cut to a length that everyone can hold."""
    words = message.strip()
    if len(words) > MOST_CHARACTERS:
        words = f"{words[: MOST_CHARACTERS - 1]}…"
    return Condition(type=kind, status="True" if holds else "False", reason=reason, message=words)


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of that type."""
    return next((found for found in conditions if found.type == kind), None)


def holds(conditions: Iterable[Condition], kind: str) -> bool:
    """Whether a condition of that type is there and True."""
    found = find(conditions, kind)
    return found is not None and found.status == "True"


def merged(
    old: Sequence[Condition], new: Iterable[Condition], now: datetime, generation: int | None
) -> list[Condition]:
    """The old conditions with the new ones in their place, in the usual order.

    One whose status and reason are as before is kept whole: the scheduler's and the registry's words differ at every
    look, and each write is one for the API server, times thousands of sandboxes.
    """
    by_type = {found.type: found for found in old}
    for fresh in new:
        before = by_type.get(fresh.type)
        if before is not None and (before.status, before.reason) == (fresh.status, fresh.reason):
            continue
        same_status = before is not None and before.status == fresh.status
        since = before.last_transition_time if before is not None and same_status else None
        by_type[fresh.type] = fresh.model_copy(
            update={"observed_generation": generation, "last_transition_time": since or timestamp(now)}
        )
    return [by_type[kind] for kind in ORDER if kind in by_type]


def timestamp(moment: datetime) -> str:
    """RFC 3339 in whole seconds, as Kubernetes writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str) -> datetime:
    """The moment of an RFC 3339 timestamp."""
    return datetime.fromisoformat(text)
