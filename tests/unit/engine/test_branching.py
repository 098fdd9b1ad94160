"""What a branch copies from its source: everything that the model saw, and nothing that would be trained twice."""

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_rollouts.plugins import Refuse, RolloutInfo
from agent_runtime.engine.attempt.agent_clock import AgentClock
from agent_runtime.engine.attempt.assignment import Oversight
from agent_runtime.engine.attempt.attempt_log import AttemptLog
from agent_runtime.engine.attempt.results import summarise
from agent_runtime.engine.attempt.snapshots import WorkspaceStates
from agent_runtime.engine.attempt.tool_calls import MOST_CALLS, CallsOfTurn, ToolRunner
from agent_runtime.engine.branching.sources import (
    Origin,
    copied,
    last_turn,
    latest_snapshot,
    same_tokens,
    why_no_snapshot,
    with_its_builds,
)
from agent_runtime.engine.branching.state import Branching, Rerun
from agent_runtime.engine.scheduling.completion_rules import versions_of
from agent_runtime.models.base import ToolCall
from agent_runtime.models.token_history import TokenHistory
from agent_runtime.plugins.plugins import Plugins, RolloutPlugins
from agent_runtime.recording import atif
from agent_runtime.recording.branches import token_branches, token_forks
from agent_runtime.sandboxes.base import SandboxFailure, Workspace, WorkspaceSpec
from agent_runtime.tools.base import ToolContext, ToolResult
from rollout_api.model import ModelSpec
from rollout_api.records import (
    BranchRecord,
    IntentRecord,
    Layer,
    Observation,
    ObservationsRecord,
    PolicySpan,
    Record,
    ResponseRecord,
    SnapshotRecord,
    Usage,
)
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task, Tasks
from tests.support.records import small_job
from tests.unit.engine.test_turns import MemoryJournal


def test_dockerfiles_of_a_branch_have_what_the_source_gave_them() -> None:
    dockerfile = {"text": "FROM debian:12\nARG A\nARG B\n", "args": {"B": "own"}}
    verifier = {"commands": ["true"], "dockerfile": dockerfile}
    services = [{"name": "db", "dockerfile": dockerfile}]
    task = Task.model_validate(
        {"name": "t", "prompt": "p", "dockerfile": dockerfile, "verifier": verifier, "services": services}
    )
    given = {"bases": {"debian:12": "mirror/debian"}, "args": {"A": "1", "B": "2"}, "secrets": {"key": "KEY"}}
    found = with_its_builds(task, Tasks.model_validate({"from": {"uri": "tasks"}, "dockerfiles": given}))
    assert found.verifier is not None
    for built in (found.dockerfile, found.verifier.dockerfile, found.services[0].dockerfile):
        assert built is not None
        assert (built.bases, built.args) == ({"debian:12": "mirror/debian"}, {"A": "1", "B": "own"})
    assert with_its_builds(task, Tasks.model_validate({"from": {"uri": "tasks"}})) == task


token_ids = st.lists(st.integers(0, 9), max_size=4)


@st.composite
def journals(draw: st.DrawFn) -> list[Record]:
    """Turns whose prompts extend the previous conversation or not, each with a tool call's result."""
    records: list[Record] = []
    history = TokenHistory()
    for turn in range(draw(st.integers(1, 5))):
        cut = draw(st.booleans())
        prompt = (history.ids[: draw(st.integers(0, len(history.ids)))] if cut else history.ids) + draw(token_ids)
        keep, new = history.split(prompt)
        sampled = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        response = ResponseRecord(
            turn=turn,
            time=turn,
            seconds=1,
            message={"role": "assistant", "content": f"answer {turn}", "tool_calls": [call]},
            finish_reason="tool_calls",
            usage=Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=3, reasoning_tokens=1),
            prompt_keep=keep,
            prompt_token_ids=new,
            completion_token_ids=sampled,
            logprobs=[-1.0] * len(sampled),
            policy_spans=[PolicySpan(tokens=len(sampled), version=str(turn))],
        )
        history.add(response, 2)
        result = Observation(call_id=f"c{turn}", tool="bash", content=f"result {turn}", seconds=1)
        intent = IntentRecord(turn=turn, time=turn, keep=0, messages=[{"role": "user", "content": f"ask {turn}"}])
        records += [intent, response, ObservationsRecord(turn=turn, time=turn, results=[result])]
    return records


def branched(records: Sequence[Record], turn: int) -> list[Record]:
    """Return the journal of a branch that repeats its source's actions after that turn."""
    own = [record for record in records if record.turn > turn]  # type: ignore[union-attr]
    where = BranchRecord(time=0, job="s3://bucket/run", index=0, attempt=0, turn=turn)
    return [where, *copied(records, turn, keeps_ids=True), *own]


@given(journals(), st.integers(0, 4))
def test_a_branch_trains_on_its_own_tokens_and_sees_all_that_came_before(records: list[Record], turn: int) -> None:
    whole = token_branches(records)
    found = token_branches(branched(records, turn))
    expected = []
    for sample in whole:
        own = [version is not None and int(version) > turn for version in sample.policy_versions]
        if any(own):
            expected.append((sample.token_ids, [int(mine) for mine in own]))
    assert [(sample.token_ids, sample.mask) for sample in found] == expected
    assert all(sample.logprobs is not None for sample in found)


