"""The cause decides: infrastructure failures are retried and masked, failures of the policy are graded.

Whole runs of the engine over an in-memory provider that fails on demand, recorded in a real folder.
"""

import asyncio
import contextlib
import itertools
import json
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.agents.base import Agent, AgentContext
from agent_runtime.engine.attempt.turns import ACKNOWLEDGE_EVERY
from agent_runtime.engine.events import (
    AgentFailed,
    AttemptFailed,
    Event,
    GroupFinished,
    JobSummary,
    RolloutSealed,
    TurnEnded,
    VerifierFailed,
)
from agent_runtime.engine.opening import STOPPED_SECONDS
from agent_runtime.engine.run import run_job
from agent_runtime.engine.scheduling import first_ends
from agent_runtime.engine.scheduling.first_ends import AgentBroken
from agent_runtime.engine.scheduling.shard import Shard
from agent_runtime.engine.session import RolloutSession
from agent_runtime.models import probe
from agent_runtime.models.base import (
    ContextExceeded,
    Model,
    ModelConfigError,
    ModelError,
    ModelReply,
    ModelRequest,
    ToolCall,
)
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import StorageError, Store
from agent_runtime.sandboxes.base import CommandResult, Fence, FileError, SandboxFailure, WorkspaceSpec
from rollout_api.files import TaskFile
from rollout_api.records import CommandRecord, ObjectDigest, PolicySpan, Usage
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task
from rolloutctl.ui.transcript import steps
from tests.support.dummy_sandboxes import DummyProvider, DummyWorkspace, Files, OnCall, World, ended, nothing_happens
from tests.support.virtual_time import passing_time

worlds = itertools.count()
FILE = {"path": "work.txt", "content": "to be done"}


class OneCall:
    """Requests one command, then finishes; `fail` may raise instead."""

    name = "one-call"
    token_capture = "TextOnly"

    def __init__(
        self, fail: Callable[[ModelRequest], Awaitable[None]] | None = None, version: str | None = None
    ) -> None:
        self.fail, self.version = fail, version

    async def complete(self, request: ModelRequest) -> ModelReply:
        if self.fail is not None:
            await self.fail(request)
        name, arguments = ("bash", '{"command": "true"}') if request.turn == 0 else ("finish", '{"message": "done"}')
        call = {"id": f"c{request.turn}", "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        usage = Usage(prompt_tokens=1, completion_tokens=1)
        spans = [] if self.version is None else [PolicySpan(tokens=1, version=self.version)]
        return ModelReply(message, "tool_calls", usage=usage, policy_spans=spans)

    async def check(self) -> None: ...

    async def close(self) -> None: ...


def task(number: int, **more: Any) -> dict[str, Any]:
    return {"name": f"task-{number}", "prompt": "Do it.", "files": [FILE], "verifier": {"commands": ["grade"]}, **more}


def a_job(folder: Path, tasks: int = 1, group_size: int = 2, agent_seconds: float = 3600, **spec: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "outcomes"},
            "spec": {
                "mode": "Eval",
                "groupSize": group_size,
                "tasks": {
                    "inline": [task(number, timeouts={"agentSeconds": agent_seconds}) for number in range(tasks)]
                },
                "model": {"function": "nobody:asks"},
                "agent": {"tools": ["bash", "finish"]},
                "attempts": {"limit": 3, "backoffSeconds": 0},
                "output": {"uri": str(folder)},
                **spec,
            },
        }
    )


class Ran:
    def __init__(self, folder: Path, summary: JobSummary, events: list[Event]) -> None:
        self.summary, self.events = summary, events
        lines = (folder / summary.folder / "results.jsonl").read_text().splitlines()
        self.results: list[dict[str, Any]] = [json.loads(line) for line in lines]

    @property
    def outcomes(self) -> list[tuple[str, str | None, float | None]]:
        """Return the outcome, the stop reason or the reason, and the reward of each rollout."""
        return [(r["outcome"], r.get("stopReason") or r.get("reason"), r.get("reward")) for r in self.results]


