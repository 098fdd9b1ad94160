"""Branches begin in the state that their source had, restored or run again, in both modes."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.agents.base import Agent, AgentContext, SubTask
from agent_runtime.agents.tool_calling import ToolCalling
from agent_runtime.engine.events import Event, WorkspaceAcquired
from agent_runtime.engine.run import run_job
from agent_runtime.models.base import ToolCall
from agent_runtime.recording import gc
from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.reader import NoSuchRun, RunReader, open_run
from agent_runtime.recording.store import Store
from agent_runtime.tasks import TaskSourceError
from rollout_api.files import TaskFile
from rollout_api.records import BranchRecord, Message, Observation, Outcome, SnapshotRecord
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import EnvVar, SandboxOverrides
from rollout_api.tasks import Task
from tests.integration.engine.branching import TURNS, bash, branching, counting, done, run_of, searching

ROLLOUTCTL = [str(Path(sys.executable).parent / "rolloutctl"), "run", "job.yaml", "-o", "json"]


async def observed(reader: RunReader, index: int) -> list[str]:
    """Return the output of each tool call of a rollout."""
    steps = (await reader.trajectory(index) or {})["steps"]
    return [result["content"] for step in steps for result in step.get("observation", {}).get("results", [])]


MODES = [{"mode": "Overlay"}, {"mode": "Plain"}]


@pytest.mark.parametrize("workspaces", MODES, ids=["overlay", "plain"])
async def test_branches_continue_from_the_state_and_messages_of_a_turn(
    tmp_path: Path, workspaces: dict[str, str]
) -> None:
    sandbox = {"snapshotEveryTurns": 2, "workspaces": workspaces}
    commands = ["echo 0 >> log.txt; cat when.txt", *(f"echo {turn} >> log.txt" for turn in range(1, 5))]
    source = await done(tmp_path, counting(sandbox=sandbox, commands=commands))
    when = (await observed(source, 0))[0]
    branched = await done(tmp_path, branching(run_of(source), 3, 2, sandbox={"workspaces": workspaces}))
    results = branched.results()
    assert [result.outcome for result in results] == [Outcome.COMPLETED] * 4
    assert [result.reward for result in results] == [1.0] * 4
    seeds = {result.seed for result in [*results, *source.results()]}
    assert len(seeds) == 4 + len(source.results()), "a branch with its source's seed would repeat it"
    assert [(result.turns, result.tool_calls) for result in results] == [(2, 2)] * 4
    assert {(r.group, r.branched_from.turn, r.branched_from.snapshot_turn) for r in results if r.branched_from} == {
        (0, 3, 3),
        (1, 2, 1),
    }
    for index in range(4):
        lines = "0\n1\n2\n3\nb\n" if index < 2 else "0\n1\n2\nb\n"
        shown = (await observed(branched, index))[-2]
        # The setup's own time: it was restored, and not run again.
        assert shown == lines + when
        steps = (await branched.trajectory(index) or {})["steps"]
        copied = [bool(step.get("is_copied_context")) for step in steps]
        assert copied == sorted(copied, reverse=True)
        assert copied.count(True) == 2 + (4 if index < 2 else 3)


async def test_all_calls_run_again_without_a_snapshot_and_differences_are_reported(tmp_path: Path) -> None:
    commands = ["echo 0 >> log.txt", "date +%s.%N", "echo 2 >> log.txt; cat log.txt"]
    source = await done(tmp_path, counting(commands=commands))
    branched = await done(tmp_path, branching(run_of(source), 2, count=3))
    for result in branched.results():
        origin = result.branched_from
        assert isinstance(origin, BranchRecord)
        assert origin.snapshot_turn is None
        assert len(origin.differences) == 1
        assert origin.differences[0].startswith("turn 1, bash (call-1-0): recorded '17")
    assert (await observed(branched, 0))[2] == "0\n2\n[exit code 0]"  # what the model is told is what was recorded
    assert (await observed(branched, 0))[3].startswith("0\n2\nb\n")


async def test_a_strict_branch_refuses_to_begin_where_a_call_gives_something_else(tmp_path: Path) -> None:
    source = await done(tmp_path, counting(commands=["date +%s.%N", "echo 1"]))
    strict = branching(run_of(source), 1, strict=True, attempts={"limit": 2, "backoffSeconds": 0})
    for result in (await done(tmp_path, strict)).results():
        assert result.outcome is Outcome.INFRA_FAILED
        assert result.reason == "BranchDiffers"
        assert "1 tool calls that were run again differ from the record" in result.message
        assert result.reward is None


async def test_a_branch_can_be_branched_after_its_source_was_deleted(tmp_path: Path) -> None:
    source = await done(tmp_path, counting(sandbox={"snapshotEveryTurns": 1}))
    first = await done(tmp_path, branching(run_of(source), 1, sandbox={"snapshotEveryTurns": 1}))
    shutil.rmtree(tmp_path / run_of(source))
    again = branching(run_of(first), 2, name="again", then="echo c >> log.txt; cat log.txt")
    script = again["spec"]["model"]["scripted"]["tasks"][0]
    script["task"] = "count@0.1@0.2"
    second = await done(tmp_path, again)
    assert (await observed(second, 1))[-2] == "0\n1\nb\nc\n[exit code 0]"


class Variable:
    """Plugin that gives each task a variable of the sandbox, and its own folder."""

    def modify_task(self, task: Task) -> Task:
        sandbox = SandboxOverrides(working_dir="/own", env=[EnvVar(name="WHO", value="plugin")])
        return task.model_copy(update={"sandbox": sandbox})


@pytest.mark.parametrize("sandbox", [{}, {"snapshotEveryTurns": 1}], ids=["again", "restored"])
async def test_branch_has_the_sandbox_that_a_plugin_gave_its_source(tmp_path: Path, sandbox: dict[str, Any]) -> None:
    show = "echo $WHO $PWD >> log.txt; cat log.txt"
    source = await done(tmp_path, counting(commands=[show] * 2, sandbox=sandbox), Variable())
    branched = await done(tmp_path, branching(run_of(source), 1, count=1, strict=True, then=show))
    assert (await observed(branched, 0))[-2] == "plugin /own\n" * 3 + "[exit code 0]"


def run_until_first_workspace(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Start a run that dies when its first workspace exists and nothing of the attempt is recorded yet."""

    def die(event: Event) -> None:
        if isinstance(event, WorkspaceAcquired):
            raise SystemExit

    job = RolloutJob.model_validate(manifest)
    with pytest.raises(SystemExit):
        asyncio.run(run_job(job, base_dir=folder, environ=os.environ, observer=die))


