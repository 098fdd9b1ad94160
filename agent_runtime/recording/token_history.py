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
        prompt_keep=keep,
        prompt_token_ids=prompt,
        agent_seconds=agent_seconds,
        **_shared(reply),
    )


def recorded_answer(response: ResponseRecord, prompt: list[int] | None) -> ModelReply:
    """The answer of a record, whose message may be changed. `prompt` is the whole prompt; the record has its end alone."""
    fields = _shared(response) | {"message": copy.deepcopy(response.message)}
    return ModelReply(prompt_token_ids=prompt, **fields)


def _shared(answer: ModelReply | ResponseRecord) -> dict[str, Any]:
    """The fields that an answer and its record have in common, by the same names."""
    names = "message finish_reason model usage completion_token_ids logprobs policy_spans stop_sequence"
    return {name: getattr(answer, name) for name in names.split()}