@pytest.fixture
def short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an agent that raises wait only briefly for other agents that might do better."""
    monkeypatch.setattr(first_ends, "LOOK_SECONDS", 0.05)


async def run(job: RolloutJob, folder: Path, model: Model | None = None, **provider: Any) -> Ran:
    events: list[Event] = []
    summary = await run_job(
        job,
        base_dir=folder,
        environ={},
        provider=DummyProvider(f"outcomes-{next(worlds)}", **provider),
        model=model or OneCall(),
        observer=events.append,
    )
    return Ran(folder, summary, events)


def failing(operation: str, attempts: set[str], reason: str = "NodeLost") -> dict[str, Any]:
    """Return arguments of a provider whose sandbox is lost at the first such operation of each of these attempts."""
    left = set(attempts)

    async def on_call(called: str, attempt: str, key: str | None) -> None:
        if called == operation and any(attempt.startswith(name) for name in left):
            left.difference_update({name for name in left if attempt.startswith(name)})
            raise SandboxFailure(reason, "injected")

    return {"on_call": on_call}


async def test_a_sandbox_that_fails_to_start_once_costs_one_attempt_of_one_member(tmp_path: Path) -> None:
    ran = await run(a_job(tmp_path, group_size=4), tmp_path, **failing("acquire", {"2-0"}, "ImagePull"))
    assert ran.outcomes == [("Completed", "Finished", 1.0)] * 4
    assert [r["attempt"] for r in ran.results] == [0, 0, 1, 0]
    assert ran.results[2]["failedAttempts"] == [{"attempt": 0, "reason": "ImagePull", "message": "injected"}]
    assert [e for e in ran.events if isinstance(e, AttemptFailed)] == [
        AttemptFailed(2, 0, "ImagePull", "injected", True)
    ]


async def test_a_member_that_is_always_lost_is_masked_and_never_reward_0(tmp_path: Path) -> None:
    lost = {"1-0", "1-1", "1-2"}
    ran = await run(a_job(tmp_path), tmp_path, **failing("acquire", lost))
    assert ran.outcomes == [("Completed", "Finished", 1.0), ("InfraFailed", "NodeLost", None)]
    assert ran.summary.mean_reward == 1.0, "outside its group's mean"
    assert len(ran.results[1]["failedAttempts"]) == 3


async def test_slow_boot_costs_no_agent_time(tmp_path: Path) -> None:
    async def slow(called: str, attempt: str, key: str | None) -> None:
        if called == "acquire":
            await let_pass(90)

    with passing_time() as let_pass:
        ran = await run(a_job(tmp_path, group_size=1, agent_seconds=60), tmp_path, on_call=slow)
    assert ran.outcomes == [("Completed", "Finished", 1.0)]
    assert ran.results[0]["seconds"]["boot"] > 60 > ran.results[0]["seconds"]["agent"]


async def test_unavailable_model_is_an_infrastructure_failure_and_a_full_context_is_not(tmp_path: Path) -> None:
    async def fail(request: ModelRequest) -> None:
        if request.member == 0:
            raise ModelError("Unreachable", "refused")
        if request.max_tokens is None:  # the short test request has a limit
            raise ContextExceeded("9000 > 8192")

    ran = await run(a_job(tmp_path), tmp_path, OneCall(fail))
    assert ran.outcomes == [("InfraFailed", "Unreachable", None), ("Completed", "ContextExceeded", 1.0)]


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_policy_that_kills_its_sandboxes_is_completed_with_reward_0(tmp_path: Path, limit: int) -> None:
    """It does so once beside other rollouts, which proves nothing, and twice alone. Whatever `attempts.limit` is, it is
    not masked.
    """
    job = a_job(tmp_path, attempts={"limit": limit, "backoffSeconds": 0})
    ran = await run(job, tmp_path, **failing("run", {"0-0", "0-1", "0-2"}, "SandboxLost"))
    assert ran.outcomes == [("Completed", "ResourceLimit", 0.0), ("Completed", "Finished", 1.0)]


async def test_rollouts_that_lose_a_shared_sandbox_twice_are_not_blamed_for_it(tmp_path: Path) -> None:
    """Each is retried alone, where no other rollout can destroy its sandbox."""
    lost = {"0-0", "1-0", "2-0", "3-0", "2-1"}
    ran = await run(a_job(tmp_path, group_size=4), tmp_path, **failing("run", lost, "SandboxLost"))
    assert ran.outcomes == [("Completed", "Finished", 1.0)] * 4
    assert [r["attempt"] for r in ran.results] == [1, 1, 2, 1]
    # The first attempt was lost after one answer, and the sealed one has two; all of them are counted.
    assert [(r["usage"]["promptTokens"], r["lostUsage"]["promptTokens"]) for r in ran.results] == [
        (2, 1),
        (2, 1),
        (2, 2),
        (2, 1),
    ]
    assert ran.summary.stats["promptTokens"] == 13


async def test_a_policy_that_kills_its_sandbox_between_its_tool_calls_is_not_masked(tmp_path: Path) -> None:
    """A process that a tool call left behind kills the sandbox during a model call."""
    provider = DummyProvider(f"outcomes-{next(worlds)}")

    async def kill(request: ModelRequest) -> None:
        if request.turn == 1 and request.member == 0:
            for identity in [one for one in provider.world.workspaces if one.startswith("0-")]:
                provider.lose(identity)

    summary = await run_job(
        a_job(tmp_path, attempts={"limit": 3, "backoffSeconds": 0}, agent={"tools": ["bash", "finish"]}),
        base_dir=tmp_path, environ={}, provider=provider, model=OneCall(kill),
    )  # fmt: skip
    assert Ran(tmp_path, summary, []).outcomes == [("Completed", "ResourceLimit", 0.0), ("Completed", "Finished", 1.0)]


async def test_code_under_test_that_kills_every_grading_sandbox_gets_a_failed_verdict(tmp_path: Path) -> None:
    async def lose(operation: str, attempt: str, key: str | None) -> None:
        if operation == "run" and attempt.startswith("0-0.grading") and key is not None and "command" in key:
            raise SandboxFailure("SandboxLost", "injected")

    ran = await run(a_job(tmp_path), tmp_path, on_call=lose)
    assert ran.outcomes == [("Completed", "Finished", 0.0), ("Completed", "Finished", 1.0)]


async def test_a_policy_that_kills_its_shared_verifiers_sandbox_gets_a_failed_verdict(tmp_path: Path) -> None:
    async def lose(operation: str, attempt: str, key: str | None) -> None:
        if operation == "run" and attempt.startswith("0-") and key is not None and "verifier-command" in key:
            raise SandboxFailure("SandboxLost", "injected")

    ran = await run(a_job(tmp_path, verifier={"mode": "Shared"}), tmp_path, on_call=lose)
    assert ran.outcomes == [("Completed", "Finished", 0.0), ("Completed", "Finished", 1.0)]


async def test_a_verifiers_program_that_the_agent_removed_is_a_failed_verdict(tmp_path: Path) -> None:
    """The task is at fault only for what the prepared state lacks, which is checked before the agent's files are
    copied.
    """

    async def commands(command: str | Sequence[str], files: Files) -> CommandResult:
        work = [path for path in files.content if path.endswith("work.txt")]
        if str(command).endswith("; true"):
            files.remove(work[0])
        if "command -v" in command and not work:
            return ended(0, b"program grade\n")
        return ended(0 if command != "grade" or work else 127)

    ran = await run(a_job(tmp_path, group_size=1), tmp_path, command=commands)
    assert ran.outcomes == [("Completed", "Finished", 0.0)]


class UnexpectedModel(OneCall):
    """Answers member 1 with what no server should send."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    async def complete(self, request: ModelRequest) -> ModelReply:
        reply = await super().complete(request)
        if request.member != 1:
            return reply
        match self.kind:
            case "raises":
                raise KeyError("choices")
            case "-inf":
                return replace(reply, prompt_token_ids=[1], completion_token_ids=[2], logprobs=[float("-inf")])
            case "nan":
                return replace(reply, prompt_token_ids=[1], completion_token_ids=[2], logprobs=[float("nan")])
            case "surrogate":
                call = reply.message["tool_calls"][0]["function"]
                call["arguments"] = '{"command": "echo \ud800"}' if request.turn == 0 else call["arguments"]
                reply.message["content"] = "half a \udc00 pair"
        return reply


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("raises", ("InfraFailed", "ModelFailed", None)),
        ("nan", ("InfraFailed", "ModelFailed", None)),
        ("-inf", ("Completed", "Finished", 1.0)),
        ("surrogate", ("Completed", "Finished", 1.0)),
    ],
)
async def test_unexpected_answer_of_a_model_fails_only_its_own_rollout(
    tmp_path: Path, kind: str, outcome: tuple[str, str, float | None]
) -> None:
    ran = await run(a_job(tmp_path), tmp_path, UnexpectedModel(kind))
    assert ran.outcomes == [("Completed", "Finished", 1.0), outcome]
    again = await run(a_job(tmp_path), tmp_path, UnexpectedModel(kind))
    assert again.outcomes == ran.outcomes, "what was written can be read"


