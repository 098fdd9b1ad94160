"""Plugins and conversions as a person uses them: by the command line, by the Python client, and in the report."""

import asyncio
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_api.records import Result
from rolloutctl.client import Client
from tests.support.preloaded import run_rolloutctl
from tests.support.vllm_server import Answer, ToolCall, VllmStandIn

STARTER = Path(__file__).parents[3] / "rolloutctl" / "starter.yaml"

MODULE = """
class Wishes:
    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def evaluate_rollout(self, finished):
        return {"share": self.share}

class Fails:
    def after_tool_call(self):
        raise OSError("<b>disk</b>")

class Filters:
    def filter_tool_call(self, call):
        return None
"""

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs commands in a folder that has a module of plugins."""
    (tmp_path / "wishing_kit.py").write_text(MODULE)

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return run_rolloutctl(*arguments, folder=tmp_path, environ=environ)

    return run


def starter(folder: Path, plugins: Sequence[Mapping[str, Any]], **agent: Any) -> Path:
    job = yaml.safe_load(STARTER.read_text())
    job["spec"] |= {"plugins": list(plugins), "agent": job["spec"]["agent"] | agent}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_the_list_of_plugins_has_the_built_ins_and_one_is_described_with_its_options(shell: Shell) -> None:
    listed = json.loads(shell("plugins", "-o", "json").stdout)
    assert {plugin["name"]: plugin["kinds"] for plugin in listed} == {
        "PerformanceStop": ["RolloutManager"],
        "RealWork": [
            *("RolloutManager", "EnvironmentModifier", "ActionFilter", "EpisodeEvaluator", "TrajectoryAnalyzer")
        ],
        "SafetyFilter": ["ActionFilter"],
        "TrajectoryAnalysis": ["TrajectoryAnalyzer"],
    }
    own = shell("plugins", "wishing_kit:Wishes")
    assert "EpisodeEvaluator" in own.stdout
    assert "share" in own.stdout
    unknown = shell("plugins", "SafetyFliter")
    assert unknown.returncode == 2
    assert "did you mean 'SafetyFilter'?" in unknown.stderr


def test_wrong_plugin_is_reported_by_validate_and_run_before_any_write(shell: Shell, tmp_path: Path) -> None:
    starter(tmp_path, [{"name": "wishing_kit:Wishes", "config": {"shar": 1}}])
    for command in ("validate", "run"):
        told = shell(command, "job.yaml")
        assert told.returncode == 2
        assert "config.shar: is not a known field; did you mean share?" in told.stderr
    assert not (tmp_path / "out").exists()


def test_validate_reports_what_a_command_agent_hides_from_a_plugin(shell: Shell, tmp_path: Path) -> None:
    starter(tmp_path, [{"name": "wishing_kit:Filters"}], type="Command", command=["true"], tools=[])
    told = shell("validate", "job.yaml")
    assert told.returncode == 0
    assert "plugin wishing_kit:Filters: filter_tool_call will not be called" in told.stderr


async def test_scores_analyses_and_failures_are_shown_in_the_terminal_and_in_the_report(
    shell: Shell, tmp_path: Path, browser: Callable[[Path], AbstractAsyncContextManager[Any]]
) -> None:
    names = ["wishing_kit:Wishes", "TrajectoryAnalysis", "wishing_kit:Fails"]
    starter(tmp_path, [{"name": name} for name in names])
    run = shell("run", "job.yaml")
    assert run.returncode == 0, run.stderr
    assert "Plugin wishing_kit:Fails failed" in run.stderr
    assert "Plugin wishing_kit:Fails failed" in run.stdout, "and it is counted at the end"
    shown = shell("show", "starter", "0").stdout
    for words in ("plugin wishing_kit:Wishes", "share: 0.5", "byTool:", "after_tool_call: OSError"):
        assert words in shown
    assert shell("report", "starter", "-o", "report.html").returncode == 0
    async with browser(tmp_path / "report.html") as page:
        await page.run("location.hash = '#/run/starter/rollout/0?tab=verdict'")
        await page.until("document.querySelector('main').textContent.includes('plugin TrajectoryAnalysis')")
        text = await page.run("document.querySelector('main').textContent")
        for words in ("plugin wishing_kit:Wishes", "share", '"byTool"', "OSError: <b>disk</b>"):
            assert words in text
        assert page.problems == []


async def test_a_plugin_of_three_lines_works_in_process(tmp_path: Path) -> None:
    seen: list[Result] = []

    class Collects:
        def after_rollout(self, result: Result) -> None:
            seen.append(result)

    path = starter(tmp_path, [])
    groups = [group async for group in Client(plugins=[Collects()]).run(path)]
    assert sorted(result.index for result in seen) == list(range(6))
    assert all(result.plugins["Collects"].calls == 1 for group in groups for result in group.results)


async def test_a_converted_real_work_configuration_runs(shell: Shell, tmp_path: Path) -> None:
    """On this machine, with all four of its tools, a copied folder, its environment and its init commands."""
    theirs = tmp_path / "calculator"
    (theirs / "tests").mkdir(parents=True)
    (theirs / "tests" / "test_app.py").write_text("from app import add\n\nassert add(2, 3) == 5\n")
    steps = [
        Answer("I read the test.", [ToolCall("read_file", {"filepath": "tests/test_app.py"})]),
        Answer("", [ToolCall("write_file", {"filepath": "app.py", "content": "def add(a, b):\n    return a + b\n"})]),
        Answer("", [ToolCall("execute_command", {"command": "echo $GREETING; cat made"})]),
        Answer("", [ToolCall("execute_command", {"command": "rm -rf /"})]),
        Answer("", [ToolCall("mark_done", {"message": "add adds."})]),
    ]
    async with VllmStandIn(script={"*": steps}) as server:
        environment = {
            "id": "calculator",
            "docker_image": "agent-rollouts-quickstart:latest",
            "init_commands": ["echo prepared > made"],
            "unit_tests": ["PYTHONPATH=. python3 tests/test_app.py", "test -f readme.md"],
            "prompt": "Write app.py.",
            "environment_variables": {"GREETING": "hello"},
            "copy_folders": ["tests"],
            "max_retries": 3,
        }
        config = {
            "environments": [environment],
            "llm_config": {"model": "policy", "api_key": "sk", "base_url": f"{server.url}/v1"},
            "rollout_config": {"max_parallel_rollouts": 2, "trajectory_output_path": "out"},
            "template_prompt": "You are an engineer.",
            "episode_control_config": {"max_episodes": 2},
        }
        (theirs / "config.json").write_text(json.dumps(config))
        made = await asyncio.to_thread(shell, "convert", "calculator/config.json", "-o", "job.yaml")
        assert made.returncode == 0, made.stderr
        assert "environments[0].max_retries: has no counterpart" in made.stderr
        assert "sandbox.network.setup is Public" in made.stderr
        run = await asyncio.to_thread(shell, "run", "job.yaml", OPENAI_API_KEY="sk")
        assert run.returncode == 0, run.stderr
    (found,) = tmp_path.glob("out/*/results.jsonl")
    results = [json.loads(line) for line in found.read_text().splitlines()]
    ends = [(result["outcome"], result["reward"], result["stopReason"]) for result in results]
    assert ends == [("Completed", 0.5, "Finished")] * 2
    assert results[0]["plugins"]["SafetyFilter"]["refused"] == 1
    shown = (await asyncio.to_thread(shell, "show", "out", "0", "--full")).stdout
    for words in ("hello\n    prepared", "assert add(2, 3) == 5", "Refused by SafetyFilter", "add adds."):
        assert words in shown
