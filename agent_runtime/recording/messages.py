"""The messages of every turn, restored from the journal and sorted by conversation, as readers expect.

Calls of sub-agents, and of programs behind the session proxy, interleave. Each call records its parent turn, so calls
form trees, which are traversed depth first. Undelivered answers are left out, and so are calls without an answer,
except a call that ends the attempt.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from agent_runtime.models.token_history import TokenHistory, common_length
from rollout_api.records import (
    DeliveryRecord,
    IntentRecord,
    Message,
    Observation,
    ObservationsRecord,
    Record,
    ResponseRecord,
)


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


def last_made(turns: Sequence[Turn]) -> Turn | None:
    """Return the turn that was made last; None without turns. Turns of sub-agents follow those of their agent, and were
    made before its last one.
    """
    return max(turns, key=lambda turn: turn.number, default=None)


def prompt_in(conversation: Sequence[Message], turns: Sequence[Turn], copied: int) -> list[Message]:
    """Return the messages of a conversation before the rollout's own first answer. Those up to the turn `copied` are
    copies from another rollout, which samples them once.
    """
    own = next((turn for turn in turns if turn.number > copied), None)
    if own is None:
        return list(conversation)
    if copied >= 0 and list(conversation[: len(own.messages)]) == own.messages:
        return own.messages
    # A conversation that the agent has shortened since may still have copied answers.
    copies = [turn.response.message for turn in turns if turn.number <= copied and turn.response is not None]
    return list(takewhile(lambda message: message["role"] != "assistant" or message in copies, conversation))


def last_of_each_branch(turns: Sequence[Turn]) -> list[Turn]:
    """Return the last turn of each branch: its conversation includes all earlier ones of the branch."""
    return [turn for _, turn in sorted({turn.branch: turn for turn in turns}.items())]


def linear(records: Sequence[Record]) -> list[Record]:
    """Return the records with the turns of each conversation one after another, each relative to the previous turn;
    `branch` is set.

    Idempotent.
    """
    order = _order(records)
    if _is_in_line(records, order):
        return _with_branches(records)
    is_turn = [isinstance(record, IntentRecord | ResponseRecord | DeliveryRecord) for record in records]
    first = is_turn.index(True)
    rest = [record for record, of_turn in zip(records[first:], is_turn[first:], strict=True) if not of_turn]
    return _with_branches([*records[:first], *_in_line(fold_calls(order, records)), *rest])


def undelivered_turns(records: Sequence[Record]) -> set[int]:
    """Return the turns whose answer was not delivered."""
    delivered = {record.turn: record.delivered for record in records if isinstance(record, DeliveryRecord)}
    return {turn for turn, reached in delivered.items() if not reached}


def _order(records: Sequence[Record]) -> list[IntentRecord]:
    """Return the calls to keep, one conversation after another: depth first, the earlier child first."""
    answered = {record.turn for record in records if isinstance(record, ResponseRecord)}
    intents = {record.turn: record for record in records if isinstance(record, IntentRecord)}
    last = max(intents, default=None)
    children: dict[int | None, list[IntentRecord]] = defaultdict(list)
    for intent in intents.values():
        if intent.turn in answered or (intent.turn == last and (intent.parent is not None or not answered)):
            children[intent.parent].append(intent)
    undelivered = undelivered_turns(records)
    found, waiting = [], list(reversed(children[None]))
    while waiting:
        intent = waiting.pop()
        following = children.get(intent.turn, [])
        if following or intent.turn not in undelivered or intent.turn not in answered:
            found.append(intent)
        waiting += reversed(following)
    return found


def _is_in_line(records: Sequence[Record], order: Sequence[IntentRecord]) -> bool:
    """Whether each call is followed by its answer, then by the next call. Answers to concurrent calls arrive in any
    order.
    """
    turns = [record.turn for record in records if isinstance(record, IntentRecord | ResponseRecord)]
    answered = {record.turn for record in records if isinstance(record, ResponseRecord)}
    expected = [turn for intent in order for turn in [intent.turn] * (1 + (intent.turn in answered))]
    return turns == expected and all(intent.parent in (None, before.turn) for before, intent in pairwise(order))


def _in_line(turns: Iterable[Turn]) -> Iterator[Record]:
    conversation: list[Message] = []
    tools: list[dict[str, object]] | None = None
    tokens = TokenHistory()
    seen: dict[int | None, list[int]] = {None: []}
    """Token ids after a turn: its own, or those of the nearest earlier turn that has any."""
    before: int | None = None
    for turn in turns:
        keep = common_length(conversation, turn.messages)
        yield turn.intent.model_copy(
            update={
                "parent": before,
                "keep": keep,
                "messages": turn.messages[keep:],
                "tools": None if turn.tools == tools else turn.tools,
                "request_digest": None,
                "idempotency_key": None,
            }
        )
        conversation, tools, before = turn.answered(), turn.tools, turn.number
        seen[before] = known = seen[turn.intent.parent]
        if (answer := turn.response) is not None:
            prompt = None
            if answer.prompt_token_ids is not None and answer.completion_token_ids is not None:
                prompt = [*known[: answer.prompt_keep], *answer.prompt_token_ids]
                seen[before] = [*prompt, *answer.completion_token_ids]
            prompt_keep, rest = tokens.split(prompt)
            response = answer.model_copy(update={"prompt_keep": prompt_keep, "prompt_token_ids": rest})
            tokens.add(response, len(conversation))
            yield response


def _with_branches(records: Sequence[Record]) -> list[Record]:
    """Return records that are already sorted, with `branch` set."""
    found: list[Record] = []
    branch = messages = 0
    for record in records:
        if isinstance(record, IntentRecord):
            branch += record.keep < messages
            messages = record.keep + len(record.messages)
            record = record if record.branch == branch else record.model_copy(update={"branch": branch})
        elif isinstance(record, ResponseRecord):
            messages += 1
        found.append(record)
    return found