@pytest.mark.parametrize("kind", [ModelError, ModelConfigError])
async def test_rollout_whose_text_the_server_refuses_is_graded_and_affects_no_other(
    tmp_path: Path, kind: type[ModelError]
) -> None:
    async def refuse(request: ModelRequest) -> None:
        if request.member == 1 and any(message["role"] == "assistant" for message in request.messages):
            raise kind("KeyRefused", "status 403: blocked by the firewall")

    ran = await run(a_job(tmp_path, attempts={"limit": 1}), tmp_path, OneCall(refuse))
    assert ran.outcomes == [("Completed", "Finished", 1.0), ("Completed", "AgentError", 1.0)]
    assert [failed["reason"] for failed in ran.results[1]["failedAttempts"]] == ["KeyRefused"]


async def test_model_that_fails_at_all_requests_is_infrastructure(tmp_path: Path) -> None:
    down = False

    async def refuse(request: ModelRequest) -> None:
        nonlocal down
        down = down or request.turn == 1
        if down:
            raise ModelError("ServerError", "status 500")

    ran = await run(a_job(tmp_path, group_size=1, attempts={"limit": 1}), tmp_path, OneCall(refuse))
    assert ran.outcomes == [("InfraFailed", "ServerError", None)]


@pytest.mark.parametrize("answers_others", [True, False])
async def test_timeout_at_a_silent_model_counts_only_if_it_answers_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_others: bool
) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 60 if answers_others else 0.5)

    async def hang(request: ModelRequest) -> None:
        is_probe = request.messages[-1]["content"] == "Say ok."
        if request.turn == 1 or (is_probe and not answers_others):
            await asyncio.sleep(3600)

    job = a_job(tmp_path, group_size=1, agent_seconds=1, attempts={"limit": 1})
    ran = await run(job, tmp_path, OneCall(hang))
    expected = ("Completed", "AgentTimeout", 1.0) if answers_others else ("InfraFailed", "Timeout", None)
    assert ran.outcomes == [expected]


class Mistaken:
    async def run(self, context: AgentContext) -> str | None:
        await context.go_back("nope")
        return None


class Careful:
    async def run(self, context: AgentContext) -> str | None:
        with contextlib.suppress(FileError):
            await context.put_files([TaskFile(path="work.txt/x", content="a")])
        await context.put_files([TaskFile(path="notes.txt", content="a")])
        return "done without it"


class Decoding:
    """Passes on values that it decoded from the policy's answer."""

    def __init__(self, call: Callable[[AgentContext], Awaitable[object]]) -> None:
        self._call = call

    async def run(self, context: AgentContext) -> str | None:
        await context.call_model([{"role": "user", "content": "Answer in JSON."}], [])
        await self._call(context)
        return None


@pytest.mark.usefixtures("short_look")
@pytest.mark.parametrize(
    "call",
    [
        lambda context: context.call_model([5], []),
        lambda context: context.call_model("text", []),
        lambda context: context.call_model([], ["bash"]),
        lambda context: context.call_tools([{"id": "1", "name": "bash", "arguments": "{}"}]),
        lambda context: context.call_tools(None),
        lambda context: context.run_command(5),
        lambda context: context.run_command(["ls", None]),
        lambda context: context.put_files([{"path": "a", "content": "b"}]),
    ],
)
async def test_argument_of_a_wrong_type_in_an_agents_call_is_graded_and_not_masked(
    tmp_path: Path, call: Callable[[Any], Awaitable[object]]
) -> None:
    summary = await run_job(
        a_job(tmp_path),
        provider=DummyProvider(f"outcomes-{next(worlds)}"),
        agent=lambda: Decoding(call),
        base_dir=tmp_path,
        environ={},
        model=OneCall(),
    )
    ran = Ran(tmp_path, summary, [])
    assert ran.outcomes == [("Completed", "AgentError", 1.0)] * 2
    assert "TypeError" in ran.results[0]["traceback"]


@pytest.mark.usefixtures("short_look")
async def test_error_of_an_agent_is_graded_and_reported_without_ending_the_run(tmp_path: Path) -> None:
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "model": OneCall()}
    summary = await run_job(
        a_job(tmp_path), provider=DummyProvider(f"outcomes-{next(worlds)}"), agent=Mistaken, **common
    )
    ran = Ran(tmp_path, summary, [])
    assert ran.outcomes == [("Completed", "AgentError", 1.0)] * 2
    assert "go_back" in ran.results[0]["traceback"]


async def bash(command: str) -> str:
    """Raises a KeyError."""
    return {"ran": command}["output"]


async def test_verdict_says_why_nothing_could_be_graded_when_the_agent_had_finished(tmp_path: Path) -> None:
    async def refuse(called: str, attempt: str, key: str | None) -> None:
        if called == "tar":
            raise FileError("deep", "a path of 4096 bytes or more cannot be put in a tar")

    ran = await run(a_job(tmp_path, group_size=1), tmp_path, on_call=refuse)
    assert ran.outcomes == [("Completed", "Finished", 0.0)]
    seal = json.loads((tmp_path / ran.summary.folder / "seals" / "0.json").read_text())
    assert "nothing was left to grade" in seal["verdict"]["message"]
    assert "a path of 4096 bytes or more" in seal["verdict"]["message"]
    assert seal["result"]["verifierMessage"] == seal["verdict"]["message"]
    (told,) = [event for event in ran.events if isinstance(event, VerifierFailed)]
    assert told.message == seal["verdict"]["message"]
    assert seal["result"]["message"] == "done"


def in_steps(folder: Path, steps: int, **spec: Any) -> RolloutJob:
    names = [f"step-{number}" for number in range(steps)]
    of_steps = [{"name": name, "prompt": "Go on.", "verifier": {"commands": ["grade"]}} for name in names]
    job = a_job(folder, **spec)
    stepped = Task.model_validate({"name": "task-0", "prompt": "Do it.", "steps": of_steps})
    tasks = job.spec.tasks.model_copy(update={"inline": [stepped]})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"tasks": tasks})})


class CatchesLimits:
    """Works until its context raises, and then returns."""

    async def run(self, context: AgentContext) -> str:
        with contextlib.suppress(Exception):
            while True:
                await context.call_model([{"role": "user", "content": "Go on."}])
        return "no turns left"


class CatchesEverything(CatchesLimits):
    """Ends neither by an error nor by its cancellation."""

    async def run(self, context: AgentContext) -> str:
        while True:
            with contextlib.suppress(BaseException):
                await super().run(context)


