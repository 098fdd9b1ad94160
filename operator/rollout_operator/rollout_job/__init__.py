"""Controller of RolloutJobs: an Indexed Job of runner pods, the objects that they need, and the sum of their reports."""

from rollout_operator.rollout_job.observe import observe
from rollout_operator.rollout_job.plan import needs_spec, plan
from rollout_operator.world import Controller

CONTROLLER = Controller("RolloutJob", observe, plan, needs_spec)

__all__ = ["CONTROLLER", "observe", "plan"]
