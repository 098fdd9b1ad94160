"""The messages of every turn, put together again from what the journal keeps of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_api.records import IntentRecord, Message, Observation, ObservationsRecord, Record, ResponseRecord


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as it was: what the model was sent, what it answered, what its tool calls gave."""

    number: int
    branch: int
    """Counts up each time the messages do not extend the previous turn's."""
    kept: int
    """Messages at the head that stood in the previous turn already, its answer included."""
    messages: list[Message]
    """All messages of the call."""
    tools: list[dict[str, Any]]
    """Tool definitions of the call."""
    time: float
    """Unix seconds of the intent."""
    response: ResponseRecord | None
    """None where the journal ends before the answer."""
    observations: list[Observation]

    def conversation(self) -> list[Message]:
        """The call's messages, the answer, and the tools' results."""
        answer = [self.response.message] if self.response else []
        results: list[Message] = [
            {"role": "tool", "tool_call_id": result.call_id, "content": result.content} for result in self.observations
        ]
        return [*self.messages, *answer, *results]


def fold(records: Sequence[Record]) -> list[Turn]:
    """The turns of an attempt in order. A journal may end anywhere; the last turn then lacks what is missing."""
    responses = {record.turn: record for record in records if isinstance(record, ResponseRecord)}
    observed = results_by_turn(records)
    turns: list[Turn] = []
    conversation: list[Message] = []
    tools: list[dict[str, Any]] = []
    for intent in (record for record in records if isinstance(record, IntentRecord)):
        tools = tools if intent.tools is None else intent.tools
        messages = [*conversation[: intent.keep], *intent.messages]
        response = responses.get(intent.turn)
        turns.append(
            Turn(
                number=intent.turn,
                branch=intent.branch,
                kept=intent.keep,
                messages=messages,
                tools=tools,
                time=intent.time,
                response=response,
                observations=observed.get(intent.turn, []),
            )
        )
        conversation = [*messages, response.message] if response else messages
    return turns


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