@pytest.mark.timeout(60, method="thread")  # the agent would catch the exception of the other method
@pytest.mark.parametrize("agent", [CatchesLimits, CatchesEverything])
@pytest.mark.parametrize(("steps", "reward"), [(1, 1.0), (2, 0.5)])
async def test_step_is_graded_after_a_kill_when_its_agent_caught_a_limit(
    tmp_path: Path, steps: int, reward: float, agent: type[Agent]
) -> None:
    world, stop = f"outcomes-{next(worlds)}", asyncio.Event()
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "model": OneCall(), "agent": agent}

    async def verifier(command: str | Sequence[str], files: Files) -> CommandResult:
        if "grade" in str(command) and not stop.is_set():
            stop.set()
            await asyncio.sleep(3600)
        return ended()

    job = in_steps(tmp_path, steps, group_size=1, agent={"tools": ["bash"], "maxTurns": 1})
    await run_job(job, provider=DummyProvider(world, verifier), stop=stop, **common)
    summary = await run_job(job, provider=DummyProvider(world, verifier), **common)
    assert Ran(tmp_path, summary, []).outcomes == [("Completed", "MaxTurns", reward)]


async def test_background_jobs_of_a_steps_agent_make_no_later_calls(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def slow_verifier(command: str | Sequence[str], files: Files) -> CommandResult:
        await asyncio.sleep(0.1 if "grade" in str(command) else 0)
        return ended()

    async def ask(request: ModelRequest) -> None:
        asked.append(request.messages[-1]["content"])

    class LeavesJobs:
        async def run(self, context: AgentContext) -> str:
            await context.call_model([{"role": "user", "content": "Go on."}])
            self.jobs = [
                asyncio.create_task(context.call_model([{"role": "user", "content": "left"}])) for _ in range(3)
            ]
            await asyncio.sleep(0)
            return "done"

    job = in_steps(tmp_path, 2, group_size=1)
    provider = DummyProvider(f"outcomes-{next(worlds)}", slow_verifier)
    await run_job(job, base_dir=tmp_path, environ={}, provider=provider, model=OneCall(ask), agent=LeavesJobs)
    assert asked.count("Go on.") == 2
    assert asked.count("left") <= 2


class RaisesInEachStep:
    async def run(self, context: AgentContext) -> str:
        raise KeyError("a typo")


async def test_run_stops_when_the_agent_raises_in_the_steps_of_its_first_rollouts(tmp_path: Path) -> None:
    job = in_steps(tmp_path, 2, group_size=10)
    provider = DummyProvider(f"outcomes-{next(worlds)}")
    told = list[Event]()
    with pytest.raises(AgentBroken, match="KeyError: 'a typo'"):
        await run_job(
            job,
            base_dir=tmp_path,
            environ={},
            provider=provider,
            model=OneCall(),
            agent=RaisesInEachStep,
            observer=told.append,
        )
    raised = [event for event in told if isinstance(event, AgentFailed)]
    assert len(raised) >= 8, "each is told at once, and before any end is recorded"
    assert not [event for event in told if isinstance(event, RolloutSealed)]
    assert "KeyError: 'a typo'" in raised[0].traceback


async def test_sandboxes_of_a_run_that_an_error_ended_stay_for_a_minute(tmp_path: Path) -> None:
    kept: list[tuple[bool, float | None]] = []

    class Provider(DummyProvider):
        async def close(self, *, keep: bool = False, at_most: float | None = None) -> None:
            kept.append((keep, at_most))
            await super().close(keep=keep, at_most=at_most)

    provider = Provider(f"outcomes-{next(worlds)}")
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "provider": provider, "model": OneCall()}
    with pytest.raises(AgentBroken):
        await run_job(a_job(tmp_path, group_size=8), agent=RaisesInEachStep, **common)
    assert kept == [(True, STOPPED_SECONDS)]


async def test_resumed_run_stops_again_when_the_agent_still_raises(tmp_path: Path) -> None:
    """If fewer rollouts run at once than must raise, the first ones are sealed."""
    job = a_job(tmp_path, group_size=24, runners={"concurrency": 5})
    provider = DummyProvider(f"outcomes-{next(worlds)}")
    for _ in range(2):
        with pytest.raises(AgentBroken):
            await run_job(
                job, base_dir=tmp_path, environ={}, provider=provider, model=OneCall(), agent=RaisesInEachStep
            )


@pytest.mark.usefixtures("short_look")
async def test_run_in_shards_stops_when_the_agent_raises_in_each_of_its_first_rollouts(tmp_path: Path) -> None:
    job = a_job(tmp_path, tasks=2, group_size=6, runners={"replicas": 2})
    job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": str(uuid.uuid4())})})
    given: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "model": OneCall(), "agent": RaisesInEachStep}
    provider = DummyProvider(f"outcomes-{next(worlds)}")
    await run_job(job, provider=provider, shard=Shard(0, 2), **given)
    with pytest.raises(AgentBroken):
        await run_job(job, provider=provider, shard=Shard(1, 2), **given)


async def test_result_has_the_traceback_of_a_tool_that_raised(tmp_path: Path) -> None:
    ran = await run(a_job(tmp_path, agent={"tools": [f"{__name__}:bash", "finish"]}), tmp_path, OneCall())
    assert ran.outcomes == [("Completed", "Finished", 1.0)] * 2
    (traceback,) = ran.results[0]["toolTracebacks"].values()
    assert traceback.endswith("KeyError: 'output'")


async def test_handled_error_does_not_fail_the_attempt(tmp_path: Path) -> None:
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "model": OneCall()}
    summary = await run_job(
        a_job(tmp_path), provider=DummyProvider(f"outcomes-{next(worlds)}"), agent=Careful, **common
    )
    assert Ran(tmp_path, summary, []).outcomes == [("Completed", "Finished", 1.0)] * 2


async def test_a_rollout_whose_sandboxes_were_evicted_under_its_tool_calls_is_not_blamed(tmp_path: Path) -> None:
    ran = await run(a_job(tmp_path), tmp_path, **failing("run", {"0-0", "0-1"}, "Evicted"))
    assert ran.outcomes == [("Completed", "Finished", 1.0), ("Completed", "Finished", 1.0)]


async def test_preemption_uses_up_no_attempt(tmp_path: Path) -> None:
    job = a_job(tmp_path, attempts={"limit": 1, "backoffSeconds": 0})
    ran = await run(job, tmp_path, **failing("run", {"0-0", "0-1", "0-2"}, "Preempted"))
    assert ran.outcomes == [("Completed", "Finished", 1.0), ("Completed", "Finished", 1.0)]


