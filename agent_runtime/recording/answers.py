"""A model's answer as a record, and back."""

import copy
import time
from collections.abc import Sequence

from agent_runtime.models.base import ModelReply
from agent_runtime.recording.token_history import split_prompt
from rollout_api.records import ResponseRecord


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
