"""The messages of every turn, restored from the journal."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_api.records import IntentRecord, Message, Observation, ObservationsRecord, Record, ResponseRecord


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: the messages sent to the model, its answer, and the results of its tool calls."""

    intent: IntentRecord
    messages: list[Message]
    """All messages of the call."""
    tools: list[dict[str, Any]]
    """Tool definitions of the call."""
    response: ResponseRecord | None
    """None if the journal ends before the answer."""
    observations: list[Observation]

    @property
    def number(self) -> int:
        """Return its number in the attempt."""
        return self.intent.turn

    @property
    def branch(self) -> int:
        """Return the branch number, which increases each time the messages do not extend the previous turn's."""
        return self.intent.branch

    @property
    def kept(self) -> int:
        """Return how many first messages the previous turn had already, its answer included."""
        return self.intent.keep

    @property
    def time(self) -> float:
        """Return the Unix time of the intent."""
        return self.intent.time

    def answered(self) -> list[Message]:
        """Return the call's messages and the answer."""
        return [*self.messages, self.response.message] if self.response else self.messages

    def conversation(self) -> list[Message]:
        """Return the call's messages, the answer, and the tools' results."""
        results: list[Message] = [
            {"role": "tool", "tool_call_id": result.call_id, "content": result.content} for result in self.observations
        ]
        return [*self.answered(), *results]


def fold(records: Sequence[Record]) -> list[Turn]:
    """Return the turns of an attempt in order. If the journal is incomplete, so is the last turn."""
    return fold_calls([record for record in records if isinstance(record, IntentRecord)], records)


def fold_calls(intents: Sequence[IntentRecord], records: Sequence[Record]) -> list[Turn]:
    """Return the turns of these calls in order. A call follows its parent, else the previous call."""
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
    """Return the name of the model that gave the first answer; None if no answer names one."""
    return next((record.model for record in records if isinstance(record, ResponseRecord) and record.model), None)


def results_by_turn(records: Sequence[Record]) -> dict[int, list[Observation]]:
    """Return the results of tool calls by turn. Agents may run the calls of one answer separately, with a record for
    each.
    """
    found: dict[int, list[Observation]] = defaultdict(list)
    for record in records:
        if isinstance(record, ObservationsRecord):
            found[record.turn] += record.results
    return dict(found)


def last_of_each_branch(turns: Sequence[Turn]) -> list[Turn]:
    """Return the last turn of each branch: its conversation includes all earlier ones of the branch."""
    return [turn for _, turn in sorted({turn.branch: turn for turn in turns}.items())]
