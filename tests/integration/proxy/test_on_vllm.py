"""The openai and anthropic packages through the proxy's own server, with a stand-in for vLLM behind it."""

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from agent_runtime.recording.branches import token_branches
from agent_runtime.recording.expert_arrays import read_experts
from agent_runtime.recording.messages import linear
from agent_runtime.recording.store import Store
from rollout_api.model import RoutedExperts
from rollout_api.records import ResponseRecord
from tests.integration.proxy.conftest import Proxy, opened_vllm, proxy_over, until
from tests.support.vllm_server import Answer, ToolCall, VllmStandIn, tokenizer
from tests.support.vllm_server.experts import ROW_BYTES, experts_by

HELLO: list[Any] = [{"role": "user", "content": "Hello there."}]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": PARAMETERS}}
CLAUDE_TOOL: Any = {"name": "bash", "description": "d", "input_schema": PARAMETERS}
SCRIPT: list[Answer | str] = [Answer("I look.", [ToolCall("bash", {"command": "ls"})]), "All done here."]


async def claude(proxy: Proxy, name: str, **fields: Any) -> anthropic.AsyncAnthropic:
    """Return a client of the anthropic package in a session of its own."""
    base = (await proxy.register(name, **fields)).removesuffix("/v1")
    return await proxy.stack.enter_async_context(
        anthropic.AsyncAnthropic(base_url=base, api_key="unused", max_retries=2, timeout=60)
    )


async def assert_exact(proxy: Proxy, name: str, engine: VllmStandIn) -> None:
    """Check that there is one branch, with the ids that the engine read and sampled."""
    served = list(engine.served)
    [branch] = token_branches(linear(await proxy.records(name)))
    assert branch.token_ids == [*served[-1].prompt_ids, *served[-1].ids]
    sampled = [token for token, mask in zip(branch.token_ids, branch.mask, strict=True) if mask]
    assert sampled == [token for request in served for token in request.ids]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 77, 300, 12]])
async def test_completions_are_token_exact(prompt: Any, streamed: bool, vllm_proxy: Proxy, engine: VllmStandIn) -> None:
    client = await vllm_proxy.openai("s")
    ask: dict[str, Any] = {
        "model": "policy",
        "prompt": prompt,
        "max_tokens": 30,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }
    if streamed:
        stream = await client.completions.create(**ask, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    else:
        whole = await client.completions.create(**ask)
        text = whole.choices[0].text
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 30
    [request] = engine.served
    assert request.prompt_ids == (tokenizer().encode(prompt) if isinstance(prompt, str) else prompt)
    assert text == tokenizer().decode(request.ids)
    await assert_exact(vllm_proxy, "s", engine)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_on_chat_completions_is_recorded_to_the_token(
    streamed: bool, vllm_proxy: Proxy, engine: VllmStandIn
) -> None:
    engine.script = {"s": SCRIPT}
    client = await vllm_proxy.openai("s")
    messages: list[Any] = list(HELLO)
    for _ in SCRIPT:
        ask: dict[str, Any] = {"model": "policy", "messages": messages, "tools": [CHAT_TOOL]}
        if streamed:
            async with client.chat.completions.stream(**ask) as stream:
                answer = (await stream.get_final_completion()).choices[0].message
        else:
            answer = (await client.chat.completions.create(**ask)).choices[0].message
        calls: list[Any] = list(answer.tool_calls or [])
        messages.append(
            {
                "role": "assistant",
                "content": answer.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": call.function.model_dump(include={"name", "arguments"}),
                    }
                    for call in calls
                ],
            }
        )
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "a b c"} for call in calls]
    assert answer.content == "All done here."
    await assert_exact(vllm_proxy, "s", engine)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_on_the_anthropic_package_is_recorded_to_the_token(
    streamed: bool, vllm_proxy: Proxy, engine: VllmStandIn
) -> None:
    engine.script = {"s": SCRIPT}
    client = await claude(vllm_proxy, "s")
    messages: list[Any] = list(HELLO)
    ask: dict[str, Any] = {"model": "policy", "max_tokens": 200, "tools": [CLAUDE_TOOL]}
    for _ in SCRIPT:
        if streamed:
            async with client.messages.stream(messages=messages, **ask) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(messages=messages, **ask)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "a b c"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results or "Thanks."})
    assert (answer.stop_reason, answer.content[0].type) == ("end_turn", "text")
    assert [block["name"] for block in messages[1]["content"] if block["type"] == "tool_use"] == ["bash"]
    assert "a b c" in tokenizer().decode(engine.served[-1].prompt_ids)
    await assert_exact(vllm_proxy, "s", engine)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_on_responses_is_recorded_to_the_token(
    streamed: bool, vllm_proxy: Proxy, engine: VllmStandIn
) -> None:
    engine.script = {"s": SCRIPT}
    client = await vllm_proxy.openai("s")
    items: list[Any] = list(HELLO)
    ask: dict[str, Any] = {
        "model": "policy",
        "tools": [{"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": None}],
    }
    for _ in SCRIPT:
        if streamed:
            async with client.responses.stream(input=items, **ask) as stream:
                answer: Any = await stream.get_final_response()
        else:
            answer = await client.responses.create(input=items, **ask)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "a b c"}
            for item in answer.output
            if item.type == "function_call"
        ]
    assert answer.output_text == "All done here."
    await assert_exact(vllm_proxy, "s", engine)


