"""Controller of ModelServers: pods with vLLM behind a gateway, and policy updates in steps that survive restarts."""

from rollout_operator.model_server.observe import observe
from rollout_operator.model_server.plan import needs_spec, plan
from rollout_operator.world import Controller

CONTROLLER = Controller("ModelServer", observe, plan, needs_spec)

__all__ = ["CONTROLLER", "observe", "plan"]
