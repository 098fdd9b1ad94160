"""Token ids of an attempt, and conversion of a model's answer into a record and back. Pure.

A prompt is recorded without the ids that it shares with the previous ones; otherwise a journal would grow with the
square of its turns.
"""

import copy
from collections.abc import Sequence
from typing import Any

from agent_runtime.models.base import ModelReply
from agent_runtime.wall_clock import unix_time
from rollout_api.records import RecordedExperts, ResponseRecord


def common_length(old: Sequence[Any], new: Sequence[Any]) -> int:
    """Return how many first items are equal."""
    if len(new) >= len(old) and new[: len(old)] == old:
        return len(old)
    length = 0
    for before, after in zip(old, new, strict=False):
        if before is not after and before != after:
            break
        length += 1
    return length


def split_prompt(known: Sequence[int], prompt: Sequence[int] | None) -> tuple[int, list[int] | None]:
    """Split a prompt for a record: the number of known ids that are kept (`ResponseRecord.prompt_keep`), and the ids
    after them.
    """
    if prompt is None:
        return 0, None
    keep = common_length(known, prompt)
    return keep, list(prompt[keep:])


def experts_after(known: int, response: ResponseRecord) -> int:
    """Return for how many first ids the routed experts are recorded after an answer with ids; `known` before it."""
    if response.routed_experts is not None:
        return response.routed_experts.spans[-1][1]
    return min(known, response.prompt_keep)


def experts_from(known: int, ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the first token of a prompt whose routed experts are to be reported, where those of the first `known` of the
    earlier `ids` are recorded. The prompt's last token is always included, because its experts chose the next token.
    """
    return max(0, min(known, common_length(ids, prompt), len(prompt) - 1))


class TokenHistory:
    """Ids of the latest answer that had any, prompt and completion, and the messages that they represent."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.messages = 0
        """Number of first messages of the conversation, that answer included; 0 if the ids no longer represent them."""
        self.experts = 0
        """Number of first ids whose routed experts need not be reported again."""

    def split(self, prompt: Sequence[int] | None) -> tuple[int, list[int] | None]:
        """See `split_prompt`."""
        return split_prompt(self.ids, prompt)

    def add(self, response: ResponseRecord, messages: int) -> list[int] | None:
        """Add the next answer; `messages` counts its conversation, the answer included. Returns its whole prompt.

        None for an answer without ids: the earlier ids are kept.
        """
        if response.prompt_token_ids is None or response.completion_token_ids is None:
            return None
        prompt = [*self.ids[: response.prompt_keep], *response.prompt_token_ids]
        self.experts = experts_after(self.experts, response)
        self.ids, self.messages = [*prompt, *response.completion_token_ids], messages
        return prompt

    def keep_messages(self, count: int) -> None:
        """The next call's conversation only shares this many first messages with the previous one."""
        if count < self.messages:
            self.messages = 0


def answer_record(
    reply: ModelReply,
    *,
    turn: int,
    seconds: float,
    known: Sequence[int],
    agent_seconds: float | None = None,
    experts: RecordedExperts | None = None,
) -> ResponseRecord:
    """Return the record of a new answer. `known` are the token ids known before this prompt; `experts` are those of the
    reply, as stored.
    """
    # Record the prompt's ids only together with the completion's.
    whole = reply.completion_token_ids is not None
    keep, prompt = split_prompt(known, reply.prompt_token_ids if whole else None)
    return ResponseRecord(
        turn=turn,
        time=unix_time(),
        seconds=seconds,
        prompt_keep=keep,
        prompt_token_ids=prompt,
        agent_seconds=agent_seconds,
        routed_experts=experts,
        **_shared(reply),
    )


def recorded_answer(response: ResponseRecord, prompt: list[int] | None) -> ModelReply:
    """Return the answer in a record; its message may be changed. `prompt` is the whole prompt, of which the record only
    has the end.
    """
    fields = _shared(response) | {"message": copy.deepcopy(response.message)}
    return ModelReply(prompt_token_ids=prompt, **fields)


def _shared(answer: ModelReply | ResponseRecord) -> dict[str, Any]:
    """Return the fields that an answer and its record share."""
    names = "message finish_reason model usage completion_token_ids logprobs policy_spans stop_sequence"
    return {name: getattr(answer, name) for name in names.split()}
