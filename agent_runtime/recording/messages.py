"""The messages of every turn, put together again from what the journal keeps of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_api.records import IntentRecord, Message, Observation, ObservationsRecord, Record, ResponseRecord


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as it was: what the model was sent, what it answered, what its tool calls gave."""

    intent: IntentRecord
    messages: list[Message]
    """All messages of the call."""
    tools: list[dict[str, Any]]
    """Tool definitions of the call."""
    response: ResponseRecord | None
    """None where the journal ends before the answer."""
    observations: list[Observation]

    @property
    def number(self) -> int:
        """Its number in the attempt."""
        return self.intent.turn

    @property
    def branch(self) -> int:
        """Counts up each time the messages do not extend the previous turn's."""
        return self.intent.branch

    @property
    def kept(self) -> int:
        """Messages at the head that stood in the turn before it already, its answer included."""
        return self.intent.keep

    @property
    def time(self) -> float:
        """Unix seconds of the intent."""
        return self.intent.time

    def answered(self) -> list[Message]:
        """The call's messages and the answer."""
        return [*self.messages, self.response.message] if self.response else self.messages

    def conversation(self) -> list[Message]:
        """The call's messages, the answer, and the tools' results."""
        results: list[Message] = [
            {"role": "tool", "tool_call_id": result.call_id, "content": result.content} for result in self.observations
        ]
        return [*self.answered(), *results]


def fold(records: Sequence[Record]) -> list[Turn]:
    """The turns of an attempt in order. A journal may end anywhere; the last turn then lacks what is missing."""
    return fold_calls([record for record in records if isinstance(record, IntentRecord)], records)


def fold_calls(intents: Sequence[IntentRecord], records: Sequence[Record]) -> list[Turn]:
    """The turns of these calls, in their order. A call follows its parent, else the call before it."""
    responses = {record.turn: record for record in records if isinstance(record, ResponseRecord)}
    observed = results_by_turn(records)
    turns: dict[int, Turn] = {}
    before: Turn | None = None
    for intent in intents:
        parent = before if intent.parent is None else turns.get(intent.parent, before)
        kept, tools = (parent.answered(), parent.tools) if parent else ([], [])
        turns[intent.turn] = before = Turn(
            intent=intent,
            messages=[*kept[: intent.keep], *intent.messages],
            tools=tools if intent.tools is None else intent.tools,
            response=responses.get(intent.turn),
            observations=observed.get(intent.turn, []),
        )
    return list(turns.values())


def model_of(records: Sequence[Record]) -> str | None:
    """The name of the model that gave the first answer; None without an answer that names one."""
    return next((record.model for record in records if isinstance(record, ResponseRecord) and record.model), None)


def results_by_turn(records: Sequence[Record]) -> dict[int, list[Observation]]:
    """The results of tool calls; an agent may run those of one answer one after another, a record each."""
    found: dict[int, list[Observation]] = defaultdict(list)
    for record in records:
        if isinstance(record, ObservationsRecord):
            found[record.turn] += record.results
    return dict(found)


def last_of_each_branch(turns: Sequence[Turn]) -> list[Turn]:
    """The last turn of each branch: its conversation holds all earlier ones of the branch."""
    return [turn for _, turn in sorted({turn.branch: turn for turn in turns}.items())]
