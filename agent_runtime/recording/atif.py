"""A rollout as an ATIF 1.7 trajectory (Agent Trajectory Interchange Format, Harbor's RFC 0001).

Each model call is one agent step with its tool calls and their results; other messages are system and user steps. Only
sampled token ids are included, because the prompts of all turns would grow with the square of the turns. The tokens
object has all ids.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from agent_runtime.models.answers import decoded_object
from agent_runtime.recording.branches import copied_turn
from agent_runtime.recording.messages import Turn, fold
from rollout_api.records import Message, Observation, Record, ResponseRecord
from rollout_api.rollout_job import RolloutJob
from rollout_api.version import VERSION

SCHEMA_VERSION: Final = "ATIF-v1.7"
_REPEATED_CHARACTERS: Final = 1000


def trajectory(job: RolloutJob, session: str, records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the trajectory as JSON, or None without a model call. `session` identifies the rollout among all runs."""
    turns = fold(records)
    copied = copied_turn(records)
    steps: list[dict[str, Any]] = []
    seen: set[str] = set()
    answered: set[str] = set()
    branch_before = 0
    for turn in turns:
        for message in turn.messages[turn.kept :]:
            if message.get("role") != "tool" or message.get("tool_call_id") not in answered:
                # Only a new branch repeats messages of an earlier one. Within a branch, an equal message is a new one.
                repeated = turn.branch != branch_before and _canonical(message) in seen
                step = _message_step(message, turn, copied=repeated or turn.number <= copied)
                steps.append(step | {"message": _head_of(step["message"])} if repeated else step)
            seen.add(_canonical(message))
        if turn.response is not None:
            steps.append(_agent_step(turn, turn.response, copied=turn.number <= copied))
            seen.add(_canonical(turn.response.message))
        answered.update(result.call_id for result in turn.observations)
        branch_before = turn.branch
    if not steps:
        return None
    responses = [turn.response for turn in turns if turn.response is not None and turn.number > copied]
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": session,
        "agent": {
            "name": job.spec.agent.type,
            "version": VERSION,
            **given(model_name=next((r.model for r in responses if r.model), None)),
            **given(tool_definitions=turns[0].tools),
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {
            "total_prompt_tokens": sum(r.usage.prompt_tokens for r in responses),
            "total_completion_tokens": sum(r.usage.completion_tokens for r in responses),
            "total_cached_tokens": sum(r.usage.cached_tokens for r in responses),
            "total_steps": len(steps),
        },
    }


def _head_of(text: str) -> str:
    """Return the beginning of a text that an earlier step has completely. Otherwise agents that rewrite their history
    in each call would repeat all of it.
    """
    if (omitted := len(text) - _REPEATED_CHARACTERS) <= 0:
        return text
    return f"{text[:_REPEATED_CHARACTERS]}\n[… {omitted} characters omitted: an earlier step has the whole message …]"


def _message_step(message: Message, turn: Turn, *, copied: bool) -> dict[str, Any]:
    """Return the step of a message that this rollout's model did not write: a prompt, or rewritten history."""
    role = message.get("role")
    source = {"assistant": "agent", "system": "system", "developer": "system"}.get(str(role), "user")
    return {
        "timestamp": timestamp(turn.time),
        "source": source,
        "message": text_of(message.get("content")),
        # This rollout's model did not write it, so the step has no model call.
        **({"llm_call_count": 0} if source == "agent" else {}),
        **given(is_copied_context=copied),
        **given(extra=given(branch=turn.branch, role=role if role in ("tool", "developer") else None)),
    }


def _agent_step(turn: Turn, response: ResponseRecord, *, copied: bool) -> dict[str, Any]:
    """Return the step of a model's answer. A copied one belongs to another rollout, which reports its metrics."""
    message = response.message
    calls = [
        tool_call(call.get("id"), function.get("name"), function.get("arguments"), position)
        for position, call in enumerate(message.get("tool_calls") or [])
        for function in [call.get("function") or {}]
    ]
    ids = {call["tool_call_id"] for call in calls}
    return {
        "timestamp": timestamp(response.time),
        "source": "agent",
        "message": text_of(message.get("content")),
        **given(model_name=response.model),
        **given(reasoning_content=reasoning_of(message)),
        **given(tool_calls=calls),
        **given(observation=given(results=[_result(result, ids) for result in turn.observations])),
        **given(metrics={} if copied else _metrics(response), is_copied_context=copied),
        "llm_call_count": 0 if copied else 1,
        "extra": {
            "turn": turn.number,
            "seconds": response.seconds,
            "finish_reason": response.finish_reason,
            **given(branch=turn.branch, policy_spans=[span.wire() for span in response.policy_spans]),
        },
    }


def _metrics(response: ResponseRecord) -> dict[str, Any]:
    return {
        "prompt_tokens": response.usage.prompt_tokens,
        "completion_tokens": response.usage.completion_tokens,
        "cached_tokens": response.usage.cached_tokens,
        **given(completion_token_ids=response.completion_token_ids, logprobs=response.logprobs),
    }


def tool_call(call_id: object, name: object, written: object, position: int) -> dict[str, Any]:
    """Return a tool call. `written` are its arguments as the model wrote them."""
    arguments = decoded_object(written) if isinstance(written, str) else written
    fits = isinstance(arguments, dict)
    return {
        "tool_call_id": str(call_id or f"call-{position}"),
        "function_name": str(name or ""),
        "arguments": arguments if fits else {},
        # ATIF requires a JSON object; if the arguments are not one, `extra` has the model's text.
        **({} if fits else given(extra=given(written=written))),
    }


def _result(result: Observation, ids: set[str]) -> dict[str, Any]:
    known = result.call_id in ids
    return {
        **({"source_call_id": result.call_id} if known else {}),
        "content": result.content,
        "extra": {
            "tool": result.tool,
            "seconds": result.seconds,
            **given(error=result.error, data=result.data, call_id=None if known else result.call_id),
        },
    }


def text_of(content: Any) -> str:
    """Return the text of a message's content, a string or OpenAI's parts; parts other than text are named in brackets."""
    if isinstance(content, list):
        parts = (part if isinstance(part, dict) else {"text": str(part)} for part in content)
        return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
    return "" if content is None else str(content)


def reasoning_of(message: Message) -> str:
    """Return the reasoning before an answer, under either of servers' names for it."""
    return text_of(message.get("reasoning_content") or message.get("reasoning"))


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not empty."""
    return {name: value for name, value in fields.items() if value not in (None, "", 0, False, [], {})}


def _canonical(message: Message) -> str:
    return json.dumps(message, sort_keys=True)


def timestamp(seconds: float) -> str:
    """Format Unix seconds as an ATIF time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
