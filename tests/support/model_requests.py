"""Model requests for tests."""

from typing import Any

from agent_runtime.models.base import ModelRequest
from rollout_api.model import Sampling


def model_request(content: str = "Hi", **changes: Any) -> ModelRequest:
    """Return a request with one user message and no tools. `changes` replace its fields."""
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