async def test_calls_of_a_client_are_recorded_with_their_routed_experts(tmp_path: Path) -> None:
    async with (
        VllmStandIn(script={"s": ["One.", "Two.", "Three."]}, routed_experts=True) as engine,
        opened_vllm(engine, RoutedExperts()) as vllm,
        proxy_over(vllm, tmp_path) as proxy,
    ):
        client = await proxy.openai("s")
        messages: list[Any] = list(HELLO)
        for _ in range(3):
            answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "Go on."}]
        [branch] = token_branches(linear(await proxy.records("s")))
        found = await read_experts(Store.open(str(tmp_path), {}), branch)
        firsts = [request.sampling["routed_experts_prompt_start"] for request in engine.served]
        ends = [len(request.prompt_ids) + len(request.ids) - 1 for request in engine.served]
    assert found is not None
    assert found.reported == [(0, len(branch.token_ids) - 1)]
    assert found.data == experts_by(0, branch.token_ids[:-1]) + bytes(ROW_BYTES)
    assert firsts == [0, *ends[:-1]], "each call asks only for tokens that the earlier ones did not report"


async def test_stop_sequence_of_an_answer_is_reported_and_its_ids_are_kept(
    vllm_proxy: Proxy, engine: VllmStandIn
) -> None:
    engine.script = {"s": ["First this.\nObservation: and never this", "The end."]}
    client = await claude(vllm_proxy, "s")
    ask: dict[str, Any] = {"model": "policy", "max_tokens": 200, "stop_sequences": ["\nObservation:", "never"]}
    first = await client.messages.create(messages=HELLO, **ask)
    assert first.content[0].type == "text"
    assert first.content[0].text == "First this."
    assert (first.stop_reason, first.stop_sequence) == ("stop_sequence", "\nObservation:")
    turns: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": first.content[0].text},
        {"role": "user", "content": "Observation: 5"},
    ]
    async with client.messages.stream(messages=turns, **ask) as stream:
        second = await stream.get_final_message()
    assert (second.stop_reason, second.stop_sequence) == ("end_turn", None)
    responses = [record for record in await vllm_proxy.records("s") if isinstance(record, ResponseRecord)]
    assert [record.stop_sequence for record in responses] == ["\nObservation:", None]
    await assert_exact(vllm_proxy, "s", engine)


async def test_field_refused_by_the_engine_is_reported_once_as_a_client_error(
    vllm_proxy: Proxy, engine: VllmStandIn
) -> None:
    client = await vllm_proxy.openai("s", max_retries=2)
    for streamed in (False, True):
        poem: Any = {"type": "poem"}
        with pytest.raises(openai.BadRequestError, match="poem"):
            await client.chat.completions.create(model="policy", messages=HELLO, stream=streamed, response_format=poem)
    with pytest.raises(anthropic.BadRequestError, match="allowed_token_ids"):
        await (await claude(vllm_proxy, "c")).messages.create(
            model="policy", max_tokens=5, messages=HELLO, extra_body={"allowed_token_ids": [10**9]}
        )
    assert await vllm_proxy.metric("session_proxy_requests_total") == 3 + 2, (
        "calls and sessions; no call was tried again"
    )
    assert list(engine.served) == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_field_that_the_engine_ignores_is_dropped_and_named(vllm_proxy: Proxy, streamed: bool) -> None:
    client = await vllm_proxy.openai("s")
    for name, value in (("verbosity", "low"), ("skip_special_tokens", False), ("newest", 1)):
        raw = await client.chat.completions.with_raw_response.create(
            model="policy", messages=HELLO, max_tokens=5, stream=streamed, extra_body={name: value}
        )
        assert raw.headers["x-rollout-notes"] == f"{name}: without effect at the inference server"
    assert await vllm_proxy.metric('session_proxy_dropped_total{kind="field"}') == 3
    bare = await client.completions.with_raw_response.create(
        model="policy", prompt="x", extra_body={"chat_template_kwargs": {"a": 1}}
    )
    assert bare.headers["x-rollout-notes"].startswith("chat_template_kwargs")


async def test_error_of_the_engine_raises_the_packages_own_exception(vllm_proxy: Proxy, engine: VllmStandIn) -> None:
    gpt = await vllm_proxy.openai("s")
    anthropic_client = (await claude(vllm_proxy, "c")).with_options(max_retries=0)
    long: list[Any] = [{"role": "user", "content": "word " * 40_000}]
    with pytest.raises(openai.BadRequestError) as too_long:
        await gpt.chat.completions.create(model="policy", messages=long)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await anthropic_client.messages.create(model="policy", max_tokens=5, messages=long)
    with pytest.raises(openai.BadRequestError) as too_long:
        await gpt.completions.create(model="policy", prompt="word " * 40_000)
    assert too_long.value.code == "context_length_exceeded"
    engine.faults.no_logprobs = True
    with pytest.raises(openai.InternalServerError) as no_logprobs:
        await gpt.chat.completions.create(model="policy", messages=HELLO)
    assert no_logprobs.value.status_code == 502
    with pytest.raises(anthropic.InternalServerError):
        await anthropic_client.messages.create(model="policy", max_tokens=5, messages=HELLO)


async def test_a_client_that_goes_away_ends_its_completion(tmp_path: Path) -> None:
    async with (
        VllmStandIn(tokens_per_second=100) as engine,
        opened_vllm(engine) as vllm,
        proxy_over(vllm, tmp_path) as proxy,
    ):
        client = await proxy.openai("s")
        answer = await client.completions.create(
            model="policy", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(answer))
        await answer.close()
        await until(lambda: bool(engine.served[-1].ended))
        assert engine.served[-1].disconnected
        assert len(engine.served[-1].ids) < 1000
