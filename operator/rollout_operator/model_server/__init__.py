"""ModelServer: vLLM behind a gateway in each of its pods, and policy updates as one transaction."""

from rollout_operator.model_server.observe import observe
from rollout_operator.model_server.plan import needs_spec, plan
from rollout_operator.world import Controller

CONTROLLER = Controller("ModelServer", observe, plan, needs_spec)

__all__ = ["CONTROLLER", "observe", "plan"]
