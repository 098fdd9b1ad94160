"""The records of one attempt in order: those of an earlier process, which are replayed, then new ones."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from agent_runtime.proxy.session import SessionJournal
from rollout_api.records import (
    CheckpointRecord,
    IntentRecord,
    ObservationsRecord,
    Record,
    ResponseRecord,
    ReturnRecord,
    StepRecord,
)

REPLAYED = IntentRecord | ResponseRecord | ObservationsRecord | StepRecord | CheckpointRecord | ReturnRecord
"""Records that answer a call of the agent in a replay."""
R = TypeVar("R", IntentRecord, ResponseRecord, ObservationsRecord, StepRecord, CheckpointRecord, ReturnRecord)


class NotReplayable(Exception):
    """The agent did not repeat a journaled call: it depends on something other than its context's results."""


class AttemptLog:
    """`recorded` are the journaled records of the attempt; `unwritten` are records that the first write must include."""

    def __init__(
        self, journal: SessionJournal, recorded: Sequence[Record] = (), unwritten: Sequence[Record] = ()
    ) -> None:
        self.records: list[Record] = [*(r for r in recorded if not isinstance(r, REPLAYED)), *unwritten]
        """The attempt's records so far, written or not; during a replay, only those that it has reached."""
        self.recorded = recorded
        self._journal = journal
        self._replay = [record for record in reversed(recorded) if isinstance(record, REPLAYED)]
        self._unwritten = list(unwritten)

    @property
    def replaying(self) -> bool:
        """Whether the journal still has answers to the agent's next calls."""
        return bool(self._replay)

    def next(self, form: type[R], turn: int) -> R | None:
        """Return the journal's answer to a call of the agent; None if the call must be made.

        Raises NotReplayable if the journal continues with another call. Records after a gap are never replayed.
        """
        if not self._replay:
            return None
        record = self._replay[-1]
        if isinstance(record, form):
            self.records.append(self._replay.pop())
            return record
        if form not in (ResponseRecord, ObservationsRecord):
            raise NotReplayable(
                f"turn {turn}: the journal continues with {record.type}, but the agent made another call; "
                "an agent must be a function of what its context returned"
            )
        return None

    def add(self, *records: Record) -> None:
        """Add a record to the next write."""
        self.records += records
        self._unwritten += records

    def take_unwritten(self) -> list[Record]:
        """Return and clear the records that must be part of the next write."""
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    async def write(self, *records: Record) -> None:
        """Write these records after the unwritten ones. They are durable when this returns."""
        self.records += records
        await self._journal.append([*self.take_unwritten(), *records])

    def begin_write(self) -> "asyncio.Future[None] | None":
        """Begin to write the unwritten records; they are durable when the future is done. None if there are none."""
        unwritten = self.take_unwritten()
        return asyncio.ensure_future(self._journal.append(unwritten)) if unwritten else None
