"""Records of a rollout, made by hand in few words: what the model was asked, what it said, what its tools gave.

`fields` are further ones of the record, or others in place of those given here.
"""

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
    """A job of one task, which asks no model. `metadata` is in addition to its name, fix."""
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
    """A call of bash, as a message of the model has it."""
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def told(call_id: str, content: str) -> Message:
    """The message by which the model is told a call's result."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def asked(turn: int, keep: int, *messages: Message, **fields: Any) -> IntentRecord:
    """The model is asked: `keep` messages from before, and these."""
    given: dict[str, Any] = {"turn": turn, "time": 0, "keep": keep, "messages": list(messages)}
    return IntentRecord(**given | fields)


def answered(turn: int, message: Message, **fields: Any) -> ResponseRecord:
    """The model's answer is this message."""
    given: dict[str, Any] = {"turn": turn, "time": 0, "seconds": 1, "message": message, "finish_reason": "stop"}
    return ResponseRecord(**given | fields)


def said(turn: int, text: str | None, *calls: dict[str, Any], **fields: Any) -> ResponseRecord:
    """The model says that, and makes these calls."""
    return answered(turn, {"role": "assistant", "content": text, "tool_calls": list(calls)}, **fields)


def gave(turn: int, *results: tuple[str, str], **fields: Any) -> ObservationsRecord:
    """What bash gave for calls, by their ids."""
    observations = [Observation(call_id=call_id, tool="bash", content=content) for call_id, content in results]
    given: dict[str, Any] = {"turn": turn, "time": 0, "results": observations}
    return ObservationsRecord(**given | fields)


def completed(index: int = 0, **fields: Any) -> Result:
    """The result of a rollout that finished: its first attempt, not graded."""
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
