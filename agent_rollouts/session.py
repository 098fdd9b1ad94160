"""Jobs with a stream of tasks: a trainer submits tasks while it runs, and receives finished groups."""

from agent_runtime.engine.session import FinishedGroup, RolloutSession
from rolloutctl.job_stream import JobStream
from rolloutctl.policy import ServedPolicy
from rolloutctl.weight_push import WeightPush, WeightPushHook

__all__ = ["FinishedGroup", "JobStream", "RolloutSession", "ServedPolicy", "WeightPush", "WeightPushHook"]
