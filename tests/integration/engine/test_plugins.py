"""Whole runs with plugins: when each hook is called, what its result changes, and that it never changes a reward.

Over an in-memory provider, recorded in a real folder.
"""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_rollouts.plugins import FinishedRollout, GroupInfo, Refuse, RolloutInfo
from agent_runtime.engine.events import Event, PluginFailed, RolloutSealed
from agent_runtime.engine.run import run_job
from agent_runtime.extensions import ExtensionError
from agent_runtime.models.base import ModelReply, ModelRequest, ToolCall
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import CommandResult, SandboxFailure
from rollout_api.records import AttemptRecord, Message, Observation, Record, Result, Usage
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task, TaskStep, TaskVerifier
from tests.support.dummy_sandboxes import DummyProvider, Files, ended
from tests.support.virtual_time import passing_time

worlds = itertools.count()


class OneCall:
    """Requests one command, then finishes. Keeps the messages of its calls by member and turn."""

    name = "one-call"
    token_capture = "TextOnly"

    def __init__(self, command: str = "true", before: Callable[[ModelRequest], Awaitable[None]] | None = None) -> None:
        self.command, self.before = command, before
        self.sent: dict[tuple[int, int], list[Message]] = {}

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.sent[request.member, request.turn] = list(request.messages)
        if self.before is not None:
            await self.before(request)
        name, arguments = ("bash", {"command": self.command}) if request.turn == 0 else ("finish", {"message": "done"})
        call = {
            "id": f"c{request.turn}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return ModelReply(message, "tool_calls", usage=Usage(prompt_tokens=1, completion_tokens=1))

    async def check(self) -> None: ...

    async def close(self) -> None: ...


def a_job(folder: Path, group_size: int = 1, plugins: Sequence[dict[str, Any]] = (), **spec: Any) -> RolloutJob:
    files = [{"path": "work.txt", "content": "to be done"}]
    task = {"name": "task", "prompt": "Do it.", "files": files, "verifier": {"commands": ["grade"]}}
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "plugged"},
            "spec": {
                "mode": "Eval",
                "groupSize": group_size,
                "tasks": {"inline": [task]},
                "model": {"function": "nobody:asks"},
                "agent": {"tools": ["bash", "finish"]},
                "attempts": {"limit": 2, "backoffSeconds": 0},
                "plugins": list(plugins),
                "output": {"uri": str(folder)},
                **spec,
            },
        }
    )


class Ran:
    def __init__(self, folder: Path, name: str, events: Sequence[Event]) -> None:
        self.folder, self.name = folder, name
        self.failures = [event for event in events if isinstance(event, PluginFailed)]
        lines = (folder / name / "results.jsonl").read_text().splitlines()
        self.results = [Result.model_validate_json(line) for line in lines]
        self.stats = json.loads((folder / name / "stats.json").read_text())

    @property
    def outcomes(self) -> list[tuple[str, float | None]]:
        return [(result.outcome.value, result.reward) for result in self.results]

    async def records(self, index: int = 0) -> list[Record]:
        return await (await open_run(Store.open(str(self.folder), {}), self.name)).records(index)


async def run(
    folder: Path, *plugins: object, job: RolloutJob | None = None, model: OneCall | None = None, **provider: Any
) -> Ran:
    events: list[Event] = []
    summary = await run_job(
        job or a_job(folder),
        base_dir=folder,
        environ={},
        provider=DummyProvider(f"plugged-{next(worlds)}", **provider),
        model=model or OneCall(),
        observer=events.append,
        plugins=plugins,
    )
    return Ran(folder, summary.folder, events)


async def test_each_command_of_all_steps_verifiers_has_its_own_key(tmp_path: Path) -> None:
    keys: list[str] = []

    class Sees:
        def before_verifier_command(self, key: str) -> None:
            keys.append(key)

    job = a_job(tmp_path, group_size=1)
    steps = [TaskStep(name=name, prompt="p", verifier=TaskVerifier(commands=["grade"] * 2)) for name in ("one", "two")]
    stepped = Task(name="stepped", prompt="p", steps=steps)
    spec = job.spec.model_copy(update={"tasks": job.spec.tasks.model_copy(update={"inline": [stepped]})})
    ran = await run(tmp_path, Sees(), job=job.model_copy(update={"spec": spec}))
    assert keys == [f"{ran.name}/rollout-0-0:verifier-{number}" for number in range(4)]


