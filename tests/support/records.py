"""Records of a rollout, written by hand. `fields` are further fields of the record, or replace those given here."""

from typing import Any

from rollout_api.records import (
    IntentRecord,
    Message,
    Observation,
    ObservationsRecord,
    Outcome,
    ResponseRecord,
    Result,
    StopReason,
)
from rollout_api.rollout_job import RolloutJob


def small_job(**metadata: str) -> RolloutJob:
    """Return a job of one task without a model. `metadata` is added to its name, fix."""
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "fix", **metadata},
            "spec": {
                "tasks": {"inline": [{"name": "a", "prompt": "x"}]},
                "agent": {"type": "Nop"},
                "output": {"uri": "out"},
            },
        }
    )


def call(call_id: str, arguments: str) -> dict[str, Any]:
    """Return a call of bash, as in a message of the model."""
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def told(call_id: str, content: str) -> Message:
    """Return the message with a call's result for the model."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def asked(turn: int, keep: int, *messages: Message, **fields: Any) -> IntentRecord:
    """Return the record of a model call: `keep` earlier messages, and these."""
    given: dict[str, Any] = {"turn": turn, "time": 0, "keep": keep, "messages": list(messages)}
    return IntentRecord(**given | fields)


def answered(turn: int, message: Message, **fields: Any) -> ResponseRecord:
    """Return the record of the model's answer."""
    given: dict[str, Any] = {"turn": turn, "time": 0, "seconds": 1, "message": message, "finish_reason": "stop"}
    return ResponseRecord(**given | fields)


def said(turn: int, text: str | None, *calls: dict[str, Any], **fields: Any) -> ResponseRecord:
    """Return the record of an answer with this text and these calls."""
    return answered(turn, {"role": "assistant", "content": text, "tool_calls": list(calls)}, **fields)


def gave(turn: int, *results: tuple[str, str], **fields: Any) -> ObservationsRecord:
    """Return the record of bash's results, by the ids of the calls."""
    observations = [Observation(call_id=call_id, tool="bash", content=content) for call_id, content in results]
    given: dict[str, Any] = {"turn": turn, "time": 0, "results": observations}
    return ObservationsRecord(**given | fields)


def completed(index: int = 0, **fields: Any) -> Result:
    """Return the result of a rollout that finished in its first attempt, not graded."""
    given: dict[str, Any] = {
        "group": index,
        "member": 0,
        "task": "task",
        "mode": "Train",
        "seed": 0,
        "outcome": Outcome.COMPLETED,
        "stop_reason": StopReason.FINISHED,
        "attempt": 0,
    }
    return Result(index=index, **given | fields)
