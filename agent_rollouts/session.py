"""Jobs that stay open: a trainer submits tasks as it goes and takes finished groups as they come."""

from agent_runtime.engine.session import FinishedGroup, RolloutSession
from rolloutctl.job_stream import JobStream
from rolloutctl.policy import ServedPolicy

__all__ = ["FinishedGroup", "JobStream", "RolloutSession", "ServedPolicy"]
