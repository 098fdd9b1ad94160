"""Runs with verifiers 0.4: loads a folder with `traces.jsonl` as verifiers does, and prints what it found."""

import json
import sys
from pathlib import Path

from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.state import State
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import Trace
from verifiers.v1.utils.trace_store import read_episodes


def told(episode):
    [trace] = episode.traces
    assert (episode.ok, episode.task.data.name) == (trace.ok, trace.task.data.name)
    return {
        "ok": trace.ok,
        "group": episode.group.id,
        "run": episode.run and episode.run.type,
        "rewards": [reward and reward.value for reward in trace.rewards.values()],
        "metrics": trace.metrics,
        "branches": [[message.role for message in branch.messages] for branch in trace.branches],
        "sampled": [number for number, node in enumerate(trace.nodes) if node.sampled],
        "tool_calls": [[call.name, call.arguments] for m in trace.assistant_messages for call in m.tool_calls or []],
        "tools": [tool.name for tool in trace.tools],
        "last_reply": trace.last_reply,
        "turns": trace.num_turns,
        "truncated": trace.is_truncated,
        "stop": trace.stop_condition,
        "errors": [error.model_dump(exclude_none=True) for error in trace.errors],
        "seconds": trace.timing.agent.duration,
        "scoring": trace.timing.scoring.duration,
    }


episodes = read_episodes(Path(sys.argv[1]), Trace[WireTaskData, State, WireAgentConfig])
print(json.dumps([told(episode) for episode in episodes]))
