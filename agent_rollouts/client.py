"""Run jobs in your own process, with the engine of `rolloutctl run`."""

from agent_runtime.engine.events import Event, GroupFinished
from rolloutctl.client import Client, RunAborted
from rolloutctl.trajectories import StepType, Trajectory, TrajectoryStep

__all__ = ["Client", "Event", "GroupFinished", "RunAborted", "StepType", "Trajectory", "TrajectoryStep"]