async def test_a_sandbox_that_dies_once_under_a_tool_call_is_tried_again(tmp_path: Path) -> None:
    ran = await run(a_job(tmp_path), tmp_path, **failing("run", {"0-0"}, "SandboxLost"))
    assert ran.outcomes == [("Completed", "Finished", 1.0)] * 2
    assert ran.results[0]["attempt"] == 1


async def test_a_lost_grading_is_done_again_without_the_agent(tmp_path: Path) -> None:
    asked: list[int] = []

    async def count(request: ModelRequest) -> None:
        asked.append(request.member)

    ran = await run(a_job(tmp_path), tmp_path, OneCall(count), **failing("run", {"0-0.grading-1-0"}))
    assert ran.outcomes == [("Completed", "Finished", 1.0)] * 2
    assert asked.count(0) == 2, "its two turns were sampled once"


async def test_a_grading_that_is_lost_every_time_is_masked(tmp_path: Path) -> None:
    async def lose(operation: str, attempt: str, key: str | None) -> None:
        if "grading" in attempt and attempt.startswith("0-"):
            raise SandboxFailure("NodeLost", "injected")

    ran = await run(a_job(tmp_path), tmp_path, on_call=lose)
    assert ran.outcomes == [("VerifierFailed", "NodeLost", None), ("Completed", "Finished", 1.0)]


async def test_grading_survives_an_outage_that_is_shorter_than_the_backoff(tmp_path: Path) -> None:
    began: list[float] = []

    async def is_away(operation: str, attempt: str, key: str | None) -> None:
        if "grading" in attempt:
            began.append(time.monotonic())
            if began[-1] - began[0] < 0.3:
                raise SandboxFailure("NodeLost", "injected")

    job = a_job(tmp_path, group_size=1, attempts={"limit": 3, "backoffSeconds": 0.4})
    assert (await run(job, tmp_path, on_call=is_away)).outcomes == [("Completed", "Finished", 1.0)]


async def test_job_that_loses_too_much_is_aborted_with_the_reason(tmp_path: Path) -> None:
    async def lose(operation: str, attempt: str, key: str | None) -> None:
        if operation == "acquire" and int(attempt.split("-")[0]) % 2:
            raise SandboxFailure("Unschedulable", "no node fits")

    ran = await run(a_job(tmp_path, tasks=40), tmp_path, on_call=lose)
    assert ran.summary.aborted is not None
    assert "completion.maxInfraFailureFraction 0.2" in ran.summary.aborted
    assert 20 <= len(ran.results) < 80
    assert (tmp_path / ran.summary.folder / "abort.json").exists()
    again = await run(a_job(tmp_path, tasks=40), tmp_path)
    assert again.summary.aborted is not None, "a given up run is not gone on with by accident"


class Ageing(OneCall):
    """A policy that is updated five times during a rollout's first tool call."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.version = str(9 + 5 * request.turn)
        return await super().complete(request)


@pytest.mark.parametrize(
    ("model", "outcome", "stale"),
    [
        ({"maxPolicyLag": 4}, ("Cancelled", "StalePolicy", None), True),
        ({"maxPolicyLag": 4, "onStale": "Keep"}, ("Completed", "Finished", 1.0), True),
        ({"maxPolicyLag": 5}, ("Completed", "Finished", 1.0), False),
        ({}, ("Completed", "Finished", 1.0), False),
    ],
)
async def test_rollouts_of_a_policy_older_than_the_limit_are_marked_stale_or_cancelled(
    tmp_path: Path, model: dict[str, Any], outcome: tuple[str, str, float | None], stale: bool
) -> None:
    job = a_job(tmp_path, group_size=1, model={"function": "nobody:asks", **model})
    ran = await run(job, tmp_path, Ageing())
    assert ran.outcomes == [outcome]
    assert ran.results[0]["stale"] == stale
    if stale and outcome[0] == "Cancelled":
        assert "policy 9 and the newest is 14" in ran.results[0]["message"]


class OnePolicyAMember(OneCall):
    """Answers member 1 with a policy that is five versions newer than that of member 0, once `updated` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.updated = asyncio.Event()

    async def complete(self, request: ModelRequest) -> ModelReply:
        if request.member == 1:
            await self.updated.wait()
        self.version = str(9 + 5 * request.member)
        return await super().complete(request)


async def test_rollout_is_stale_when_the_newer_policy_worked_before_a_resume(tmp_path: Path) -> None:
    job = a_job(tmp_path, model={"function": "nobody:asks", "maxPolicyLag": 4})
    model, newer, stop = OnePolicyAMember(), asyncio.Event(), asyncio.Event()

    async def on_call(operation: str, attempt: str, key: str | None) -> None:
        if operation == "untar" and attempt.startswith("0-0.grading"):
            model.updated.set()
            await newer.wait()
            stop.set()
            await asyncio.sleep(3600)

    def observe(event: Event) -> None:
        if isinstance(event, RolloutSealed):
            newer.set()

    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "model": model}
    world = f"outcomes-{next(worlds)}"
    first = await run_job(job, provider=DummyProvider(world, on_call=on_call), observer=observe, stop=stop, **common)
    assert first.resumable
    second = await run_job(job, provider=DummyProvider(world), **common)
    assert [result["stale"] for result in Ran(tmp_path, second, []).results] == [True, False]


async def test_stragglers_are_cancelled_when_their_group_is_complete(tmp_path: Path) -> None:
    async def slow(request: ModelRequest) -> None:
        if request.member == 3:
            await asyncio.sleep(60)

    completion = {"minCompletedPerGroup": 3, "cancelStragglers": True}
    async with asyncio.timeout(30):
        ran = await run(a_job(tmp_path, group_size=4, completion=completion), tmp_path, OneCall(slow))
    assert ran.outcomes == [("Completed", "Finished", 1.0)] * 3 + [("Cancelled", "GroupComplete", None)]
    assert sum(isinstance(event, GroupFinished) for event in ran.events) == 1


async def test_stopped_run_resumes_without_repeating_a_turn(tmp_path: Path) -> None:
    asked: list[tuple[str, int, int]] = []
    stop = asyncio.Event()

    async def count(request: ModelRequest) -> None:
        asked.append((request.task, request.member, request.turn))
        if len(asked) == 9:
            stop.set()
        await asyncio.sleep(0.01)

    world = f"outcomes-{next(worlds)}"
    job = a_job(tmp_path, tasks=4, runners={"concurrency": 3})
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}}
    first = await run_job(job, provider=DummyProvider(world), model=OneCall(count), stop=stop, **common)
    assert first.resumable
    answered = len(asked)
    second = await run_job(job, provider=DummyProvider(world), model=OneCall(count), **common)
    assert second.completed
    assert second.outcomes["Completed"] == 8
    assert answered <= len(asked) <= 16 + 3, "at most the calls that were under way are made again"


