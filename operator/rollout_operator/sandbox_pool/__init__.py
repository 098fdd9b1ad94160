"""Controller of SandboxPools: sandboxes that are ready before jobs need them. docs/sandbox-pools.md describes them."""

from rollout_operator.sandbox_pool.observe import observe
from rollout_operator.sandbox_pool.plan import plan
from rollout_operator.world import Controller

CONTROLLER = Controller("SandboxPool", observe, plan)

__all__ = ["CONTROLLER", "observe", "plan"]
