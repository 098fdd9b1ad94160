"""verl's LLM servers as a model: every token has the weights that sampled it, and no server failure counts against the
policy.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent_runtime.integrations.verl import model as verl_model
from agent_runtime.integrations.verl.model import LLMClientModel
from agent_runtime.models.base import ContextExceeded, ModelError, ModelRequest, TokenPrefix
from agent_runtime.models.token_history import answer_record
from agent_runtime.recording.branches import token_branches
from rollout_api.model import Sampling
from rollout_api.records import Message, PolicySpan

PROMPT = [10, 11, 12]


@dataclass
class Output:
    """An output like verl's TokenOutput."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    stop_reason: str | None = "completed"
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: Any = None


def piece(*ids: int, version: int | None = 1, stop: str = "completed", **extra: Any) -> Output:
    steps = {} if version is None else {"global_steps": version}
    return Output(list(ids), [-0.5] * len(ids), stop, steps | extra)


class Server:
    """Gives its answers in order; an exception is raised."""

    def __init__(self, *answers: Output | Exception) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()

    async def generate(self, request_id: str, **asked: Any) -> Output:
        self.asked.append(asked)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class PlainChat:
    """Every conversation has the same prompt. An answer of token 7 is a tool call."""

    stop_token_ids = (99,)

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prefix: TokenPrefix | None
    ) -> list[int]:
        return PROMPT

    async def read(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stops: Sequence[str]
    ) -> tuple[str, list[dict[str, Any]]]:
        call = {"type": "function", "function": {"name": "bash", "arguments": "{}"}}
        return " ".join(map(str, ids)), [call] if 7 in ids else []


def request(sampling: Sampling | None = None, max_tokens: int | None = None) -> ModelRequest:
    return ModelRequest(
        messages=[{"role": "user", "content": "hi"}],
        tools=[],
        sampling=sampling or Sampling(),
        seed=0,
        session="rollout-0",
        task="t",
        member=0,
        turn=2,
        max_tokens=max_tokens,
    )


def model(server: Server, context: int = 20, call_seconds: float = 60) -> LLMClientModel:
    return LLMClientModel(server.generate, PlainChat(), context=context, call_seconds=call_seconds)


async def test_answer_cut_by_a_weight_update_continues_with_a_version_for_each_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verl_model, "RESUME_SECONDS", 0.01)
    server = Server(piece(1, 2, version=4, stop="aborted"), piece(version=5, stop="abort"), piece(3, version=6))
    asked = request()

    reply = await model(server).complete(asked)

    assert reply.completion_token_ids == [1, 2, 3]
    assert reply.policy_spans == [PolicySpan(tokens=2, version="4"), PolicySpan(tokens=1, version="6")]
    assert [call["prompt_ids"] for call in server.asked] == [PROMPT, [*PROMPT, 1, 2], [*PROMPT, 1, 2]]
    assert [call["sampling_params"]["max_tokens"] for call in server.asked] == [17, 15, 15]
    assert asked.health.held_seconds == pytest.approx(0.02)


async def test_tokens_joined_over_an_update_have_no_version_and_are_not_trained() -> None:
    joined = piece(1, 2, version=6, min_global_steps=5, max_global_steps=6)

    reply = await model(Server(joined)).complete(request())

    assert reply.policy_spans == [PolicySpan(tokens=2, version=None)]
    [branch] = token_branches([answer_record(reply, turn=0, seconds=0, known=[])])
    assert branch.mask == [0] * (len(PROMPT) + 2)


async def test_tokens_without_a_reported_version_are_trained() -> None:
    reply = await model(Server(piece(1, 2, version=None))).complete(request())

    assert reply.policy_spans == []
    assert reply.logprobs == [-0.5, -0.5]


@pytest.mark.parametrize("answer", [RuntimeError("a replica died"), ValueError("no room"), Output([1], None)])
async def test_every_server_error_is_infrastructure(answer: Output | Exception) -> None:
    with pytest.raises(ModelError):
        await model(Server(answer)).complete(request())


async def test_hanging_server_is_abandoned_at_the_deadline() -> None:
    async def hang(request_id: str, **asked: Any) -> Output:
        await asyncio.sleep(60)
        raise AssertionError("not reached")

    hanging = LLMClientModel(hang, PlainChat(), context=20, call_seconds=0.05)

    with pytest.raises(ModelError, match="Timeout"):
        await hanging.complete(request())


async def test_prompt_that_fills_the_trainers_limit_counts_against_the_policy() -> None:
    with pytest.raises(ContextExceeded):
        await model(Server(), context=3).complete(request())


async def test_an_answer_gets_the_tightest_of_all_limits_and_verls_sampling() -> None:
    server = Server(piece(7))
    sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=9, stop=["END"], extra={"top_k": 20})

    reply = await model(server).complete(request(sampling, max_tokens=5))

    assert server.asked[0]["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "logprobs": True,
        "max_tokens": 5,
        "stop": ["END"],
        "stop_token_ids": [99],
    }
    assert reply.finish_reason == "tool_calls"
    assert reply.tool_calls[0].id == "call-2-0"


class FailingChat(PlainChat):
    async def read(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stops: Sequence[str]
    ) -> tuple[str, list[dict[str, Any]]]:
        raise KeyError("no such tool")


async def test_answer_that_the_parser_cannot_read_counts_as_begun() -> None:
    parsed = LLMClientModel(Server(piece(1)).generate, FailingChat(), context=20)
    with pytest.raises(ModelError, match="BadAnswer: verl's tool parser cannot read the answer: KeyError") as failed:
        await parsed.complete(request())
    assert failed.value.after_tokens

    with pytest.raises(ModelError) as gone:
        await model(Server(RuntimeError("gone"))).complete(request())
    assert not gone.value.after_tokens


@dataclass
class Array:
    """An array like numpy's."""

    rows: Sequence[int]
    dtype: Any = field(default_factory=lambda: SimpleNamespace(itemsize=1))

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.rows), 1, 1

    def tobytes(self) -> bytes:
        return bytes(self.rows)


async def test_each_piece_of_an_answer_has_the_experts_with_which_it_was_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verl_model, "RESUME_SECONDS", 0.01)
    first, last = piece(1, 2, stop="aborted"), piece(3)
    # verl reports all tokens but the last each time.
    first.routed_experts, last.routed_experts = Array([40, 41, 42, 43]), Array([50, 51, 52, 53, 54])
    known = replace(request(), prefix=TokenPrefix(1, PROMPT[:2], experts=1))

    found = (await model(Server(first, piece(stop="abort"), last)).complete(known)).routed_experts

    assert found is not None
    assert (found.rows.data, found.spans) == (bytes([41, 42, 43, 54]), [(1, 4), (4, 5)])


async def test_experts_of_other_tokens_are_an_infrastructure_failure() -> None:
    wrong = piece(1, 2)
    wrong.routed_experts = Array([1, 2])
    with pytest.raises(ModelError, match="routed experts: expected the experts of 4 tokens, got those of 2"):
        await model(Server(wrong)).complete(request())
