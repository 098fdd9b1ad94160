"""Other programs read these trajectories, so they must be exact ATIF 1.7 whatever the model wrote."""

import json
from typing import Any, Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, model_validator

from agent_runtime.recording.atif import trajectory
from rollout_api.nesting import DEEPEST
from rollout_api.records import (
    IntentRecord,
    Message,
    Observation,
    ObservationsRecord,
    PolicySpan,
    Record,
    ResponseRecord,
    Usage,
)
from tests.support.records import small_job
from tests.unit.recording.strategies import json_values, messages, records, texts

Extra = dict[str, JsonValue] | None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class AtifAgent(Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, JsonValue]] | None = None
    extra: Extra = None


class AtifToolCall(Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, JsonValue]
    extra: Extra = None


class AtifResult(Strict):
    source_call_id: str | None = None
    content: str | None = None
    extra: Extra = None


class AtifObservation(Strict):
    results: list[AtifResult]


class AtifMetrics(Strict):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Extra = None


class AtifStep(Strict):
    step_id: int = Field(ge=1)
    timestamp: AwareDatetime | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    message: str
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = Field(default=None, ge=0)
    extra: Extra = None

    @model_validator(mode="after")
    def _only_agents_act(self) -> Self:
        acts = (self.model_name, self.reasoning_content, self.tool_calls, self.metrics, self.llm_call_count)
        if self.source != "agent" and any(field is not None for field in acts):
            raise ValueError("only agent steps have these")
        if self.llm_call_count == 0 and (self.metrics or self.reasoning_content):
            raise ValueError("no model was called, so there are no metrics and no reasoning")
        return self

    @model_validator(mode="after")
    def _results_name_their_call(self) -> Self:
        calls = {call.tool_call_id for call in self.tool_calls or []}
        for result in self.observation.results if self.observation else []:
            if result.source_call_id is not None and result.source_call_id not in calls:
                raise ValueError(f"{result.source_call_id} is no call of this step")
        return self


class AtifFinalMetrics(Strict):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = Field(default=None, ge=0)
    extra: Extra = None


class AtifTrajectory(Strict):
    schema_version: Literal["ATIF-v1.7"]
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    steps: list[AtifStep] = Field(min_length=1)
    notes: str | None = None
    final_metrics: AtifFinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: Extra = None

    @model_validator(mode="after")
    def _steps_count_from_one(self) -> Self:
        if [step.step_id for step in self.steps] != list(range(1, len(self.steps) + 1)):
            raise ValueError("step_id is not 1, 2, 3, …")
        return self


JOB = small_job()


def checked(written: list[Record]) -> AtifTrajectory | None:
    found = trajectory(JOB, "fix-0/0", written)
    return None if found is None else AtifTrajectory.model_validate_json(json.dumps(found, allow_nan=False))


tool_calls = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.none() | texts, "arguments": st.none() | texts | json_values.map(json.dumps)}
            ),
        },
        optional={"id": st.none() | texts},
    ),
    max_size=3,
)
contents = st.none() | texts | st.lists(st.fixed_dictionaries({"type": texts}, optional={"text": texts}), max_size=2)


@st.composite
def strange_turns(draw: st.DrawFn) -> list[Record]:
    """Turns from a server with unusual answers and an agent that rewrites its history."""
    written: list[Record] = []
    for turn in range(draw(st.integers(1, 4))):
        message: Message = {"role": "assistant", "content": draw(contents), "tool_calls": draw(tool_calls)}
        results = [
            Observation(call_id=draw(texts), tool="t", content=draw(texts)) for _ in range(draw(st.integers(0, 2)))
        ]
        written += [
            IntentRecord(
                turn=turn,
                time=turn,
                keep=draw(st.integers(0, 2 * turn)),
                messages=draw(st.lists(messages, max_size=3)),
                branch=draw(st.integers(0, 2)),
            ),
            ResponseRecord(turn=turn, time=turn, seconds=0, message=message, finish_reason="stop", model="m"),
            ObservationsRecord(turn=turn, time=turn, results=results),
        ]
    return written[: draw(st.integers(1, len(written)))]


@given(strange_turns())
def test_trajectory_of_any_server_and_agent_is_valid(written: list[Record]) -> None:
    found = checked(written)
    answers = sum(isinstance(record, ResponseRecord) for record in written)
    assert sum(step.llm_call_count == 1 for step in (found.steps if found else [])) == answers


@given(st.lists(records, max_size=6))
def test_arbitrary_records_give_a_valid_trajectory_or_none(written: list[Record]) -> None:
    checked(written)


def test_no_model_call_gives_no_trajectory() -> None:
    assert checked([]) is None


BASH = [{"type": "function", "function": {"name": "bash"}}]


