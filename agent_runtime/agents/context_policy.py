"""What becomes of a conversation that has grown too long: the oldest turns go, or a summary stands for all of them. Pure.

Either way the next call's messages do not extend the last one's, so that a new branch begins in the record and in every
export: nothing is trained on a context that the model did not have.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.records import Message
from rollout_api.rollout_job import ContextLimit

KEPT_FRACTION = 0.5
"""Of the limit that is left after a cut. A cut begins a branch and costs the server's prefix cache, so it should last."""
LEFT_OUT = "[Earlier messages were left out here to save space.]"
SUMMARISE = (
    "The conversation has become too long and will go on without its earlier messages. Call no tool now. Write down all "
    "that is needed to go on with the task: what was asked, what was found out and done so far, what is left to do, and "
    "the names of files, commands and values that matter."
)
SUMMARY = "Earlier messages were left out. This is your own summary of them:\n\n{summary}\n\nGo on with the task."


@dataclass(frozen=True)
class Size:
    """How long a conversation is. `tokens` are the server's count for its latest call and answer; 0 where it gives none."""

    messages: int
    tokens: int


def is_over(limit: ContextLimit, size: Size) -> bool:
    """Whether something has to go before the next call."""
    if limit.max_messages is not None:
        return size.messages > limit.max_messages
    return limit.max_tokens is not None and size.tokens > limit.max_tokens


def truncated(limit: ContextLimit, messages: Sequence[Message], head: int, tokens: int) -> list[Message]:
    """The first `head` messages, a note, and as many of the latest whole turns as half the limit has room for.

    A turn is an answer with what followed it, so that no result stands without its call. The latest turn always stays. The
    same messages where there is nothing to leave out.
    """
    starts = [position for position in range(head, len(messages)) if messages[position].get("role") == "assistant"]
    kept = starts[-1:]
    for start in reversed(starts[:-1]):
        if not _fits(limit, messages, head, start, tokens):
            break
        kept = [start]
    if not kept or kept[0] <= head:
        return list(messages)
    return [*messages[:head], {"role": "user", "content": LEFT_OUT}, *messages[kept[0] :]]


def summarised(messages: Sequence[Message], head: int, summary: str) -> list[Message]:
    """The first `head` messages, and the summary in place of all others."""
    return [*messages[:head], {"role": "user", "content": SUMMARY.format(summary=summary)}]


def _fits(limit: ContextLimit, messages: Sequence[Message], head: int, start: int, tokens: int) -> bool:
    if limit.max_messages is not None:
        return head + 1 + len(messages) - start <= limit.max_messages * KEPT_FRACTION
    # The server counts whole prompts alone: a part of one has its share by the length of its text.
    lengths = [len(json.dumps(message, default=str)) for message in messages]
    share = (sum(lengths[:head]) + sum(lengths[start:])) / sum(lengths)
    return share * tokens <= (limit.max_tokens or 0) * KEPT_FRACTION
