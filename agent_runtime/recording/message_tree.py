"""Sort the turns of an attempt by conversation, as readers of a journal expect. Calls of sub-agents, and of programs
behind the session proxy, interleave. Each call records its parent turn, so calls form trees, which are traversed depth
first. Undelivered answers are left out, and so are calls without an answer, except a call that ends the attempt.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from agent_runtime.models.token_history import TokenHistory, common_length
from agent_runtime.recording.messages import Turn, fold_calls
from rollout_api.records import DeliveryRecord, IntentRecord, Message, Record, ResponseRecord


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
