"""Token ids of an attempt, and a model's answer as a record and back. Pure.

Each prompt is stored as what comes after the ids before it, or a journal would grow with the square of its turns.
"""

import copy
import time
from collections.abc import Sequence
from typing import Any

from agent_runtime.models.base import ModelReply
from rollout_api.records import ResponseRecord


def common_length(old: Sequence[Any], new: Sequence[Any]) -> int:
    """How many items at the head are equal."""
    if len(new) >= len(old) and new[: len(old)] == old:
        return len(old)
    length = 0
    for before, after in zip(old, new, strict=False):
        if before is not after and before != after:
            break
        length += 1
    return length


def split_prompt(known: Sequence[int], prompt: Sequence[int] | None) -> tuple[int, list[int] | None]:
    """A prompt as a record has it: known ids that are kept (`ResponseRecord.prompt_keep`), and those after them."""
    if prompt is None:
        return 0, None
    keep = common_length(known, prompt)
    return keep, list(prompt[keep:])


class TokenHistory:
    """Ids of the latest answer that had any, prompt and completion, and the messages that they stand for."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.messages = 0
        """Messages at the head of the conversation, that answer included; 0 when the ids stand for no such head any more."""

    def split(self, prompt: Sequence[int] | None) -> tuple[int, list[int] | None]:
        """See `split_prompt`."""
        return split_prompt(self.ids, prompt)

    def add(self, response: ResponseRecord, messages: int) -> list[int] | None:
        """Take the next answer in; `messages` counts its conversation, the answer included. Returns its whole prompt.

        None for an answer without ids: those before it stay what is known.
        """
        if response.prompt_token_ids is None or response.completion_token_ids is None:
            return None
        prompt = [*self.ids[: response.prompt_keep], *response.prompt_token_ids]
        self.ids, self.messages = [*prompt, *response.completion_token_ids], messages
        return prompt

    def keep_messages(self, count: int) -> None:
        """The next call's conversation has only so many messages of the last one's head."""
        if count < self.messages:
            self.messages = 0


def answer_record(
    reply: ModelReply, *, turn: int, seconds: float, known: Sequence[int], agent_seconds: float | None = None
) -> ResponseRecord:
    """The record of an answer that came now. `known` are the ids that the engine had seen before this prompt."""
    # Ids of half a turn would be of no use to anybody.
    whole = reply.completion_token_ids is not None
    keep, prompt = split_prompt(known, reply.prompt_token_ids if whole else None)
    return ResponseRecord(
        turn=turn,
        time=time.time(),
        seconds=seconds,
        message=reply.message,
        finish_reason=reply.finish_reason,
        model=reply.model,
        usage=reply.usage,
        prompt_keep=keep,
        prompt_token_ids=prompt,
        completion_token_ids=reply.completion_token_ids,
        logprobs=reply.logprobs,
        policy_spans=reply.policy_spans,
        stop_sequence=reply.stop_sequence,
        agent_seconds=agent_seconds,
    )


def recorded_answer(response: ResponseRecord, prompt: list[int] | None) -> ModelReply:
    """The answer of a record, whose message may be changed. `prompt` is the whole prompt; the record has its end alone."""
    return ModelReply(
        message=copy.deepcopy(response.message),
        finish_reason=response.finish_reason,
        model=response.model,
        usage=response.usage,
        prompt_token_ids=prompt,
        completion_token_ids=response.completion_token_ids,
        logprobs=response.logprobs,
        policy_spans=response.policy_spans,
        stop_sequence=response.stop_sequence,
    )