def call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def answer(turn: int, **fields: Any) -> ResponseRecord:
    return ResponseRecord(
        turn=turn,
        time=1_700_000_000 + turn,
        seconds=1,
        message={"role": "assistant", "content": None} | fields.pop("message", {}),
        finish_reason="tool_calls",
        model="qwen",
        usage=Usage(prompt_tokens=10, completion_tokens=2),
        **fields,
    )


@pytest.fixture
def conversation() -> list[Record]:
    first: list[Message] = [{"role": "system", "content": "be good"}, {"role": "user", "content": "fix it"}]
    reply = {"tool_calls": [call("c1", '{"command": "ls"}'), call("c2", "{not json")], "reasoning_content": "hm"}
    results = [
        Observation(call_id="c1", tool="bash", content="a.py", seconds=0.5, data={"exitCode": 0}),
        Observation(call_id="c2", tool="bash", content="bad arguments", error=True),
    ]
    answered: list[Message] = [
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "c2", "content": "bad arguments"},
    ]
    return [
        IntentRecord(turn=0, time=1_700_000_000, keep=0, messages=first, tools=BASH),
        answer(
            0,
            message=reply,
            completion_token_ids=[7, 8],
            logprobs=[-0.1, -0.2],
            policy_spans=[PolicySpan(tokens=2, version="3")],
        ),
        ObservationsRecord(turn=0, time=1_700_000_000, results=results),
        IntentRecord(turn=1, time=1_700_000_001, keep=3, messages=answered),
        answer(1, message={"content": "done"}),
    ]


def test_one_step_a_model_call_with_its_tool_calls_and_their_results(conversation: list[Record]) -> None:
    found = checked(conversation)
    assert found is not None
    assert [step.source for step in found.steps] == ["system", "user", "agent", "agent"]
    step = found.steps[2]
    assert step.reasoning_content == "hm"
    assert [one.arguments for one in step.tool_calls or []] == [{"command": "ls"}, {}]
    assert (step.tool_calls or [])[1].extra == {"written": "{not json"}
    assert [result.source_call_id for result in (step.observation or AtifObservation(results=[])).results] == [
        "c1",
        "c2",
    ]
    assert step.metrics is not None
    assert (step.metrics.completion_token_ids, step.metrics.logprobs) == ([7, 8], [-0.1, -0.2])
    assert step.extra is not None
    assert step.extra["policy_spans"] == [{"tokens": 2, "version": "3"}]
    assert found.agent.tool_definitions == BASH
    assert found.final_metrics == AtifFinalMetrics(
        total_prompt_tokens=20, total_completion_tokens=4, total_cached_tokens=0, total_steps=4
    )


@pytest.mark.parametrize("depth", [DEEPEST, DEEPEST + 1, 985, 100_000])
def test_trajectory_is_valid_when_arguments_are_nested_deeply(conversation: list[Record], depth: int) -> None:
    written = '{"a":' * depth + "1" + "}" * depth
    found = checked([*conversation[:-1], answer(1, message={"tool_calls": [call("c3", written)]})])
    assert found is not None
    (last,) = found.steps[-1].tool_calls or []
    assert last.extra == (None if depth == DEEPEST else {"written": written})


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_trajectory_is_json_when_arguments_have_a_number_that_json_lacks(
    conversation: list[Record], number: str
) -> None:
    written = f'{{"seconds": [{number}]}}'
    found = checked([*conversation[:-1], answer(1, message={"tool_calls": [call("c3", written)]})])
    assert found is not None
    (last,) = found.steps[-1].tool_calls or []
    assert (last.arguments, last.extra) == ({}, {"written": written})


def test_trajectory_has_the_head_of_a_message_that_a_new_branch_repeats(conversation: list[Record]) -> None:
    long: Message = {"role": "user", "content": "x" * 5000}
    asked = [IntentRecord(turn=turn, time=3, keep=0, messages=[long], branch=turn) for turn in (2, 3)]
    found = checked([*conversation, asked[0], answer(2), asked[1], answer(3)])
    assert found is not None
    whole, repeated = (step.message for step in found.steps if "xxx" in step.message)
    assert whole == long["content"]
    assert repeated == f"{'x' * 1000}\n[… 4000 characters omitted: an earlier step has the whole message …]"


def test_rewritten_history_is_marked_as_copied_and_as_a_branch(conversation: list[Record]) -> None:
    compacted: list[Message] = [
        {"role": "user", "content": "fix it"},
        {"role": "assistant", "content": "I looked around."},
    ]
    found = checked([*conversation, IntentRecord(turn=2, time=3, keep=1, messages=compacted, branch=1), answer(2)])
    assert found is not None
    again, summary, last = found.steps[-3:]
    assert (again.source, again.is_copied_context, again.extra) == ("user", True, {"branch": 1})
    assert (summary.source, summary.is_copied_context, summary.llm_call_count) == ("agent", None, 0)
    assert last.llm_call_count == 1
