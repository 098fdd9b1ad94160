"""The turns of an attempt, put one after another, as those who read a journal expect.

An agent may start sub-agents, and behind the session proxy conversations are held side by side; their calls interleave.
Each call records its parent turn (`IntentRecord.parent`), so that together they are trees. Here the trees are walked from
their roots to their leaves. Answers that reached nobody and calls that were never answered are left out, except a call that
the attempt ends with. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agent_runtime.recording.token_history import TokenHistory, common_length
from rollout_api.records import DeliveryRecord, IntentRecord, Message, Record, ResponseRecord


@dataclass(slots=True)
class _Node:
    intent: IntentRecord
    response: ResponseRecord | None
    """None for the call that the attempt ends with."""
    conversation: list[Message]
    """All messages, the answer included."""
    tools: list[dict[str, object]]
    prompt: list[int] | None
    """The whole prompt; None where the server gave no ids."""
    ids: list[int]
    """What the engine has seen up to here: of this turn, or of the nearest before it that had ids."""


def linear(records: Sequence[Record]) -> list[Record]:
    """The records with the turns of each conversation one after another, each relative to the turn before; `branch` is set.

    Applied to its own result, it changes nothing.
    """
    order = _order(records)
    if _is_in_line(records, order):
        return _with_branches(records)
    is_turn = [isinstance(record, IntentRecord | ResponseRecord | DeliveryRecord) for record in records]
    first = is_turn.index(True)
    rest = [record for record, of_turn in zip(records[first:], is_turn[first:], strict=True) if not of_turn]
    return _with_branches([*records[:first], *_in_line(_nodes(records, order)), *rest])


def undelivered_turns(records: Sequence[Record]) -> set[int]:
    """Turns whose answer is known to have reached nobody."""
    delivered = {record.turn: record.delivered for record in records if isinstance(record, DeliveryRecord)}
    return {turn for turn, reached in delivered.items() if not reached}


def _order(records: Sequence[Record]) -> list[IntentRecord]:
    """The calls that count, a conversation's one after another: depth first, the earlier child first."""
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
    """Whether each call is followed by its answer, then by the next call: side by side, answers overtake one another."""
    turns = [record.turn for record in records if isinstance(record, IntentRecord | ResponseRecord)]
    answered = {record.turn for record in records if isinstance(record, ResponseRecord)}
    expected = [turn for intent in order for turn in [intent.turn] * (1 + (intent.turn in answered))]
    return turns == expected and all(intent.parent in (None, before.turn) for before, intent in pairwise(order))


def _nodes(records: Sequence[Record], order: Sequence[IntentRecord]) -> Iterator[_Node]:
    responses = {record.turn: record for record in records if isinstance(record, ResponseRecord)}
    nodes: dict[int, _Node] = {}
    for intent in order:
        response = responses.get(intent.turn)
        parent = None if intent.parent is None else nodes[intent.parent]
        kept, tools, seen = (parent.conversation, parent.tools, parent.ids) if parent else ([], [], [])
        answer, prompt, completion = [], None, []
        if response is not None:
            answer = [response.message]
            if response.prompt_token_ids is not None and response.completion_token_ids is not None:
                prompt, completion = (
                    [*seen[: response.prompt_keep], *response.prompt_token_ids],
                    response.completion_token_ids,
                )
        nodes[intent.turn] = node = _Node(
            intent=intent,
            response=response,
            conversation=[*kept[: intent.keep], *intent.messages, *answer],
            tools=tools if intent.tools is None else intent.tools,
            prompt=prompt,
            ids=seen if prompt is None else [*prompt, *completion],
        )
        yield node


def _in_line(turns: Iterable[_Node]) -> Iterator[Record]:
    conversation: list[Message] = []
    tools: list[dict[str, object]] | None = None
    tokens = TokenHistory()
    before: int | None = None
    for node in turns:
        messages = node.conversation if node.response is None else node.conversation[:-1]
        keep = common_length(conversation, messages)
        yield node.intent.model_copy(
            update={
                "parent": before,
                "keep": keep,
                "messages": messages[keep:],
                "tools": None if node.tools == tools else node.tools,
                "request_digest": None,
                "idempotency_key": None,
            }
        )
        if node.response is not None:
            prompt_keep, prompt = tokens.split(node.prompt)
            response = node.response.model_copy(update={"prompt_keep": prompt_keep, "prompt_token_ids": prompt})
            tokens.add(response, len(node.conversation))
            yield response
        conversation, tools, before = node.conversation, node.tools, node.intent.turn


def _with_branches(records: Sequence[Record]) -> list[Record]:
    """The records, in line already, with `branch` set."""
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
