"""Records of a run: results, messages, and token sequences for training."""

from agent_runtime.recording.branches import Branch
from agent_runtime.recording.expert_arrays import ExpertArray
from agent_runtime.recording.store import Store
from agent_runtime.statistics import advantages
from rollout_api.records import Message, Observation, Outcome, Result, StopReason, Verdict

__all__ = [
    "Branch",
    "ExpertArray",
    "Message",
    "Observation",
    "Outcome",
    "Result",
    "StopReason",
    "Store",
    "Verdict",
    "advantages",
]