@given(journals(), st.integers(0, 4))
def test_copied_turns_count_only_for_their_source(records: list[Record], turn: int) -> None:
    own = [record for record in records if isinstance(record, ResponseRecord) and record.turn > turn]
    fields = summarise(branched(records, turn), "Tokens")
    assert (fields["turns"], fields["tool_calls"]) == (len(own), len(own))
    count = len(own)
    assert fields["usage"] == Usage(
        prompt_tokens=10 * count, completion_tokens=2 * count, cached_tokens=3 * count, reasoning_tokens=count
    )
    assert fields["branched_from"].turn == turn
    assert fields["token_forks"] == token_forks(records) - token_forks(copied(records, turn, keeps_ids=True))
    # A policy that made only copied tokens makes no rollout stale.
    assert versions_of(branched(records, turn)) == [record.turn for record in own]


@given(journals(), st.integers(0, 4))
def test_an_atif_trajectory_says_which_steps_were_copied(records: list[Record], turn: int) -> None:
    job = small_job()
    written = atif.trajectory(job, "run/0", branched(records, turn))
    assert written is not None
    answers = [step for step in written["steps"] if step["source"] == "agent"]
    for number, step in enumerate(answers):
        assert step.get("is_copied_context", False) is (number <= turn)
        assert ("metrics" in step) is (number > turn)
    total = sum(step["metrics"]["prompt_tokens"] for step in answers if "metrics" in step)
    assert written["final_metrics"]["total_prompt_tokens"] == total


def test_branch_of_another_model_gets_no_token_ids() -> None:
    response = ResponseRecord(
        turn=0,
        time=0,
        seconds=0,
        message={},
        finish_reason="stop",
        prompt_token_ids=[1],
        completion_token_ids=[2],
        logprobs=[-1.0],
    )
    (record,) = copied([response], 0, keeps_ids=False)
    assert isinstance(record, ResponseRecord)
    assert (record.prompt_token_ids, record.completion_token_ids, record.logprobs) == (None, None, None)
    one, two = (ModelSpec.model_validate({"endpoint": {"baseURL": "http://a/v1", "name": name}}) for name in ("a", "b"))
    assert same_tokens(one, one)
    assert not same_tokens(one, two)
    assert not same_tokens(None, one)


def observations(turn: int, **fields: Any) -> ObservationsRecord:
    return ObservationsRecord(
        turn=turn, time=0, results=[Observation(call_id=f"c{turn}", tool="t", content="", **fields)]
    )


def intent(turn: int) -> IntentRecord:
    return IntentRecord(turn=turn, time=0, keep=0, messages=[])


@pytest.mark.parametrize(
    ("records", "last"),
    [
        ([], -1),
        ([intent(0)], -1),
        ([intent(0), observations(0)], 0),
        ([intent(0), observations(0), intent(1)], 0),
        ([intent(0), intent(1)], 0),  # turn 0 called no tool
        ([intent(0), observations(0), intent(1), observations(1, stop=True)], 0),
        ([intent(0), observations(0), intent(1), observations(1), observations(1, stop=True)], 0),
    ],
)
def test_a_turn_can_be_branched_once_its_results_are_recorded_and_it_ended_nothing(
    records: list[Record], last: int
) -> None:
    assert last_turn(records) == last


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        (0, (None, 0)),  # the snapshot has the results of calls that ran after a sub-agent's turn 1
        (1, (0, 1)),
        (2, (0, 1)),
        (3, (3, 4)),
    ],
)
def test_a_branch_begins_with_a_snapshot_that_includes_no_later_calls(turn: int, found: tuple[int | None, int]) -> None:
    layers = [Layer(digest="0" * 64, bytes=1)]
    taken = {number: SnapshotRecord(turn=number, time=0, layers=layers) for number in (0, 3)}
    records: list[Record] = [
        *(intent(0), intent(1)),
        *(observations(0), taken[0], intent(2)),
        *(observations(1), observations(2), intent(3)),
        *(observations(3), taken[3], intent(4)),
    ]
    snapshot, results = latest_snapshot(records, turn)
    assert (snapshot and snapshot.turn, results) == found


def test_reason_of_a_missing_snapshot_is_that_of_its_failure() -> None:
    failed = SnapshotRecord(turn=1, time=0, message="folders nested too deep")
    assert why_no_snapshot([intent(0), failed], 0) == "there is no snapshot of turn 0"
    assert why_no_snapshot([intent(1), failed], 1) == "the snapshot of turn 1 failed: folders nested too deep"


TASK = Task(name="t", prompt="p")
WORKSPACE = cast(Workspace, SimpleNamespace(working_dir="/w"))


