"""A run in Real Work's format (ritser-labs/real-work, `src/core/trajectory.py`): a file for each trajectory, and
statistics.
"""

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent_runtime.models.answers import decoded_object
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.recording.branches import copied_turn
from agent_runtime.recording.messages import fold
from agent_runtime.recording.reader import RunReader
from agent_runtime.statistics import mean
from rollout_api.records import CommandVerdict, Observation, Outcome, Record, Result, Verdict

STATISTICS_FILE = "results.stats.json"
"""Name of the file to which Real Work's `--output results.json` writes its statistics."""


async def write_real_work(run: RunReader, folder: Path) -> int:
    """Write every sealed rollout and the statistics into a new folder; return the number of trajectories.

    Raises RecordCorrupt, OSError, FileExistsError.
    """
    folder.mkdir(parents=True)
    episodes: list[dict[str, Any]] = []
    for index, seal in run.seals.items():
        trajectory = trajectory_of(run.folder, await run.records(index), seal.result, seal.verdict)
        path = folder / f"{trajectory['trajectory_id']}.json"
        path.write_text(json.dumps(trajectory, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", errors="replace")
        episodes.append({"completed": seal.result.outcome is Outcome.COMPLETED, **trajectory["episode_result"]})
    statistics = statistics_of(episodes) | {"plugins": _plugins(run.stats())}
    (folder / STATISTICS_FILE).write_text(json.dumps(statistics, indent=2) + "\n", encoding="utf-8")
    return len(episodes)


def trajectory_of(run: str, records: Sequence[Record], result: Result, verdict: Verdict | None) -> dict[str, Any]:
    """Return a trajectory in the format of their `Trajectory.to_dict`; ids derive from the run and the rollout's index."""
    name = f"{run}/{result.index}"
    started, ended = _time(result.started), _time(result.ended)
    copied, steps, own = copied_turn(records), list[dict[str, Any]](), 0
    for turn in fold(records):
        calls = {call.id: call for call in (ModelReply(turn.response.message, "").tool_calls if turn.response else ())}
        for number, observation in enumerate(turn.observations):
            own += turn.number > copied
            call = calls.get(observation.call_id) or ToolCall(observation.call_id, observation.tool, "")
            steps.append(
                {
                    "step_id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{name}/{turn.number}/{number}")),
                    "timestamp": _time(turn.time),
                    "action": action_of(call),
                    "result": action_result_of(observation, _time(turn.time)),
                    "state_snapshot": None,
                }
            )
    tests = [test_result_of(command, ended) for command in (verdict.commands if verdict else ())]
    return {
        "trajectory_id": str(uuid.uuid5(uuid.NAMESPACE_URL, name)),
        "environment_id": result.task,
        "start_time": started,
        "end_time": ended,
        "steps": steps,
        "test_results": tests,
        "episode_result": episode_result_of(result, tests, own),
        "metadata": {"episode_id": name, "rollout": result.wire()},
    }


def action_of(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as their `Action`; a tool that Real Work lacks becomes a command with its name and arguments."""
    given = decoded_object(call.arguments) or {}
    kinds = {
        "execute_command": ("command", given.get("command")),
        "write_file": ("file_write", f"{given.get('filepath')}:{given.get('content')}"),
        "read_file": ("file_read", given.get("filepath")),
        "mark_done": ("done", given.get("message") or "Task completed"),
        "bash": ("command", given.get("command")),
    }
    kind, content = kinds.get(call.name, ("command", f"{call.name} {call.arguments}"))
    timeout = given.get("timeout")
    folder = given.get("working_directory")
    return {
        "type": kind,
        "content": content if isinstance(content, str) else call.arguments,
        # A model may also write Infinity or NaN.
        "timeout": int(timeout) if isinstance(timeout, int | float) and abs(timeout) < math.inf else None,
        "working_directory": folder if isinstance(folder, str) else None,
        "background": False,
    }


def action_result_of(observation: Observation, timestamp: str | None) -> dict[str, Any]:
    """Return a tool's result as their `ActionResult`."""
    code = observation.data.get("exitCode")
    failed = observation.error or code not in (None, 0)
    return {
        "success": not failed,
        "output": "" if observation.error else observation.content,
        "error": observation.content if failed else "",
        "exit_code": code,
        "duration": observation.seconds,
        "timestamp": timestamp,
    }


def test_result_of(command: CommandVerdict, timestamp: str | None) -> dict[str, Any]:
    """Return a verifier command as their `TestResult`; a command without an exit code has -1."""
    passed = command.exit_code == 0
    return {
        "command": command.command,
        "success": passed,
        "output": command.output,
        "error": "" if passed else command.cause or command.output,
        "exit_code": -1 if command.exit_code is None else command.exit_code,
        "duration": command.seconds,
        "timestamp": timestamp,
    }


def episode_result_of(result: Result, tests: Sequence[dict[str, Any]], actions: int) -> dict[str, Any]:
    """Return a result as their `EpisodeResult`; success is the verdict. A rollout without a reward has no score."""
    return {
        "environment_id": result.task,
        "success": bool(result.passed),
        "total_actions": actions,
        "duration": result.seconds.get("total", 0.0),
        "test_results": list(tests),
        "terminated_reason": result.stop_reason or result.reason or result.outcome,
        **({} if result.reward is None else {"final_score": result.reward}),
        "token_usage": {
            "total_input_tokens": result.usage.prompt_tokens,
            "total_output_tokens": result.usage.completion_tokens,
            "api_calls": result.turns,
        },
    }


def statistics_of(episodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return their statistics, overall and by environment, without episodes that were lost to infrastructure."""
    completed = [episode for episode in episodes if episode["completed"]]
    environments = dict.fromkeys(str(episode["environment_id"]) for episode in completed)
    return {
        **_aggregated(completed),
        "not_completed": len(episodes) - len(completed),
        "environments": {
            name: _aggregated([episode for episode in completed if episode["environment_id"] == name])
            for name in environments
        },
    }


def _aggregated(episodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`test_pass_rate`: tests passed of tests run. `action_efficiency`: passed episodes for each action taken."""
    count, passed = len(episodes), sum(episode["success"] for episode in episodes)
    tests = [test["success"] for episode in episodes for test in episode["test_results"]]
    actions = sum(episode["total_actions"] for episode in episodes)
    return {
        "total_episodes": count,
        "successful_episodes": passed,
        "failed_episodes": count - passed,
        "success_rate": mean([episode["success"] for episode in episodes]),
        "total_duration": sum(episode["duration"] for episode in episodes),
        "avg_duration": mean([episode["duration"] for episode in episodes]),
        "avg_score": mean([episode["final_score"] for episode in episodes if "final_score" in episode]),
        "test_pass_rate": mean(tests),
        "avg_actions": mean([episode["total_actions"] for episode in episodes]),
        "action_efficiency": passed / actions if actions else None,
    }


def _plugins(statistics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the effects of each plugin in the whole run."""
    fields = ("calls", "seconds", "refused", "changed", "failed")
    plugins = statistics.get("plugins", {})
    return {name: {field: own[field] for field in fields} for name, own in plugins.items()}


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