async def test_all_hooks_are_called_in_order_with_their_own_keys(tmp_path: Path) -> None:
    called: list[tuple[str, str]] = []

    def hook(name: str) -> Callable[..., None]:
        def method(self: object, key: str) -> None:
            called.append((name, key))

        return method

    names = (
        "before_group", "before_rollout", "modify_task", "filter_tool_call", "before_tool_call", "after_tool_call",
        "before_verifier_command", "after_verifier_command", "evaluate_rollout", "analyze_trajectory", "after_rollout",
        "after_group",
    )  # fmt: skip
    ran = await run(tmp_path, type("Sees", (), {name: hook(name) for name in names})())
    rollout = f"{ran.name}/rollout-0-0"
    turns = [
        (name, f"{rollout}:turn-{turn}:call-0")
        for turn in range(2)
        for name in ("filter_tool_call", "before_tool_call", "after_tool_call")
    ]
    assert called == [
        ("before_group", f"{ran.name}/group-0"),
        ("before_rollout", rollout),
        ("modify_task", f"{rollout}:task"),
        *turns,
        ("before_verifier_command", f"{rollout}:verifier-0"),
        ("after_verifier_command", f"{rollout}:verifier-0"),
        ("evaluate_rollout", rollout),
        ("analyze_trajectory", rollout),
        ("after_rollout", rollout),
        ("after_group", f"{ran.name}/group-0"),
    ]


