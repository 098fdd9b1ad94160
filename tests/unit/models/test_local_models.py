"""Scripted and function models, and how they are opened."""

import json
from typing import Any

import pytest

from agent_runtime.models.base import ContextExceeded, ModelConfigError, ModelError, ModelReply, ModelRequest
from agent_runtime.models.factory import open_model
from agent_runtime.models.providers.function import FunctionModel
from rollout_api.keys import MODEL_KEY_VARIABLE
from rollout_api.model import ModelSpec, Sampling

SCRIPT = {
    "tasks": [
        {
            "task": "a",
            "members": [
                {
                    "turns": [
                        {"content": "first", "toolCalls": [{"name": "f", "arguments": {"x": 1}}]},
                        {"content": "end"},
                    ]
                },
                {"turns": [{"toolCalls": [{"name": "f", "arguments": "{broken"}]}]},
            ],
        }
    ]
}


def opened(environ: Any = None, **spec: Any) -> Any:
    return open_model(ModelSpec.model_validate(spec), environ or {})


def request(turn: Any = 0, member: Any = 0, task: Any = "a", sampling: Any = None, max_tokens: Any = None) -> Any:
    messages = [{"role": "user", "content": "Hi"}]
    return ModelRequest(messages, [], sampling or Sampling(), 1, "s", task, member, turn, max_tokens)


async def test_a_script_is_followed_by_member_and_turn_and_its_last_turn_repeats() -> None:
    model = opened(scripted=SCRIPT)
    assert [(await model.complete(request(turn))).text for turn in (0, 1, 2, 9)] == ["first", "end", "end", "end"]
    [call] = (await model.complete(request(0))).tool_calls
    assert json.loads(call.arguments) == {"x": 1}
    for member in (1, 3, 5):
        [call] = (await model.complete(request(0, member))).tool_calls
        assert call.arguments == "{broken", "malformed JSON of a script reaches the agent as it stands"


async def test_the_same_call_gets_the_same_answer_after_a_crash() -> None:
    assert await opened(scripted=SCRIPT).complete(request(1)) == await opened(scripted=SCRIPT).complete(request(1))


async def test_task_without_a_script_is_reported_with_those_that_have_one() -> None:
    with pytest.raises(ModelConfigError, match=r"no script for task 'b'; it has a"):
        await opened(scripted=SCRIPT).complete(request(task="b"))


async def test_scripted_answers_count_tokens_so_that_budgets_work() -> None:
    usage = (await opened(scripted=SCRIPT).complete(request())).usage
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0


async def test_function_with_keyword_arguments_gets_set_values_and_keeps_its_defaults() -> None:
    async def f(messages: Any, max_tokens: Any = 512, temperature: Any = 0.7, **kw: Any) -> Any:
        return f"{max_tokens} {temperature} {kw['seed']} {kw['turn']} {kw['user']} {'top_p' in kw}"

    reply = await FunctionModel(f, "f").complete(request(3, sampling=Sampling(temperature=0, extra={"user": "u"})))
    assert reply.text == "512 0.0 1 3 u False"


async def test_function_without_keyword_arguments_gets_only_its_own_parameters() -> None:
    async def f(messages: Any, max_tokens: Any = 512) -> Any:
        return str(max_tokens)

    limits = request(sampling=Sampling(max_tokens=9), max_tokens=7)
    assert (await FunctionModel(f, "f").complete(limits)).text == "7"


async def test_a_function_may_return_a_message_with_tool_calls_or_a_whole_reply() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "g", "arguments": "{}"}}]

    async def message(messages: Any, **kw: Any) -> Any:
        return {"role": "assistant", "tool_calls": calls}

    async def whole(messages: Any, **kw: Any) -> Any:
        return ModelReply({"role": "assistant", "content": "x"}, "stop", logprobs=[-1.0])

    assert (await FunctionModel(message, "f").complete(request())).finish_reason == "tool_calls"
    assert (await FunctionModel(whole, "f").complete(request())).logprobs == [-1.0]


async def test_error_of_a_function_is_no_policy_failure_unless_it_is_declared_as_one() -> None:
    async def broken(messages: Any, **kw: Any) -> Any:
        raise ZeroDivisionError("oops")

    async def exits(messages: Any, **kw: Any) -> Any:
        raise SystemExit(3)

    async def full(messages: Any, **kw: Any) -> Any:
        raise ContextExceeded("full")

    async def wrong(messages: Any, **kw: Any) -> Any:
        return 7

    async def whole(messages: Any, **kw: Any) -> Any:
        return {"choices": [{"message": {"role": "assistant", "content": "ok"}}]}

    with pytest.raises(ModelError, match=r"FunctionFailed: f raised ZeroDivisionError: oops"):
        await FunctionModel(broken, "f").complete(request())
    with pytest.raises(ModelError, match=r"FunctionFailed: f raised RuntimeError: SystemExit was raised: 3"):
        await FunctionModel(exits, "f").complete(request())
    with pytest.raises(ContextExceeded):
        await FunctionModel(full, "f").complete(request())
    with pytest.raises(ModelError, match=r"BadResponse: f returned 7"):
        await FunctionModel(wrong, "f").complete(request())
    with pytest.raises(ModelError, match=r"BadResponse: f returned \{'choices'"):
        await FunctionModel(whole, "f").complete(request())


ENDPOINT = {"baseURL": "http://127.0.0.1:1/v1", "name": "m"}


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"serverRef": "s"}, "model.serverRef.*only a cluster"),
        ({"function": "no_such_module:f"}, "no_such_module.*PYTHONPATH"),
        ({"function": "json:dumpz"}, r"module json \(.*json/__init__.py\) has no 'dumpz' .did you mean 'dump"),
        ({"function": "json:dumps"}, "expected an async function"),
        ({"endpoint": ENDPOINT | {"apiKeyFrom": {"env": "MY_KEY"}}}, "environment variable MY_KEY is missing"),
        ({"endpoint": ENDPOINT | {"apiKeyFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}}, "key k of Secret s"),
    ],
)
def test_model_that_cannot_be_opened_is_reported_with_the_field_and_a_remedy(spec: Any, complaint: Any) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        opened(**spec)


def test_key_of_a_secret_is_read_from_the_runners_variable() -> None:
    source = {"secretKeyRef": {"name": "s", "key": "k"}}
    assert opened({MODEL_KEY_VARIABLE: "x"}, endpoint=ENDPOINT | {"apiKeyFrom": source}).name == "m"
