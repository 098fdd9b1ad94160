"""A run as the `traces.jsonl` of verifiers 0.4: one line for each rollout, an `Episode` with one `Trace`.

The messages form a graph, in which each message is linked to the previous one. A rewritten history is a second path.
The format is that of verifiers.v1's `episode.py`, `trace.py` and `graph.py` (trace version 1).
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.recording.atif import reasoning_of, text_of
from agent_runtime.recording.branches import copied_turn
from agent_runtime.recording.messages import Turn, fold, last_made, last_of_each_branch
from agent_runtime.recording.reader import RunReader
from rollout_api.records import Message, Outcome, ResponseRecord, Result, StopReason
from rollout_api.rollout_job import Mode

TRACE_VERSION = 1
VERIFIERS_VERSION = "0.4.0"
FINISH_REASONS = ("stop", "length", "tool_calls")
STOP_CONDITIONS = {
    StopReason.FINISHED: "agent_completed",
    StopReason.MAX_TURNS: "max_turns",
    StopReason.TOKEN_BUDGET: "max_total_tokens",
    StopReason.AGENT_TIMEOUT: "agent_timeout",
}
"""verifiers' names for stop reasons, from which it derives what was truncated. Other reasons keep our names."""


async def episode(run: RunReader, index: int) -> list[dict[str, Any]]:
    """Return the line of a rollout. Raises RecordCorrupt.

    Ungraded rollouts have reward null, as if scoring did not run. Further numbers of the verifier are metrics, because
    verifiers adds up all rewards. Tokens are not included.
    """
    result = run.seals[index].result
    records = await run.records(index)
    turns, copied = fold(records), copied_turn(records)
    task = {"type": "Task", "data": {"idx": result.group, "name": result.task}, "key": result.task}
    ok, errors = result.outcome is Outcome.COMPLETED, _errors(result)
    stopped = STOP_CONDITIONS.get(result.stop_reason, result.stop_reason.value) if result.stop_reason else "error"
    graph, last = _Graph.of(turns, copied), last_made(turns)
    name, uid = run.job.metadata.name, run.job_file.uid
    trace = {
        "version": TRACE_VERSION,
        "id": _id(uid, index, "trace"),
        "verifiers": {"version": VERIFIERS_VERSION},
        "task": task,
        "agent": {"config": {}, "name": run.job.spec.agent.type, "trainable": result.mode == Mode.TRAIN},
        "tools": [_tool(tool) for tool in last.tools] if last else [],
        "nodes": graph.nodes,
        "calls": graph.calls,
        "rewards": {"reward": None if result.reward is None else {"score": result.reward}},
        "metrics": {**result.rewards, "num_tool_calls": float(result.tool_calls)},
        "info": {"rollout": result.wire()},
        "is_completed": True,
        "ok": ok,
        "stop_condition": stopped,
        "is_timeout": result.stop_reason is StopReason.AGENT_TIMEOUT,
        "errors": errors,
        "timing": _timing(result, [turn for turn in turns if turn.number > copied]),
    }
    line = {
        "id": _id(uid, index, "episode"),
        "env": {"id": name},
        "task": task,
        "group": {"id": f"{uid}/{result.group}"},
        "ok": ok,
        "errors": errors,
        "traces": [trace],
    }
    # verifiers stores the trainer's step here, which is unknown.
    return [line | ({"run": {"type": "eval", "id": uid, "name": name}} if result.mode == Mode.EVAL else {})]


@dataclass
class _Graph:
    """Messages as nodes, and model calls, both in order of creation."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    _known: dict[tuple[int | None, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, turns: Sequence[Turn], copied: int) -> "_Graph":
        """Return the graph of these turns. Answers up to the turn `copied` were sampled in another rollout."""
        graph = cls()
        for turn in turns:
            parent = graph._path(turn.messages, turn)
            if turn.response is not None:
                node = graph._node(parent, turn.response.message, turn)
                if turn.number <= copied:
                    continue
                graph.nodes[node]["sampled"] = True
                graph.calls.append(_call(node, turn.response))
        for turn in last_of_each_branch(turns):
            graph._path(turn.conversation(), turn)
        return graph

    def _path(self, messages: Sequence[Message], turn: Turn) -> int | None:
        parent: int | None = None
        for message in messages:
            parent = self._node(parent, message, turn)
        return parent

    def _node(self, parent: int | None, message: Message, turn: Turn) -> int:
        node: dict[str, Any] = {"message": _message(message)}
        if parent is None:
            node["tools"] = [_tool(tool) for tool in turn.tools]
        key = (parent, json.dumps(node, sort_keys=True))
        if key not in self._known:
            self._known[key] = len(self.nodes)
            time = turn.time if turn.response is None else turn.response.time
            self.nodes.append({"parent": parent, **node, "sampled": False, "timestamp": time})
        return self._known[key]


def _message(message: Message) -> dict[str, Any]:
    role, text = message["role"], text_of(message.get("content"))
    if role == "tool":
        return {"role": role, "tool_call_id": message.get("tool_call_id") or "", "content": text}
    if role != "assistant":
        # `developer` is OpenAI's newer name for `system`; verifiers does not support it.
        return {"role": "system" if role == "developer" else role, "content": text}
    calls = [
        {"id": call.get("id", ""), **{name: call.get("function", {}).get(name, "") for name in ("name", "arguments")}}
        for call in message.get("tool_calls") or []
    ]
    return {
        "role": role,
        "content": text,
        "reasoning_content": reasoning_of(message) or None,
        "tool_calls": calls or None,
    }


def _tool(definition: dict[str, Any]) -> dict[str, Any]:
    function = definition.get("function", definition)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", **{name: function[name] for name in names if name in function}}


def _call(node: int, response: ResponseRecord) -> dict[str, Any]:
    usage = response.usage
    return {
        "node": node,
        "model": response.model or None,
        "finish_reason": response.finish_reason if response.finish_reason in FINISH_REASONS else None,
        "usage": {
            "prompt_tokens": usage.prompt_tokens - usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_input_tokens": usage.cached_tokens,
        },
        "time": _span(response.time - response.seconds, response.time),
    }


def _errors(result: Result) -> list[dict[str, str]]:
    """Return the errors of all attempts, the oldest first."""
    errors = [{"type": attempt.reason, "message": attempt.message} for attempt in result.failed_attempts]
    if result.outcome is not Outcome.COMPLETED:
        errors.append({"type": result.reason or result.outcome.value, "message": result.message})
    return errors


def _timing(result: Result, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return spans in Unix seconds; 0 for phases that were not reached."""
    started, ended = result.started or 0.0, result.ended or 0.0
    calls = [turn.response for turn in turns if turn.response is not None]
    setup_end = turns[0].time if turns else started
    agent = _span(setup_end, max(call.time for call in calls)) if calls else _span(0.0, 0.0)
    model = min(sum(call.seconds for call in calls), agent["end"] - agent["start"])
    graded = result.seconds.get("verifier", 0.0) if result.reward is not None else 0.0
    return {
        "start": started,
        "setup": _span(started, setup_end),
        "agent": {
            **agent,
            "model": {"duration": model},
            "harness": {"duration": agent["end"] - agent["start"] - model},
        },
        "scoring": _span(ended - graded, ended) if graded else _span(0.0, 0.0),
    }


def _span(start: float, end: float) -> dict[str, float]:
    return {"start": start, "end": end}


def _id(uid: str, index: int, what: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{uid}/{index}/{what}").hex