@pytest.mark.parametrize("output", ["./out", "./elsewhere"])
def test_branching_run_resumes_when_its_source_is_deleted(tmp_path: Path, output: str) -> None:
    source = asyncio.run(done(tmp_path, counting(sandbox={"snapshotEveryTurns": 2})))
    manifest = branching(run_of(source), 3)
    manifest["spec"]["output"]["uri"] = output
    run_until_first_workspace(tmp_path, manifest)
    for layer in (tmp_path / "out" / "layers").iterdir():
        os.utime(layer, (0, 0))
    asyncio.run(gc.collect(Store.open(str(tmp_path / "out"), {}), keep_newest=0, dry_run=False))
    assert not (tmp_path / run_of(source)).exists()
    summary = asyncio.run(run_job(RolloutJob.model_validate(manifest), base_dir=tmp_path, environ=os.environ))
    assert summary.completed
    assert summary.mean_reward == 1.0


async def test_branch_runs_all_calls_again_when_gc_deletes_its_source_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await done(tmp_path, counting(sandbox={"snapshotEveryTurns": 2}))
    for layer in (tmp_path / "out" / "layers").iterdir():
        os.utime(layer, (0, 0))
    begin = JobRecord.begin

    async def begin_after_gc(record: JobRecord) -> None:
        await gc.collect(record.output, keep_newest=0, dry_run=False)
        await begin(record)

    monkeypatch.setattr(JobRecord, "begin", begin_after_gc)
    branched = await done(tmp_path, branching(run_of(source), 3))
    assert not (tmp_path / run_of(source)).exists()
    assert [result.reward for result in branched.results()] == [1.0, 1.0]


@pytest.mark.parametrize("workspaces", MODES, ids=["overlay", "plain"])
def test_differences_of_a_branch_are_recorded_when_its_first_runner_dies(
    tmp_path: Path, workspaces: dict[str, str]
) -> None:
    sandbox = {"workspaces": workspaces}
    source = asyncio.run(done(tmp_path, counting(commands=["date +%s.%N", "echo 1"], sandbox=sandbox)))
    manifest = branching(run_of(source), 1, count=1, sandbox=sandbox)
    run_until_first_workspace(tmp_path, manifest)
    for result in asyncio.run(done(tmp_path, manifest)).results():
        assert result.branched_from is not None
        assert len(result.branched_from.differences) == 1


