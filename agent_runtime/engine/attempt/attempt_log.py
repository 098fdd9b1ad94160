"""The records of one attempt in order: those that an earlier process journaled, which are replayed, and then new ones."""

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
"""What answers a call of the agent, so that it need not be made again."""
R = TypeVar("R", IntentRecord, ResponseRecord, ObservationsRecord, StepRecord, CheckpointRecord, ReturnRecord)


class NotReplayable(Exception):
    """The agent did not repeat a call that the journal has: it is not a function of what its context returned."""


class AttemptLog:
    """`recorded` is what the journal has of the attempt, `unwritten` what the first write is to begin with."""

    def __init__(
        self, journal: SessionJournal, recorded: Sequence[Record] = (), unwritten: Sequence[Record] = ()
    ) -> None:
        self.records: list[Record] = [*(r for r in recorded if not isinstance(r, REPLAYED)), *unwritten]
        """The attempt's records so far, journaled or about to be; of those to replay, what was come to."""
        self.recorded = recorded
        self._journal = journal
        self._replay = [record for record in reversed(recorded) if isinstance(record, REPLAYED)]
        self._unwritten = list(unwritten)

    @property
    def replaying(self) -> bool:
        """Whether the journal still has answers to calls that the agent is about to make."""
        return bool(self._replay)

    def next(self, form: type[R], turn: int) -> R | None:
        """The journal's answer to a call of the agent; None when the call has to be made.

        Raises NotReplayable when the journal goes on with another call. What follows a gap is never replayed.
        """
        if not self._replay:
            return None
        record = self._replay[-1]
        if isinstance(record, form):
            self.records.append(self._replay.pop())
            return record
        if form not in (ResponseRecord, ObservationsRecord):
            raise NotReplayable(
                f"turn {turn}: the journal goes on with {record.type}, the agent with another call; "
                "an agent must be a function of what its context returned"
            )
        return None

    def add(self, *records: Record) -> None:
        """Note what is to be written with whatever comes next."""
        self.records += records
        self._unwritten += records

    def take_unwritten(self) -> list[Record]:
        """Records that still have to be written, with whatever comes next."""
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    async def write(self, *records: Record) -> None:
        """Write these and what is still unwritten. All of it is durable when this returns."""
        self.records += records
        await self._journal.append([*self.take_unwritten(), *records])

    def begin_write(self) -> "asyncio.Future[None] | None":
        """Begin to write what is still unwritten; it is durable when the future is done. None when there is nothing."""
        unwritten = self.take_unwritten()
        return asyncio.ensure_future(self._journal.append(unwritten)) if unwritten else None
