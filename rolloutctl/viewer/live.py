"""The rollouts in flight: those with an attempt and without a seal, and what each does now."""

import asyncio
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from agent_runtime.models.base import ModelReply
from agent_runtime.recording.reader import RunFolder
from agent_runtime.recording.segments import Closing, RecordCorrupt, decode
from rollout_api.records import (
    ArtifactsRecord,
    AttemptRecord,
    FailedRecord,
    IntentRecord,
    ObservationsRecord,
    Record,
    ResponseRecord,
    StepRecord,
    StopRecord,
)

SHOWN: Final = 64
"""Most rollouts in flight that are looked at. Each takes two requests."""
_SEGMENT: Final = re.compile(r"attempts/\d+/(\d+)/(\d+)-(\d+)\.jsonl\.zst")

Json = dict[str, Any]


class InFlight:
    """Follows the rollouts in flight of a run. An attempt is read again only if it has a new segment."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._read: dict[int, tuple[str, Json]] = {}

    async def look(self, sealed: Iterable[int]) -> tuple[int, list[Json]]:
        """Return the number of rollouts in flight, and what some of them do."""
        store = self._run.store
        begun = {int(name) for name in await store.folders("attempts") if name.isdecimal()}
        indexes = sorted(begun.difference(sealed))
        shown = await asyncio.gather(*map(self._rollout, indexes[:SHOWN]))
        self._read = {index: entry for index, entry in self._read.items() if index in indexes}
        return len(indexes), shown

    async def _rollout(self, index: int) -> Json:
        store = self._run.store
        found = [
            (tuple(map(int, match.groups())), meta.key)
            for meta in await store.list(f"attempts/{index}")
            if (match := _SEGMENT.fullmatch(meta.key))
        ]
        task, member = member_of(self._run, index)
        facts: Json = {"index": index, "member": member, "task": task}
        if not found:
            return facts | {"attempt": 0, "turn": 0, "doing": "starting", "since": None}
        (attempt, *_), newest = max(found)
        if index not in self._read or self._read[index][0] != newest:
            # While a rollout is graded, the last segments have no turn, so an earlier one is read too.
            records: list[Record] = []
            for _, key in sorted(found, reverse=True):
                records = [*_decoded(key, await store.get(key)), *records]
                if any(isinstance(record, IntentRecord | ResponseRecord | AttemptRecord) for record in records):
                    break
            self._read[index] = newest, {"attempt": attempt, **state(records)}
        return facts | self._read[index][1]


def member_of(run: RunFolder, index: int) -> tuple[str, int]:
    """Return the name of a rollout's task, and its number in its group."""
    group, member = divmod(index, run.job.spec.group_size)
    names = run.job_file.tasks.names  # empty for a stream of tasks
    return names[group] if group < len(names) else f"group {group}", member


def _decoded(key: str, data: bytes | None) -> Sequence[Record]:
    if data is None:
        return []
    try:
        content = decode(key, data)
    except RecordCorrupt:
        return []  # its rollout's page names the damage
    return [] if isinstance(content, Closing) else content


def state(records: Sequence[Record]) -> Json:
    """Return what an attempt does, from its last records."""
    turn, doing, since = 0, "starting", None
    tools = ""
    for record in records:
        if isinstance(record, AttemptRecord):
            doing = "starting"
        elif isinstance(record, IntentRecord):
            turn, doing = record.turn + 1, "model"
        elif isinstance(record, ResponseRecord):
            turn = record.turn + 1
            tools = ", ".join(dict.fromkeys(call.name or "?" for call in ModelReply(record.message, "").tool_calls))
            doing = f"tool {tools}" if tools else "agent"
        elif isinstance(record, ObservationsRecord):
            doing = "agent"
        elif isinstance(record, StopRecord):
            doing = "storing artifacts"
        elif isinstance(record, ArtifactsRecord | StepRecord):
            doing = "grading"
        elif isinstance(record, FailedRecord):
            doing = f"lost: {record.reason}"
        else:
            continue
        since = record.time
    return {"turn": turn, "doing": doing, "since": since}
