"""Calls of a model, made by hand."""

from typing import Any

from agent_runtime.models.base import ModelRequest
from rollout_api.model import Sampling


def model_request(content: str = "Hi", **changes: Any) -> ModelRequest:
    """One message of the user's, without tools; `changes` are fields of the call in place of those here."""
    plain: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "tools": [],
        "sampling": Sampling(),
        "seed": 5,
        "session": "s",
        "task": "t",
        "member": 0,
        "turn": 0,
    }
    return ModelRequest(**plain | changes)