class _Overtaken(DummyProvider):
    """A provider whose `reattach` first lets the earlier runner continue until `done`."""

    go: asyncio.Event
    done: Callable[[], bool]

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> DummyWorkspace:
        self.go.set()
        while not self.done():  # noqa: ASYNC110 what the other runner does cannot be awaited
            await asyncio.sleep(0.01)
        return await super().reattach(handle, spec=spec, fence=fence)


async def _take_over(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    hold_at: int,
    done: Callable[[World], bool],
    agent: Callable[[], Agent] | None = None,
    first: OnCall = nothing_happens,
    then: OnCall = nothing_happens,
) -> tuple[Ran, list[tuple[str, int]]]:
    """Run a job of one rollout that a second runner takes over while the first one still works.

    The first runner waits in its model call `hold_at` until the second one has read the journal for the first time, and
    then continues until `done`. `first` and `then` are called for the calls of the two runners.
    """
    world, job = f"outcomes-{next(worlds)}", a_job(folder, group_size=1)
    asked: list[tuple[str, int]] = []

    async def hold(request: ModelRequest) -> None:
        asked.append(("first", request.turn))
        if request.turn == hold_at:
            await second.go.wait()

    async def count(request: ModelRequest) -> None:
        asked.append(("second", request.turn))

    second = _Overtaken(world, on_call=then)
    second.go, second.done = asyncio.Event(), lambda: done(second.world)
    common: dict[str, Any] = {"base_dir": folder, "environ": {}, "agent": agent}
    earlier = asyncio.create_task(
        run_job(job, provider=DummyProvider(world, on_call=first), model=OneCall(hold), **common)
    )
    while ("first", hold_at) not in asked:  # noqa: ASYNC110 as above
        await asyncio.sleep(0.01)
    (folder / "other-machine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "other-machine"))  # where that machine locks the run
    summary = await run_job(job, provider=second, model=OneCall(count), **common)
    earlier.cancel()
    await asyncio.gather(earlier, return_exceptions=True)
    return Ran(folder, summary, []), asked


class Thinking(OneCall):
    """Does not give its second answer within the agent's time while `is_slow`."""

    is_slow = True

    async def complete(self, request: ModelRequest) -> ModelReply:
        if request.turn == 1 and self.is_slow:
            await asyncio.sleep(3600)
        return await super().complete(request)


@pytest.mark.parametrize("stopped_at", ["kill_all", "tar"])
async def test_agent_that_has_ended_does_not_continue_after_a_resume(tmp_path: Path, stopped_at: str) -> None:
    verifier = {"collect": ["collect"], "commands": ["grade"]}
    manifest = a_job(tmp_path, group_size=1).wire()
    manifest["spec"]["tasks"]["inline"] = [task(0, verifier=verifier, timeouts={"agentSeconds": 1})]
    job = RolloutJob.model_validate(manifest)
    model, stop, collected = Thinking(), asyncio.Event(), itertools.count()

    async def command(written: str | Sequence[str], files: Files) -> CommandResult:
        if written == "collect":
            next(collected)
        return ended()

    async def on_call(operation: str, attempt: str, key: str | None) -> None:
        if operation == stopped_at and "agent" in attempt:
            stop.set()
            await asyncio.sleep(3600)

    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "model": model}
    world = f"outcomes-{next(worlds)}"
    first = await run_job(job, provider=DummyProvider(world, command, on_call=on_call), stop=stop, **common)
    assert first.resumable
    model.is_slow = False
    second = await run_job(job, provider=DummyProvider(world, command), **common)
    assert Ran(tmp_path, second, []).outcomes == [("Completed", "AgentTimeout", 1.0)]
    assert next(collected) == 1


