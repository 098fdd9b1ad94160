"""verl: set `agent_loop_manager_class=agent_rollouts.verl.RolloutManager`. Importable where verl is installed."""

from agent_runtime.integrations.verl.gpt_oss import build_gpt_oss_tool_response_text
from agent_runtime.integrations.verl.manager import RolloutManager
from agent_runtime.integrations.verl.tools import register_tools

__all__ = ["RolloutManager", "build_gpt_oss_tool_response_text", "register_tools"]