async def test_end_of_a_group_is_delivered_once_after_a_takeover(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    class Tells:
        def after_group(self, key: str, results: Sequence[Result]) -> None:
            told.append((key, len(results)))

    sealed = await run(tmp_path)  # as by a process that died before it could tell anybody
    for _ in range(2):
        await run(tmp_path, Tells())
    assert told == [(f"{sealed.name}/group-0", 1)]


async def test_refused_call_does_not_run_and_the_model_gets_the_reason(tmp_path: Path) -> None:
    commands: list[Any] = []

    async def command(line: str | Sequence[str], _files: Files) -> CommandResult:
        commands.append(line)
        return ended(1 if line == "grade" else 0)

    model = OneCall("rm -rf /")
    job = a_job(tmp_path, plugins=[{"name": "SafetyFilter"}])
    ran = await run(tmp_path, job=job, model=model, command=command)
    assert "rm -rf /" not in commands
    told = model.sent[0, 1][-1]["content"]
    assert told.startswith("Refused by SafetyFilter, not run: rm -rf / removes /")
    assert ran.outcomes == [("Completed", 0.0)], "a blocked turn is no success: the verifier has the last word"
    report = ran.results[0].plugins["SafetyFilter"]
    assert (report.refused, report.failed, ran.results[0].tool_calls) == (1, 0, 2)
    assert ran.stats["plugins"]["SafetyFilter"]["refused"] == 1


async def test_a_policy_cannot_get_past_a_filter_nor_be_masked_by_making_it_fail(tmp_path: Path) -> None:
    class Fragile:
        def filter_tool_call(self, call: ToolCall) -> None:
            raise ValueError(json.loads(call.arguments)["command"])

    commands: list[Any] = []

    async def command(line: str | Sequence[str], _files: Files) -> CommandResult:
        commands.append(line)
        return ended()

    job = a_job(tmp_path, agent={"tools": ["bash", "finish"], "maxTurns": 2})
    model = OneCall("mischief")
    ran = await run(tmp_path, Fragile(), job=job, model=model, command=command)
    assert "mischief" not in commands
    assert "failed on this one" in model.sent[0, 1][-1]["content"]
    assert ran.outcomes == [("Completed", 1.0)]
    assert ran.results[0].failed_attempts == []
    assert {failure.plugin for failure in ran.failures} == {"Fragile"}


async def test_call_changed_by_a_plugin_runs_and_is_recorded_as_changed(tmp_path: Path) -> None:
    class Quiet:
        def filter_tool_call(self, call: ToolCall) -> ToolCall | None:
            if call.name != "bash":
                return None
            return ToolCall(call.id, call.name, json.dumps({"command": "true --quiet"}))

    commands: list[Any] = []

    async def command(line: str | Sequence[str], _files: Files) -> CommandResult:
        commands.append(line)
        return ended()

    model = OneCall("true")
    ran = await run(tmp_path, Quiet(), model=model, command=command)
    assert any("--quiet" in str(line) for line in commands)
    (observation,) = [o for r in await ran.records() for o in getattr(r, "results", []) if o.tool == "bash"]
    assert observation.data["changed"] == {"name": "bash", "arguments": '{"command": "true --quiet"}'}
    assert model.sent[0, 1][-2]["tool_calls"][0]["function"]["arguments"] == '{"command": "true"}'


@pytest.mark.parametrize(
    "hook",
    ["before_group", "before_rollout", "before_tool_call", "after_tool_call", "before_verifier_command", "after_rollout",
     "after_verifier_command", "evaluate_rollout", "analyze_trajectory", "should_stop_group", "after_group"],
)  # fmt: skip
async def test_plugin_that_raises_elsewhere_is_reported_and_changes_no_rollout(tmp_path: Path, hook: str) -> None:
    def fail(self: object) -> None:
        raise OSError("disk")

    ran = await run(tmp_path, type("Fails", (), {hook: fail})(), job=a_job(tmp_path, group_size=2))
    assert ran.outcomes == [("Completed", 1.0)] * 2
    assert {(failure.plugin, failure.hook, failure.message) for failure in ran.failures} == {
        ("Fails", hook, "OSError: disk")
    }
    if hook not in ("before_group", "should_stop_group", "after_group"):
        assert ran.results[0].plugins["Fails"].error == f"{hook}: OSError: disk"
        assert ran.stats["plugins"]["Fails"]["failed"] == len(ran.failures)


async def test_a_task_that_could_not_be_changed_is_infrastructure_and_never_reward_0(tmp_path: Path) -> None:
    class Fails:
        def modify_task(self, task: Task) -> Task:
            raise OSError("no database")

    ran = await run(tmp_path, Fails())
    assert ran.outcomes == [("InfraFailed", None)]
    assert ran.results[0].reason == "PluginFailed"
    assert "plugin Fails could not change the task: OSError: no database" in ran.results[0].message
    assert len(ran.results[0].failed_attempts) == 2
    assert ran.results[0].plugins["Fails"].failed == 1


class Numbers:
    """Gives each attempt another task. A resumed rollout must use the recorded one."""

    def __init__(self) -> None:
        self.times = 0

    async def modify_task(self, rollout: RolloutInfo, task: Task) -> Task:
        self.times += 1
        return task.model_copy(update={"prompt": f"Number {self.times}.", "setup": [f"prepare {self.times}"]})


async def test_changed_task_reaches_sandbox_agent_and_verifier_and_is_recorded(tmp_path: Path) -> None:
    commands: list[Any] = []

    async def command(line: str | Sequence[str], _files: Files) -> CommandResult:
        commands.append(line)
        return ended()

    model = OneCall()
    ran = await run(tmp_path, Numbers(), model=model, command=command)
    assert "prepare 1" in commands
    assert model.sent[0, 0][-1]["content"] == "Number 1."
    (attempt,) = [record for record in await ran.records() if isinstance(record, AttemptRecord)]
    assert attempt.task is not None
    assert attempt.task.setup == ["prepare 1"]
    assert ran.results[0].plugins["Numbers"].changed == 1


async def test_a_resumed_rollout_keeps_the_task_that_it_was_given(tmp_path: Path) -> None:
    stop, world, numbers = asyncio.Event(), f"plugged-{next(worlds)}", Numbers()

    async def stop_at_turn_1(request: ModelRequest) -> None:
        if request.turn == 1 and not stop.is_set():
            stop.set()
            await asyncio.sleep(60)

    model, job = OneCall(before=stop_at_turn_1), a_job(tmp_path)

    async def go_on() -> Any:
        return await run_job(
            job, base_dir=tmp_path, environ={}, provider=DummyProvider(world), model=model, plugins=[numbers],
            stop=None if stop.is_set() else stop,
        )  # fmt: skip

    assert (await go_on()).resumable
    summary = await go_on()
    assert summary.completed
    assert model.sent[0, 1][-3]["content"] == "Number 1."
    assert numbers.times == 1
    (result,) = Ran(tmp_path, summary.folder, []).results
    assert (result.attempt, result.plugins["Numbers"].changed) == (0, 1), "what the first process did is in the journal"


async def test_a_lost_attempt_has_its_task_changed_again(tmp_path: Path) -> None:
    lost = iter([True])

    async def lose(operation: str, attempt: str, key: str | None) -> None:
        if operation == "run" and attempt.startswith("0-0") and next(lost, False):
            raise SandboxFailure("NodeLost", "injected")

    model = OneCall()
    ran = await run(tmp_path, Numbers(), model=model, on_call=lose)
    assert ran.outcomes == [("Completed", 1.0)]
    assert model.sent[0, 0][-1]["content"] == "Number 2."


async def test_scores_and_analyses_never_replace_the_reward(tmp_path: Path) -> None:
    class Judge:
        def evaluate_rollout(self, finished: FinishedRollout) -> dict[str, float]:
            object.__setattr__(finished.result, "reward", 99.0)
            return {"reward": 99.0, "calls": float(len(finished.tool_uses))}

    job = a_job(tmp_path, plugins=[{"name": "TrajectoryAnalysis"}])
    ran = await run(tmp_path, Judge(), job=job)
    assert ran.outcomes == [("Completed", 1.0)]
    assert ran.results[0].plugins["Judge"].scores == {"reward": 99.0, "calls": 2.0}
    assert ran.results[0].plugins["TrajectoryAnalysis"].analysis["byTool"] == {"bash": 1, "finish": 1}
    assert ran.stats["plugins"]["Judge"]["scores"]["calls"]["mean"] == 2.0
    assert ran.stats["reward"]["mean"] == 1.0


async def test_plugins_changes_to_its_arguments_reach_only_plugins(tmp_path: Path) -> None:
    class Scribbles:
        def before_rollout(self, rollout: RolloutInfo) -> None:
            rollout.task.verifier.commands.clear()  # type: ignore[union-attr]

        def after_tool_call(self, result: Observation) -> None:
            result.data["exitCode"] = 77

    ran = await run(tmp_path, Scribbles())
    assert ran.outcomes == [("Completed", 1.0)]
    (observation,) = [o for r in await ran.records() for o in getattr(r, "results", []) if o.tool == "bash"]
    assert observation.data["exitCode"] == 0


@pytest.mark.parametrize("concurrency", [1, 3, 10])
async def test_successful_group_ends_after_its_first_three_members(tmp_path: Path, concurrency: int) -> None:
    async def later_members_think_longer(request: ModelRequest) -> None:
        await asyncio.sleep(0 if request.member < 3 else 60)

    job = a_job(tmp_path, 10, [{"name": "PerformanceStop"}], runners={"concurrency": concurrency})
    ran = await run(tmp_path, job=job, model=OneCall(before=later_members_think_longer))
    assert ran.outcomes == [("Completed", 1.0)] * 3 + [("Cancelled", None)] * 7
    assert {result.reason for result in ran.results[3:]} == {"StoppedByPlugin"}
    assert ran.results[3].message == "PerformanceStop: the last 3 rewards reach 0.8"
    counted = ran.stats["plugins"]["PerformanceStop"]
    assert (counted["calls"], counted["stopped"], counted["failed"]) == (3, 1, 0)


async def test_fast_late_members_do_not_decide_for_slow_first_ones(tmp_path: Path) -> None:
    """Members 1 to 9 succeed while member 0 still thinks: only when it has ended can anything be decided."""
    sealed: list[int] = []
    others_are_sealed = asyncio.Event()

    def observe(event: Event) -> None:
        if isinstance(event, RolloutSealed):
            sealed.append(event.result.member)
            if len(sealed) == 9:
                others_are_sealed.set()

    async def the_first_is_last(request: ModelRequest) -> None:
        if request.member == 0:
            await others_are_sealed.wait()

    summary = await run_job(
        a_job(tmp_path, 10, [{"name": "PerformanceStop"}]), base_dir=tmp_path, environ={},
        provider=DummyProvider(f"plugged-{next(worlds)}"), model=OneCall(before=the_first_is_last), observer=observe,
    )  # fmt: skip
    assert sealed[-1] == 0
    assert summary.outcomes["Completed"] == 10


async def test_group_is_judged_again_by_the_next_process_from_its_seals(tmp_path: Path) -> None:
    """Two members are sealed when the first process is stopped; the plugin needs no more, so the next one runs none."""
    world, stop = f"plugged-{next(worlds)}", asyncio.Event()

    class Stops:
        async def should_stop_group(self, group: GroupInfo, results: Sequence[Result]) -> str | None:
            return "enough" if len(results) == 2 else None

    async def stall(request: ModelRequest) -> None:
        if request.member == 2:
            stop.set()
            await asyncio.sleep(60)

    job = a_job(tmp_path, 4, runners={"concurrency": 1})

    async def go_on(model: OneCall, *plugins: object) -> Any:
        return await run_job(
            job, base_dir=tmp_path, environ={}, provider=DummyProvider(world), model=model, plugins=plugins, stop=stop
        )

    assert (await go_on(OneCall(before=stall))).resumable
    stop, again = asyncio.Event(), OneCall()
    summary = await go_on(again, Stops())
    assert summary.outcomes == {"Completed": 2, "Cancelled": 2, "InfraFailed": 0, "VerifierFailed": 0}
    assert again.sent == {}


async def test_slow_plugin_costs_no_agent_time(tmp_path: Path) -> None:
    engine, called = asyncio.get_running_loop(), list[str]()

    async def take_long(call: str) -> None:
        called.append(call)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(let_pass(20), engine))

    class Slow:
        async def filter_tool_call(self) -> None:
            await take_long("before")

        async def after_tool_call(self) -> None:
            await take_long("after")

    document = a_job(tmp_path).wire()
    document["spec"]["tasks"]["inline"][0]["timeouts"] = {"agentSeconds": 30}
    with passing_time() as let_pass:
        ran = await run(tmp_path, Slow(), job=RolloutJob.model_validate(document))
    assert set(called) == {"before", "after"}
    assert ran.results[0].stop_reason is not None
    assert ran.results[0].stop_reason.value == "Finished"


async def test_a_plugin_that_cannot_be_loaded_ends_the_job_before_its_first_rollout(tmp_path: Path) -> None:
    model = OneCall()
    with pytest.raises(ExtensionError, match="NoSuchPlugin"):
        await run(tmp_path, job=a_job(tmp_path, plugins=[{"name": "NoSuchPlugin"}]), model=model)
    assert not model.sent
    assert not list(tmp_path.iterdir())


async def test_an_agent_whose_every_call_a_plugin_refuses_is_graded(tmp_path: Path) -> None:
    class No:
        def filter_tool_call(self, call: ToolCall) -> Refuse:
            return Refuse("never")

    job = a_job(tmp_path, agent={"tools": ["bash", "finish"], "maxTurns": 3})
    ran = await run(tmp_path, No(), job=job)
    assert ran.results[0].stop_reason is not None
    assert ran.results[0].stop_reason.value == "MaxTurns"
    assert ran.results[0].plugins["No"].refused == 3