@pytest.mark.parametrize("mode", ["Shared", "Separate"])
async def test_failed_verdict_is_repeated_when_its_seal_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The policy must not get another attempt for a crash of its runner."""
    in_grading = mode == "Shared"

    async def lose(operation: str, attempt: str, key: str | None) -> None:
        if operation == "run" and key is not None and ("verifier-command" in key) == in_grading:
            raise SandboxFailure("SandboxLost", "injected")

    job = a_job(tmp_path, group_size=1, verifier={"mode": mode})
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "model": OneCall()}
    world = f"outcomes-{next(worlds)}"
    with monkeypatch.context() as without_seals:

        async def unwritten(*_: object) -> None:
            raise StorageError("injected")

        without_seals.setattr(Journal, "seal", unwritten)
        with pytest.raises(StorageError):
            await run_job(job, provider=DummyProvider(world, on_call=lose), **common)
    second = await run_job(job, provider=DummyProvider(world), **common)
    stop_reason = "Finished" if in_grading else "ResourceLimit"
    assert Ran(tmp_path, second, []).outcomes == [("Completed", stop_reason, 0.0)]


class RunsManyCommands:
    """Runs more commands than the executor can remember."""

    async def run(self, context: AgentContext) -> None:
        for _ in range(5):
            await context.run_command("count")


@pytest.mark.parametrize("mode", ["Shared", "Separate"])
async def test_agent_that_runs_more_commands_than_the_executor_remembers_is_graded(tmp_path: Path, mode: str) -> None:
    remembered: set[str] = set()

    async def remember(operation: str, attempt: str, key: str | None) -> None:
        if not attempt.endswith(".agent"):
            return
        if operation == "acknowledge":
            remembered.clear()
        elif key is not None and key not in remembered:
            if len(remembered) >= 5 and operation != "run":  # a command that is refused has a result
                raise SandboxFailure("TooLarge", "no more keys fit")
            remembered.add(key)

    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "agent": RunsManyCommands, "model": OneCall()}
    provider = DummyProvider(f"outcomes-{next(worlds)}", on_call=remember)
    job = a_job(tmp_path, group_size=1, verifier={"mode": mode})
    ran = Ran(tmp_path, await run_job(job, provider=provider, **common), [])
    assert ran.outcomes == [("Completed", "Finished", 1.0)]


class RunsACommandFirst:
    """An agent whose requests all contain the result of its command."""

    async def run(self, context: AgentContext) -> str:
        result = await context.run_command("count")
        for _ in range(2 * ACKNOWLEDGE_EVERY):
            await context.call_model([{"role": "user", "content": result.stdout.decode()}])
        return result.stdout.decode()


async def test_command_outside_of_turns_is_not_repeated_by_a_resume_many_turns_later(tmp_path: Path) -> None:
    job, stop, counted = a_job(tmp_path, group_size=1), asyncio.Event(), itertools.count(1)

    async def count(command: str | Sequence[str], files: Files) -> CommandResult:
        return ended(stdout=b"%d" % next(counted)) if command == "count" else ended()

    def observe(event: Event) -> None:
        if isinstance(event, TurnEnded) and event.turn == ACKNOWLEDGE_EVERY + 1:
            stop.set()

    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "model": OneCall(), "agent": RunsACommandFirst}
    world = f"outcomes-{next(worlds)}"
    first = await run_job(job, provider=DummyProvider(world, count), observer=observe, stop=stop, **common)
    assert first.resumable
    second = await run_job(job, provider=DummyProvider(world, count), **common)
    [result] = Ran(tmp_path, second, []).results
    assert (result["attempt"], result.get("failedAttempts", []), result["message"]) == (0, [], "1")
    reader = await open_run(Store.open(str(tmp_path), {}), job.metadata.name)
    commands = [record for record in await reader.records(0) if isinstance(record, CommandRecord)]
    assert [(record.number, record.command, record.result) for record in commands] == [(1, "count", "1\n[exit code 0]")]
    assert [call.result for step in steps(commands) for call in step.calls] == ["1\n[exit code 0]"]


async def test_takeover_keeps_an_attempt_that_its_older_runner_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never_grades(operation: str, attempt: str, key: str | None) -> None:
        if operation == "acquire" and list(tmp_path.glob("*/attempts/0/0/1-artifacts.tar.zst")):
            await asyncio.sleep(3600)

    ran, asked = await _take_over(
        tmp_path, monkeypatch, hold_at=1, done=lambda world: "0-0.agent" not in world.workspaces, first=never_grades
    )
    assert ran.outcomes == [("Completed", "Finished", 1.0)]
    assert ran.results[0]["attempt"] == 0, "the finished work was graded"
    assert asked == [("first", 0), ("first", 1)], "no turn was sampled again"


class _LostWhileSealed(DummyProvider):
    """Loses the workspace, and in one of its `reattach` calls waits until the older runner has sealed the rollout."""

    wait_at = 1

    async def reattach(self, handle: Mapping[str, Any], *, spec: WorkspaceSpec, fence: Fence) -> DummyWorkspace:
        self.wait_at -= 1
        if self.wait_at == 0:
            self.go.set()
            while not self.is_sealed():  # noqa: ASYNC110 another runner
                await asyncio.sleep(0.01)
        raise SandboxFailure("SandboxLost", "released with the seal")

    go: asyncio.Event
    is_sealed: Callable[[], bool]


@pytest.mark.parametrize("wait_at", [1, 2], ids=["before the epoch is closed", "after the epoch is closed"])
async def test_takeover_of_a_rollout_that_its_older_runner_seals_meanwhile_returns_that_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_at: int
) -> None:
    world, job, go = f"outcomes-{next(worlds)}", a_job(tmp_path, group_size=1), asyncio.Event()
    write, sealing = Journal._write_once, asyncio.Event()

    async def held(journal: Journal, key: str, data: bytes) -> ObjectDigest:
        if journal.epoch == 1:
            sealing.set()
            await go.wait()
        return await write(journal, key, data)

    monkeypatch.setattr(Journal, "_write_once", held)
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}}
    earlier = asyncio.create_task(run_job(job, provider=DummyProvider(world), model=OneCall(), **common))
    await sealing.wait()  # it has checked that nobody took the rollout over
    (tmp_path / "other-machine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other-machine"))  # where that machine locks the run
    second, asked = _LostWhileSealed(world), itertools.count()

    async def count(request: ModelRequest) -> None:
        next(asked)

    second.wait_at, second.go = wait_at, go
    second.is_sealed = lambda: (
        bool(list(tmp_path.glob("*/seals/0.json"))) and not list(tmp_path.glob("*/attempts/0/0/1-0.jsonl.zst"))
    )
    ran = Ran(tmp_path, await run_job(job, provider=second, model=OneCall(count), **common), [])
    await asyncio.wait_for(earlier, 60)
    assert ran.outcomes == [("Completed", "Finished", 1.0)]
    assert next(asked) == 0, "no turn was sampled again"


class _Checkpointing:
    """Keeps a checkpoint after its second model call, then writes a file."""

    async def run(self, context: AgentContext) -> str:
        for prompt in ("one", "two"):
            await context.call_model([{"role": "user", "content": prompt}])
        await context.checkpoint()
        await context.call_model([{"role": "user", "content": "three"}])
        call = ToolCall(id="c", name="bash", arguments='{"command": "true"}')
        await context.call_tools([call])
        return "done"


@pytest.mark.usefixtures("short_look")
@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("services", {"services": [{"name": "db", "command": ["serve"]}]}),
        ("an environment", {"environment": {"id": "FrozenLake"}, "verifier": None}),
    ],
)
async def test_checkpoints_are_refused_where_something_would_not_go_back(
    tmp_path: Path, what: str, fields: dict[str, Any]
) -> None:
    """Services would be missing, and an episode would contain the abandoned actions, so the reward would be wrong."""
    job = a_job(tmp_path, group_size=1)
    assert job.spec.tasks.inline is not None
    job.spec.tasks.inline[:] = [Task.model_validate(task(0, **fields))]
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "agent": _Checkpointing, "model": OneCall()}
    ran = Ran(tmp_path, await run_job(job, provider=DummyProvider(f"outcomes-{next(worlds)}"), **common), [])
    assert [stop for _, stop, _ in ran.outcomes] == ["AgentError"]
    assert f"checkpoints are not possible in a task with {what}" in ran.results[0]["message"]


async def test_agents_time_does_not_end_during_a_checkpoint(tmp_path: Path) -> None:
    """The policy could leave thousands of processes to end, and so get another attempt."""

    async def end_slowly(operation: str, attempt: str, key: str | None) -> None:
        if operation == "freeze":
            await let_pass(90)

    job = a_job(tmp_path, group_size=1, agent_seconds=60)
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "agent": _Checkpointing, "model": OneCall()}
    provider = DummyProvider(f"outcomes-{next(worlds)}", on_call=end_slowly)
    with passing_time() as let_pass:
        ran = Ran(tmp_path, await run_job(job, provider=provider, **common), [])
    assert ran.outcomes == [("Completed", "Finished", 1.0)]


async def test_time_in_which_the_sandbox_pauses_a_command_is_not_the_agents(tmp_path: Path) -> None:
    """The memory of others was the cause, and reward 0 would be the result."""
    job = a_job(tmp_path, group_size=1, agent_seconds=60)
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "agent": _Checkpointing, "model": OneCall()}
    with passing_time() as let_pass:
        provider = DummyProvider(f"outcomes-{next(worlds)}", pause=lambda: let_pass(90))
        ran = Ran(tmp_path, await run_job(job, provider=provider, **common), [])
    assert ran.outcomes == [("Completed", "Finished", 1.0)]


CALL = ToolCall(id="c", name="bash", arguments='{"command": "true"}')
WORKS: dict[str, Callable[[AgentContext], Awaitable[object]]] = {
    "tool": lambda context: context.call_tools([CALL]),
    "command": lambda context: context.run_command("true"),
    "files": lambda context: context.put_files([TaskFile(path="own.txt", content="own")]),
}


@pytest.mark.parametrize("work", WORKS)
async def test_time_in_which_the_sandbox_stands_still_is_not_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    class Working:
        async def run(self, context: AgentContext) -> str:
            await context.call_model([{"role": "user", "content": "one"}])
            started.append(time.monotonic())
            await WORKS[work](context)
            return "done"

    @contextlib.contextmanager
    def silence(workspace: DummyWorkspace, pausing: Callable[[bool], None]) -> Iterator[None]:
        pausing(True)
        yield
        pausing(False)

    async def stand_still(operation: str, attempt: str, key: str | None) -> None:
        if started and "agent" in attempt and operation in ("run", "write"):
            started.clear()
            await let_pass(50)

    async def require_live(workspace: DummyWorkspace) -> None: ...

    started = list[float]()
    monkeypatch.setattr(DummyWorkspace, "silence", silence, raising=False)
    monkeypatch.setattr(DummyWorkspace, "require_live", require_live, raising=False)
    with passing_time() as let_pass:
        provider = DummyProvider(f"outcomes-{next(worlds)}", on_call=stand_still)
        common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}, "agent": Working, "model": OneCall()}
        job = a_job(tmp_path, group_size=1, agent_seconds=40)
        ran = Ran(tmp_path, await run_job(job, provider=provider, **common), [])
    assert not started, "the sandbox stood still"
    assert ran.outcomes == [("Completed", "Finished", 1.0)]


async def test_takeover_continues_in_the_workspace_of_a_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[str, str]] = []

    async def first(operation: str, attempt: str, key: str | None) -> None:
        if operation == "run":
            used.append(("first", attempt))
            await asyncio.sleep(3600)

    async def then(operation: str, attempt: str, key: str | None) -> None:
        if operation == "run" and "grading" not in attempt:
            used.append(("second", attempt))

    ran, asked = await _take_over(
        tmp_path, monkeypatch, hold_at=1, done=lambda world: bool(used), agent=_Checkpointing, first=first, then=then
    )
    assert ran.outcomes == [("Completed", "Finished", 1.0)]
    assert used == [("first", "0-0.agent.1"), ("second", "0-0.agent.1")]
    assert ("second", 2) not in asked, "the first runner's answer counts"


async def test_a_trainers_session_outlives_its_process_and_changes_of_the_policy(tmp_path: Path) -> None:
    job = stream_job(tmp_path)
    common: dict[str, Any] = {"base_dir": tmp_path}
    world = f"outcomes-{next(worlds)}"

    async with RolloutSession(job, provider=DummyProvider(world), model=OneCall(version="1"), **common) as session:
        for number in range(2):
            await session.submit(Task.model_validate(task(number)), label="step-1")
        got = [await anext(session) for _ in range(2)]
        assert {group.label for group in got} == {"step-1"}
        await session.use_model(OneCall(version="2"))
        await session.submit(Task.model_validate(task(2)), label="step-2")
        third = await anext(session)
        assert [result.policy_versions for result in third.results] == [["2"], ["2"]]
        await session.submit(Task.model_validate(task(3)), label="step-2")

    async with RolloutSession(job, provider=DummyProvider(world), model=OneCall(version="3"), **common) as session:
        assert await session.submit(Task.model_validate(task(4)), label="step-3") == 4
        await session.close()
        groups = {group.sequence: group async for group in session}
    assert sorted(groups) == [0, 1, 2, 3, 4], "what was finished before comes again, what was not goes on"
    assert groups[3].label == "step-2"
    feed = sorted(tmp_path.glob("*/feed/0/*.json"), key=lambda path: int(path.stem))
    fed = [json.loads(path.read_text())[0]["group"] for path in feed]
    assert sorted(fed) == [0, 1, 2, 3, 4], "each group stands in the feed once"


def stream_job(folder: Path) -> RolloutJob:
    manifest = a_job(folder).model_dump(mode="json", by_alias=True, exclude_none=True)
    manifest["spec"]["tasks"] = {"stream": {"maxInFlight": 2}}
    return RolloutJob.model_validate(manifest)


class Killed(Exception):
    """Ends a run between two of its steps, as SIGKILL does."""


async def test_cancel_after_a_resume_seals_the_latest_attempt_and_frees_its_workspace(tmp_path: Path) -> None:
    world = f"outcomes-{next(worlds)}"
    completion = {"minCompletedPerGroup": 1, "cancelStragglers": True}
    job = a_job(tmp_path, completion=completion)
    common: dict[str, Any] = {"base_dir": tmp_path, "environ": {}}
    is_waiting = asyncio.Event()

    async def slow(request: ModelRequest) -> None:
        if request.member == 1:
            is_waiting.set()
            await asyncio.sleep(3600)
        await is_waiting.wait()

    def die(event: Event) -> None:
        if isinstance(event, RolloutSealed):
            raise Killed

    lost = failing("acquire", {"1-0"})
    first = run_job(job, provider=DummyProvider(world, **lost), model=OneCall(slow), observer=die, **common)
    with pytest.raises(Killed):
        await first
    assert list(DummyProvider.worlds[world].workspaces) == ["1-1.agent"]

    left: list[str] = []

    class Provider(DummyProvider):
        async def close(self, *, keep: bool = False, at_most: float | None = None) -> None:
            left.extend(self.world.workspaces)
            await super().close(keep=keep)

    summary = await run_job(job, provider=Provider(world), model=OneCall(slow), **common)
    result = Ran(tmp_path, summary, []).results[1]
    assert (result["outcome"], result["attempt"], len(result["failedAttempts"])) == ("Cancelled", 1, 1)
    assert left == []