async def test_snapshot_paths_of_a_plain_source_are_present_in_a_branch(tmp_path: Path) -> None:
    plain = {"workspaces": {"mode": "Plain"}}
    sandbox = {"snapshotEveryTurns": 1, "snapshotPaths": ["/data"], **plain}
    command = "mkdir -p ../data/sub && echo kept > ../data/sub/file; ln -s file ../data/sub/link"
    source = await done(tmp_path, counting(sandbox=sandbox, commands=[command]))
    branched = await done(
        tmp_path, branching(run_of(source), 0, then="cat ../data/sub/link; echo b > log.txt", sandbox=plain)
    )
    assert (await observed(branched, 0))[-2].startswith("kept\n")


async def snapshot_of_turn(store: Store, turn: int) -> str | None:
    """Return the run whose rollout 0 has a snapshot of that turn; None before it exists."""
    with contextlib.suppress(NoSuchRun):
        reader = await open_run(store, "source")
        if any(isinstance(record, SnapshotRecord) and record.turn == turn for record in await reader.records(0)):
            return reader.folder
    return None


async def test_running_rollout_is_branched_from_its_record(tmp_path: Path) -> None:
    commands = [f"echo {turn} >> log.txt; cat log.txt" for turn in range(3)]
    manifest = counting(sandbox={"snapshotEveryTurns": 1})
    turns = [*map(bash, commands), bash("echo late", 60)]
    manifest["spec"]["model"]["scripted"]["tasks"][0]["members"][0]["turns"] = turns
    running = asyncio.create_task(done(tmp_path, manifest))
    store = Store.open(str(tmp_path / "out"), {})
    while not running.done() and not (folder := await snapshot_of_turn(store, 2)):  # noqa: ASYNC110 another process would look so
        await asyncio.sleep(0.05)
    branched = await done(tmp_path, branching(f"out/{folder}", 2))
    assert [result.reward for result in branched.results()] == [1.0, 1.0]
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_unbranchable_rollouts_are_reported_before_the_first_one(tmp_path: Path) -> None:
    source = await done(tmp_path, counting(commands=["true"]))
    manifest = branching(run_of(source), 0)
    entry = manifest["spec"]["tasks"]["branch"][0]
    changes = [{"turn": 9}, {"index": 7}, {"job": "out/missing-00000000"}]
    manifest["spec"]["tasks"]["branch"] = [entry | change for change in changes]
    with pytest.raises(TaskSourceError) as refused:
        await done(tmp_path, manifest)
    messages = [
        "turn 9 is not recorded: it has turns 0 to 0 to branch from",
        "the source has 1 rollouts; lower index",
        "has no run of 'missing-00000000'",
    ]
    for problem, message in zip(refused.value.problems, messages, strict=True):
        assert message in str(problem)
    other = branching(run_of(source), 0, agent={"tools": ["bash", "finish"], "systemPrompt": "Be brief."})
    with pytest.raises(TaskSourceError, match=r"spec\.agent\.systemPrompt is 'Be brief\.' here and was None there"):
        await done(tmp_path, other)
    server = {"name": "files", "command": ["true"]}
    served = branching(run_of(source), 0, agent={"tools": ["bash", "finish"], "mcpServers": [server]})
    with pytest.raises(TaskSourceError, match=r"spec\.agent\.mcpServers: remove them"):
        await done(tmp_path, served)
    spent = branching(run_of(source), 0, agent={"tools": ["bash", "finish"], "tokenBudget": 20})
    with pytest.raises(TaskSourceError, match=r"spec\.agent\.tokenBudget is 20, and the copied turns have \d+ tokens"):
        await done(tmp_path, spent)


async def test_episode_of_an_environment_cannot_be_branched(tmp_path: Path) -> None:
    lake = counting()
    lake["spec"]["tasks"] = {"environments": [{"id": "FrozenLake"}]}
    lake["spec"]["agent"] = {"type": "Environment"}
    turns = [{"content": "<answer>Right</answer>"}] * 20
    lake["spec"]["model"] = {"scripted": {"tasks": [{"task": "FrozenLake-0", "members": [{"turns": turns}]}]}}
    lake["spec"].pop("verifier", None)
    source = await done(tmp_path, lake)
    with pytest.raises(TaskSourceError, match="its task acts in an environment"):
        await done(tmp_path, branching(run_of(source), 0, agent={"type": "Environment"}))


