"""Controller of Sandboxes. Each Sandbox has one pod, until it has ended. docs/sandboxes.md describes what users see."""

from rollout_operator.sandbox.observe import Observed, observe
from rollout_operator.sandbox.plan import plan
from rollout_operator.world import Controller

CONTROLLER = Controller("Sandbox", observe, plan)

__all__ = ["CONTROLLER", "Observed", "observe", "plan"]
