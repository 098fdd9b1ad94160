"""The turns of an agent that held several conversations, put one after another, as those who read a journal expect.

Behind the session proxy they may be held side by side, and an agent may start sub-agents; their calls then interleave. Each
says which turn it goes on from (`IntentRecord.follows`), so that together they are a tree. Here the tree is walked from its
roots to its leaves; what does not extend the turn before it becomes a branch of its own. Answers that reached nobody and
calls that were never answered are left out. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agent_runtime.recording.token_history import TokenHistory, common_length
from rollout_api.records import DeliveryRecord, IntentRecord, Message, Record, ResponseRecord


@dataclass(slots=True)
class _Node:
    intent: IntentRecord
    response: ResponseRecord
    conversation: list[Message]
    """All messages, the answer included."""
    tools: list[dict[str, object]]
    prompt: list[int] | None
    """The whole prompt; None where the server gave no ids."""
    ids: list[int]
    """What the engine has seen up to here: of this turn, or of the nearest before it that had ids."""
    children: "list[_Node]" = field(default_factory=list)


def linear(records: Sequence[Record]) -> list[Record]:
    """The records with the turns in the order of their branches; as they are where the turns are in line already."""
    if not is_tree(records):
        return list(records)
    roots = _tree(records)
    undelivered = undelivered_turns(records)
    turns = [node for root in roots for node in _walk(root) if node.children or node.intent.turn not in undelivered]
    is_turn = [isinstance(record, IntentRecord | ResponseRecord | DeliveryRecord) for record in records]
    first = is_turn.index(True)
    rest = [record for record, of_turn in zip(records[first:], is_turn[first:], strict=True) if not of_turn]
    return [*records[:first], *_in_line(turns), *rest]


def is_tree(records: Sequence[Record]) -> bool:
    """Whether several conversations are in them, or may be."""
    return any(
        isinstance(record, DeliveryRecord)
        or (isinstance(record, IntentRecord) and (record.follows is not None or record.request_digest is not None))
        for record in records
    )


def undelivered_turns(records: Sequence[Record]) -> set[int]:
    """Turns whose answer is known to have reached nobody."""
    delivered = {record.turn: record.delivered for record in records if isinstance(record, DeliveryRecord)}
    return {turn for turn, reached in delivered.items() if not reached}


def _tree(records: Sequence[Record]) -> list[_Node]:
    """The answered turns; returns those that follow no other."""
    responses = {record.turn: record for record in records if isinstance(record, ResponseRecord)}
    nodes: dict[int, _Node] = {}
    roots: list[_Node] = []
    latest: _Node | None = None
    for intent in (record for record in records if isinstance(record, IntentRecord)):
        if (response := responses.get(intent.turn)) is None:
            continue
        before = latest if _goes_on(intent, response) else nodes.get(-1 if intent.follows is None else intent.follows)
        kept, tools, seen = (before.conversation, before.tools, before.ids) if before else ([], [], [])
        prompt = None
        if response.prompt_token_ids is not None and response.completion_token_ids is not None:
            prompt = [*seen[: response.prompt_keep], *response.prompt_token_ids]
        nodes[intent.turn] = node = _Node(
            intent=intent,
            response=response,
            conversation=[*kept[: intent.keep], *intent.messages, response.message],
            tools=tools if intent.tools is None else intent.tools,
            prompt=prompt,
            ids=seen if prompt is None else [*prompt, *(response.completion_token_ids or [])],
        )
        (before.children if before else roots).append(node)
        latest = node
    return roots


def _goes_on(intent: IntentRecord, response: ResponseRecord) -> bool:
    """Whether a turn goes on from the one before it without saying so, as only the engine's own records do."""
    begins_anew = intent.keep == 0 and response.prompt_keep == 0 and intent.tools is not None
    return intent.follows is None and intent.request_digest is None and not begins_anew


def _walk(root: _Node) -> Iterator[_Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children)


def _in_line(turns: Sequence[_Node]) -> Iterator[Record]:
    conversation: list[Message] = []
    tools: list[dict[str, object]] | None = None
    tokens, branch = TokenHistory(), 0
    for node in turns:
        messages = node.conversation[:-1]
        keep = common_length(conversation, messages)
        branch += keep < len(conversation)
        yield node.intent.model_copy(
            update={
                "keep": keep,
                "messages": messages[keep:],
                "tools": None if node.tools == tools else node.tools,
                "branch": branch,
                "follows": None,
                "request_digest": None,
                "idempotency_key": None,
            }
        )
        prompt_keep, prompt = tokens.split(node.prompt)
        response = node.response.model_copy(update={"prompt_keep": prompt_keep, "prompt_token_ids": prompt})
        tokens.add(response, len(node.conversation))
        yield response
        conversation, tools = node.conversation, node.tools