@pytest.mark.parametrize("workspaces", MODES, ids=["overlay", "plain"])
async def test_an_agent_goes_back_to_its_checkpoints(tmp_path: Path, workspaces: dict[str, str]) -> None:
    reader = await done(tmp_path, searching({"workspaces": workspaces, "snapshotPaths": ["/else"]}))
    result = reader.results()[0]
    assert (result.outcome, result.reward) == (Outcome.COMPLETED, 1.0)
    shown = result.message.split(" | ")
    assert shown[1:4] == [f"start\n{way}\nstart\n{way}\n[exit code 0]" for way in ("one", "two", "three")]
    assert shown[4] == "start\ntwo\n[exit code 0]"
    assert result.branches == 5
    (snapshot,) = [record for record in await reader.records(0) if isinstance(record, SnapshotRecord)]
    assert (snapshot.turn, bool(snapshot.layers)) == (0, True)


class Delegating:
    """Starts a sub-agent between its own model call and the tool calls of the answer."""

    async def run(self, context: AgentContext) -> str:
        messages: list[Message] = [{"role": "user", "content": context.task.prompt}]
        for turn in range(3):
            reply = await context.call_model(messages)
            messages.append(reply.message)
            report = await context.delegate(ToolCalling(), SubTask("Help.", max_turns=2)) if turn == 1 else None
            for result in await context.call_tools(reply.tool_calls):
                messages.append({"role": "tool", "tool_call_id": result.call_id, "content": result.content})
            if report is not None:
                messages.append({"role": "user", "content": report.stop_reason})
        return "done"


async def done_by(agent: Callable[[], Agent], folder: Path, manifest: Mapping[str, Any]) -> RunReader:
    """Run a job with that agent to its end; return its run."""
    job = RolloutJob.model_validate(manifest)
    assert (await run_job(job, base_dir=folder, environ=os.environ, agent=agent)).completed
    return await open_run(Store.open(str(folder / "out"), {}), job.metadata.name)


class OneByOne(ToolCalling):
    """Runs the calls of an answer separately, so that each has a record of its own."""

    async def execute_tool_call(self, calls: Sequence[ToolCall]) -> list[Observation]:
        return [result for call in calls for result in await self.context.call_tools([call])]


async def test_branch_makes_the_calls_of_its_turn_that_the_source_did_not_end(tmp_path: Path) -> None:
    manifest = counting(commands=["echo 0 >> log.txt", "echo b >> log.txt"])
    manifest["spec"]["tasks"]["inline"][0]["timeouts"] = {"agentSeconds": 3}
    turns = manifest["spec"]["model"]["scripted"]["tasks"][0]["members"][0]["turns"]
    turns[1]["toolCalls"] += bash("echo late >> log.txt; sleep 60")["toolCalls"]
    source = await done_by(OneByOne, tmp_path, manifest)
    assert [result.stop_reason for result in source.results()] == ["AgentTimeout"]
    branched = await done_by(OneByOne, tmp_path, branching(run_of(source), 1, count=1, attempts={"limit": 1}))
    (result,) = branched.results()
    assert (result.stop_reason, result.reward) == ("AgentTimeout", 1.0)


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("sandbox", [{}, {"snapshotEveryTurns": 1}, {"snapshotEveryTurns": 3}], ids=["again", "1", "3"])
async def test_branch_continues_from_any_turn_of_an_agent_with_sub_agents(
    tmp_path: Path, turn: int, sandbox: dict[str, Any]
) -> None:
    commands = [f"echo {number} >> log.txt; cat log.txt" for number in range(TURNS)]
    source = await done_by(Delegating, tmp_path, counting(commands=commands, sandbox=sandbox))
    # Turns 2 and 3 are the helper's, before the tools of turn 1.
    lines = "0\n2\n3\n1\n4\n"
    assert lines in "".join(await observed(source, 0))
    again = branching(run_of(source), turn, count=1)
    again["spec"]["model"]["scripted"]["tasks"][0]["members"] = [{"turns": [*map(bash, commands)]}]
    branched = await done_by(Delegating, tmp_path, again)
    (result,) = branched.results()
    assert (result.outcome, result.message) == (Outcome.COMPLETED, "done")
    assert result.branched_from is not None
    assert result.branched_from.differences == []
    assert lines in "".join(await observed(branched, 0))