async def test_branch_with_services_does_not_start_when_its_snapshot_was_deleted() -> None:
    """Its setup and calls would run without the services."""
    task = Task.model_validate({"name": "t", "prompt": "p", "services": [{"name": "db", "command": ["serve"]}]})
    origin = Origin(
        job="/out/run",
        index=0,
        attempt=0,
        turn=2,
        strict=False,
        task=task,
        snapshot=None,
        snapshot_results=0,
        layers_uri="/out",
        prefix=[],
    )
    branches = Branching(origin, small_job(), cast(Any, None), {}, cast(Any, None))
    with pytest.raises(SandboxFailure, match="the snapshot of turn 2 was deleted; a task with services can only be"):
        await branches.apply_to(WORKSPACE, WorkspaceSpec(group="g", working_dir="/w"))


class Bash:
    """Returns its arguments, or what the test sets, and records its calls."""

    name = "bash"
    description = "runs"
    parameters: Mapping[str, Any] = {"type": "object"}
    runs_in: ClassVar[Literal["Sandbox", "Runner"]] = "Sandbox"
    idempotent: ClassVar[bool] = True

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def execute(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        self.ran.append(arguments["command"])
        return ToolResult(arguments["command"])


async def run_again(calls: Sequence[ToolCall], results: Sequence[Observation], bash: Bash) -> list[str]:
    rerun = Rerun(TASK, WORKSPACE, 0, AgentClock(60))
    record = ObservationsRecord(turn=4, time=0, results=list(results))
    await rerun.run(record, calls, {"bash": bash})
    return rerun.differences


def bash_call(command: str, call_id: str = "c") -> ToolCall:
    return ToolCall(call_id, "bash", json.dumps({"command": command}))


def result_of(content: str, seconds: float = 1, **fields: Any) -> Observation:
    return Observation(call_id="c", tool="bash", content=content, seconds=seconds, **fields)


async def test_rerun_repeats_the_calls_that_ran_as_they_ran() -> None:
    class Guard:
        def filter_tool_call(self, rollout: RolloutInfo, call: ToolCall) -> Refuse | ToolCall | None:
            if "rm" in call.arguments:
                return Refuse("no deletion")
            return bash_call("safer") if "risky" in call.arguments else None

    commands = ["rm -f keep.txt", "risky", *(f"echo {number}" for number in range(MOST_CALLS))]
    calls, bash = [bash_call(command) for command in commands], Bash()
    plugins = Plugins.open([], [Guard()])
    oversight = Oversight(plugins=RolloutPlugins(plugins, RolloutInfo(0, 0, 0, 0, 0, TASK), "run"))
    log, states = AttemptLog(MemoryJournal()), cast(WorkspaceStates, SimpleNamespace(workspace=WORKSPACE))
    runner = ToolRunner(0, states, log, AgentClock(60), oversight)
    results = await runner.run(CallsOfTurn(4, calls, {"bash": bash}, TASK, "5:", 0, interrupted=False), [])
    plugins.close()
    ran, bash.ran = bash.ran, []
    assert ran == ["safer", *commands[2:MOST_CALLS]]
    assert await run_again(calls, results, bash) == []
    assert bash.ran == ran


async def test_rerun_compares_two_calls_of_one_answer_with_the_same_id() -> None:
    calls = [bash_call("one"), bash_call("two")]
    assert await run_again(calls, [result_of("one"), result_of("two")], Bash()) == []


async def test_rerun_difference_names_turn_and_call_and_shows_both_sides() -> None:
    calls = [bash_call("1"), bash_call("x" * 999)]
    (line,) = await run_again(calls, [result_of("1"), result_of("2")], Bash())
    assert line == f"turn 4, bash (c): recorded '2', now '{'x' * 200}…'"


def manifest(branch: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    body = {
        "tasks": {"branch": branch},
        "model": {"endpoint": {"baseURL": "http://a/v1", "name": "m"}},
        "output": {"uri": "out"},
    }
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "fix"},
        "spec": body | spec,
    }


ENTRY = {"job": "s3://bucket/run-01234567", "index": 0, "turn": 1, "count": 4}


def test_the_count_of_a_branch_is_the_size_of_its_group() -> None:
    assert RolloutJob.model_validate(manifest([ENTRY])).spec.group_size == 4
    # The API server fills in groupSize 1 if it is missing.
    assert RolloutJob.model_validate(manifest([ENTRY], groupSize=1)).spec.group_size == 4


@pytest.mark.parametrize(
    ("branch", "spec", "message"),
    [
        ([ENTRY], {"groupSize": 3}, "groupSize is 3, and count of tasks.branch is 4; leave groupSize out"),
        ([ENTRY, ENTRY], {}, "is branched twice; raise its count"),
        ([ENTRY, ENTRY | {"turn": 2, "count": 2}], {}, "count is 2 and 4, and all groups of a job have the same size"),
        (
            [ENTRY],
            {"agent": {"type": "Command", "command": ["a"]}},
            "agent.type Command cannot be used with tasks.branch",
        ),
    ],
)
def test_branches_that_do_not_fit_are_refused(branch: list[dict[str, Any]], spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutJob.model_validate(manifest(branch, **spec))
