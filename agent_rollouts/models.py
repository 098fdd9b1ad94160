"""Write a model, or use an async function as one."""

from agent_runtime.models.base import Model, ModelReply, ModelRequest, ToolCall
from agent_runtime.models.providers.function import FunctionModel
from rollout_api.model import ModelSpec

__all__ = ["FunctionModel", "Model", "ModelReply", "ModelRequest", "ModelSpec", "ToolCall"]