async def test_branch_does_not_see_the_task_file_of_its_source(tmp_path: Path) -> None:
    sandbox = {"workspaces": {"mode": "Overlay"}}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # workspaces have another /tmp
        tasks, seen = Path(name) / "tasks.jsonl", Path(name) / "seen.txt"
        source = counting(sandbox=sandbox)
        tasks.write_text(json.dumps(source["spec"]["tasks"]["inline"][0]) + "\n")
        seen.write_text("content of seen")
        source["spec"]["tasks"] = {"from": {"uri": tasks.name}}
        first = await done(Path(name), source)
        branch = branching(run_of(first), 1, count=1, then=f"cat {name}/*", sandbox=sandbox)
        branched = await done(Path(name), branch)
        run = f"{name}/{run_of(branched)}"  # of a manifest in another folder
        again = branching(run, 1, count=1, name="again", then=f"cat {name}/*", sandbox=sandbox)
        again["spec"]["model"]["scripted"]["tasks"][0]["task"] = "count@0.1@0.1"
        for reader in (branched, await done(tmp_path, again)):
            shown = (await observed(reader, 0))[-2]
            assert "content of seen" in shown
            assert "when.txt" not in shown, "the setup is in the task file, beside the hidden tests"


async def test_branch_does_not_see_the_runs_of_its_sources(tmp_path: Path) -> None:
    sandbox = {"workspaces": {"mode": "Overlay"}}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # workspaces have another /tmp
        show = f"cat {name}/*/*/job.json"
        await done(Path(name), counting(sandbox=sandbox))
        branch = branching("out/source", 1, count=1, then=show, sandbox=sandbox)
        branch["spec"]["output"]["uri"] = "./second"
        again = branching("second/branch", 1, count=1, name="again", then=show, sandbox=sandbox)
        again["spec"]["model"]["scripted"]["tasks"][0]["task"] = "count@0.1@0.1"
        again["spec"]["output"]["uri"] = "./third"
        for manifest in (branch, again):
            job = RolloutJob.model_validate(manifest)
            summary = await run_job(job, base_dir=Path(name), environ=os.environ)
            reader = await open_run(Store.open(str(Path(name) / job.spec.output.uri), {}), job.metadata.name)
            assert summary.completed
            shown = (await observed(reader, 0))[-2]
            assert "when.txt" not in shown, "the setup is in the source's job.json, beside the hidden tests"


class RunsCommands(ToolCalling):
    async def run(self, context: AgentContext) -> str | None:
        await context.run_command("echo prepared >> log.txt")
        return await super().run(context)


class WritesFiles(ToolCalling):
    async def run(self, context: AgentContext) -> str | None:
        await context.put_files([TaskFile(path="log.txt", content="prepared")])
        return await super().run(context)


@pytest.mark.parametrize("agent", [RunsCommands, WritesFiles])
async def test_branch_fails_if_its_agent_worked_outside_its_turns(tmp_path: Path, agent: type[ToolCalling]) -> None:
    source = await done_by(agent, tmp_path, counting(sandbox={"snapshotEveryTurns": 1}))
    branched = await done_by(agent, tmp_path, branching(run_of(source), 1, count=1, attempts={"limit": 1}))
    (result,) = branched.results()
    assert (result.outcome, result.reason) == (Outcome.INFRA_FAILED, "AgentNotReplayable")


class TriesAgain(ToolCalling):
    """Starts again after each error and each cancellation."""

    async def run(self, context: AgentContext) -> str | None:
        while True:
            with contextlib.suppress(BaseException):
                return await super().run(context)


@pytest.mark.timeout(120, method="thread")  # the agent would catch the exception of the other method
async def test_branch_begins_when_its_agent_catches_the_end_of_the_copied_turns(tmp_path: Path) -> None:
    source = await done_by(TriesAgain, tmp_path, counting())
    branched = await done_by(TriesAgain, tmp_path, branching(run_of(source), 1, count=1, attempts={"limit": 1}))
    (result,) = branched.results()
    assert (result.outcome, result.stop_reason) == (Outcome.COMPLETED, "Finished")
