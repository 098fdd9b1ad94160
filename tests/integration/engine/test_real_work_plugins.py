"""Plugins written for Real Work are called as there, and a run can be exported as Real Work's trajectories."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.engine.run import run_job
from agent_runtime.export.real_work import write_real_work
from agent_runtime.extensions import ExtensionError
from agent_runtime.integrations.real_work import RealWork
from agent_runtime.models.providers.function import FunctionModel
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.rollout_job import RolloutJob
from tests.support.real_work import PLUGINS


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "their_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return ["their_plugins"]


async def run_with(folder: Path, modules: list[str], **changes: Any) -> tuple[RunReader, list[str]]:
    """Run two members whose model tries a dangerous command, then another one, then ends. Returns the run and the
    messages to the model.
    """
    told: list[str] = []

    async def answer(messages: list[dict[str, Any]], turn: int, member: int) -> dict[str, Any]:
        told.append(str(messages[-1]["content"]))
        commands = ["rm -rf /", "echo pip > out.txt"]
        name, arguments = (
            ("mark_done", {"message": "done"}) if turn > 1 else ("execute_command", {"command": commands[turn]})
        )
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}],
        }

    config = {"file": str(folder / "told.txt")}
    verifier = {"commands": ["grep -qx pip3 out.txt", "false"], "reward": "Fraction"}
    job = RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "theirs"},
            "spec": {
                "mode": "Eval",
                "groupSize": 2,
                "tasks": {"inline": [{"name": "t", "prompt": "Work.", "verifier": verifier}]},
                "model": {"function": "tests:none"},
                "agent": {"type": "ToolCalling", "tools": ["commands-and-files"]},
                "plugins": [{"name": "RealWork", "config": {"modules": modules, "config": config}}],
                "runners": {"concurrency": 1},
                "output": {"uri": "out"},
                **changes,
            },
        }
    )
    await run_job(job, base_dir=folder, environ={}, model=FunctionModel(answer, "test"))
    return await open_run(Store.open(str(folder / "out"), {}), "theirs"), told


async def test_each_kind_of_plugin_is_called_and_decides(tmp_path: Path, modules: list[str]) -> None:
    run, told = await run_with(tmp_path, modules)
    first, second = run.results()
    assert told[0] == "Work. Be quick."
    assert "a Real Work plugin removed the action" in told[1]
    assert first.reward == 0.5, "the changed command ran"
    report = first.plugins["RealWork"]
    assert (report.scores, report.failed) == ({"judge.tests": 2.0}, 0)
    assert report.analysis["analyst"] == {"kinds": ["command", "command", "done"], "suggestions": ["fewer commands"]}
    assert (second.outcome, second.reason) == ("Cancelled", "StoppedByPlugin")
    hooks = (tmp_path / "told.txt").read_text().split()
    assert set(hooks[1::2]) == {"t"}
    one = ["pre_rollout", "pre_episode", "pre_action", "pre_action", "post_action", "pre_action", "post_action"]
    assert hooks[0::2][:12] == [*one, "pre_test", "post_test", "pre_test", "post_test", "post_episode"]


async def test_a_run_is_exported_as_their_trajectories_and_statistics(tmp_path: Path, modules: list[str]) -> None:
    run, _ = await run_with(tmp_path, modules)
    folder = tmp_path / "exported"
    assert await write_real_work(run, folder) == 2
    trajectories = [json.loads(path.read_text()) for path in folder.glob("*.json") if path.name != "results.stats.json"]
    (done,) = [one for one in trajectories if one["steps"]]
    assert [step["action"]["content"] for step in done["steps"]] == ["rm -rf /", "echo pip > out.txt", "done"]
    assert [test["success"] for test in done["test_results"]] == [True, False]
    scores = [one["episode_result"].get("final_score") for one in trajectories]
    assert sorted(scores, key=str) == [0.5, None], "a masked rollout has no score, and not 0"
    statistics = json.loads((folder / "results.stats.json").read_text())
    assert (statistics["total_episodes"], statistics["not_completed"], statistics["avg_score"]) == (1, 1, 0.5)
    assert (statistics["test_pass_rate"], statistics["avg_actions"], statistics["action_efficiency"]) == (0.5, 3, 0)
    assert statistics["plugins"]["RealWork"]["refused"] == 1


def test_module_without_their_classes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_plugins.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ExtensionError, match="'no_plugins' has no class with `supported_hooks`"):
        RealWork(["no_plugins"])
    with pytest.raises(ExtensionError, match=r"'nowhere_at_all' cannot be imported: .*PYTHONPATH"):
        RealWork(["nowhere_at_all"])
