"""The records of one attempt in order: those of an earlier process, which are replayed, then new ones; and its
conversations with the model, which determine the new messages of the next call.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.models.routed_experts import AnswerExperts
from agent_runtime.models.token_history import TokenHistory, common_length
from agent_runtime.proxy.session import SessionJournal, stored_experts
from agent_runtime.tools.base import shortened
from agent_runtime.wall_clock import unix_time
from rollout_api.nesting import as_recorded
from rollout_api.records import (
    CheckpointRecord,
    IntentRecord,
    Message,
    Observation,
    ObservationsRecord,
    Record,
    RecordedExperts,
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

    async def store_experts(self, turn: int, experts: AnswerExperts | None) -> RecordedExperts | None:
        """Store the routed experts of an answer, and return what its record has of them."""
        return await stored_experts(self._journal, turn, experts)

    def begin_write(self) -> "asyncio.Future[None] | None":
        """Begin to write the unwritten records; they are durable when the future is done. None if there are none."""
        unwritten = self.take_unwritten()
        return asyncio.ensure_future(self._journal.append(unwritten)) if unwritten else None


class Conversation:
    """Messages of a conversation up to the latest answer, and their token ids as the inference server reported them."""

    def __init__(self) -> None:
        self.tokens = TokenHistory()
        self._id: int | None = None
        self._messages: list[Message] = []
        self._tools: list[dict[str, Any]] | None = None
        self._asked: tuple[int, list[Message], list[dict[str, Any]]] = -1, [], []
        """The latest call. No call follows before it is answered, because an agent may cancel a call."""
        self.turn: int | None = None
        """Latest answered turn."""
        self.calls = 0
        """Tool calls since then. Sub-agents may have worked between two of them."""

    def intent(
        self,
        turn: int,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        agent_seconds: float | None = None,
    ) -> IntentRecord:
        """Return the record of the next call, which is turn `turn` of the attempt."""
        # Copies: agents may change the objects that they passed, and a changed message must differ from the earlier
        # one.
        sent: list[Message] = as_recorded(messages)
        definitions: list[dict[str, Any]] = as_recorded(tools)
        keep = common_length(self._messages, sent)
        same_tools = definitions == self._tools
        self.tokens.keep_messages(keep if same_tools else 0)
        if self._id is None:
            self._id = turn
        record = IntentRecord(
            turn=turn,
            time=unix_time(),
            conversation=self._id,
            parent=self.turn,
            keep=keep,
            messages=sent[keep:],
            tools=None if same_tools else definitions,
            agent_seconds=agent_seconds,
        )
        self._asked = turn, sent, definitions
        return record

    def unrecorded(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages after those that `messages` shares with the latest answered call."""
        return messages[common_length(self._messages, messages) :]

    def answered(self, message: Message) -> int:
        """Add the answer; return the number of messages."""
        self.turn, self._messages, self._tools = self._asked
        self.calls = 0
        self._messages.append(as_recorded(message))
        return len(self._messages)

    def with_arguments(self, calls: Sequence[ToolCall], results: Sequence[Observation]) -> list[Observation]:
        """Return the results with the arguments of calls that the answer does not contain, which nothing else records."""
        answer = self._messages[-1] if self._messages else {}
        asked = {call.id for call in ModelReply(answer, "").tool_calls}
        own = {call.id: shortened(call.arguments) for call in calls if call.id not in asked}
        return [
            result.model_copy(update={"arguments": own[result.call_id]}) if result.call_id in own else result
            for result in results
        ]
