"""Behaviour of vLLM on which we rely, checked on vLLM itself and on its stand-in by the same assertions."""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from tests.integration.vllm.conftest import MODEL, InferenceServer
from tests.support.tiny_llama import MAX_MODEL_LEN
from tests.support.vllm_server import render as rendered_text
from tests.support.vllm_server import tokenizer

HELLO = {"role": "user", "content": "Say what 6 times 7 is."}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
CALLED = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [
        {"id": "call-1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls -l /tmp"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "a.txt  ünïcode ✓"}
TEXTS = [
    "",
    "Hello",
    "  two  spaces \n\n and lines\t",
    "ünïcode ✓ 漢字 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
    "base64 " + "QUJD" * 50,
    "12345 67,890",
]


def error_of(answer: Any) -> Mapping[str, Any]:
    assert isinstance(answer, dict), answer
    found = answer["error"]
    assert isinstance(found, dict), answer
    return found


# --- What it is ---


async def test_server_reports_its_model_and_version(server: InferenceServer) -> None:
    status, _ = await server.ask("GET", "/health")
    assert status == 200
    (card, *adapters) = (await server.get("/v1/models"))["data"]
    assert (card["id"], card["max_model_len"], adapters) == (MODEL, MAX_MODEL_LEN, [])
    assert isinstance((await server.get("/version"))["version"], str)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render"])
async def test_unknown_model_is_not_found(server: InferenceServer, path: str) -> None:
    status, answer = await server.ask("POST", path, {"model": "other", "messages": [HELLO]})
    error = error_of(answer)
    assert (status, error["type"], error["code"]) == (404, "NotFoundError", 404)
    assert "other" in error["message"]


# --- Tokens ---


@pytest.mark.parametrize("text", TEXTS)
async def test_a_text_becomes_the_same_ids(server: InferenceServer, text: str) -> None:
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    answer = await server.post("/tokenize", body)
    assert answer["tokens"] == tokenizer().encode(text)
    back = await server.post("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})
    assert back["prompt"] == text


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([HELLO], {}),
        ([{"role": "system", "content": "Be short."}, HELLO], {}),
        ([HELLO, CALLED, RESULT], {"tools": [BASH]}),
        ([{"role": "system", "content": "Be short."}, HELLO, CALLED, RESULT], {"tools": [BASH]}),
        ([HELLO, {"role": "assistant", "content": "42"}], {"add_generation_prompt": False}),
        ([{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}], {}),
    ],
)
async def test_messages_become_the_same_ids(
    server: InferenceServer, messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    rendered = await server.render(*messages, **fields)
    text = rendered_text(messages, fields.get("tools", ()), generation_prompt=fields.get("add_generation_prompt", True))
    assert tokenizer().decode(rendered["token_ids"], special=True) == text
    assert rendered["token_ids"] == tokenizer().encode(text)


async def test_render_answers_with_a_request_to_generate(server: InferenceServer) -> None:
    rendered = await server.render(HELLO, max_tokens=7, temperature=0.0, seed=3, cache_salt="s", priority=2)
    sampling = rendered["sampling_params"]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["seed"]) == (7, 0.0, 3)
    assert (rendered["cache_salt"], rendered["priority"]) == ("s", 2)
    answer = await server.post("/inference/v1/generate", rendered)
    (choice,) = answer["choices"]
    assert 0 < len(choice["token_ids"]) <= 7


async def test_generate_answers_with_ids_and_their_logprobs(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    answer = await server.generate(ids, sampling={"max_tokens": 5})
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 5
    assert choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert all(entry["logprob"] <= 0 for entry in content)


async def test_answer_continues_from_its_own_ids(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    whole = await server.greedy(ids, 24)
    assert await server.greedy([*ids, *whole[:9]], 15) == whole[9:]


async def test_a_stream_brings_the_same_ids_as_a_whole_answer(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    whole = await server.greedy(ids, 12)
    body = {
        "model": MODEL,
        "token_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    got: list[int] = []
    logprobs: list[float] = []
    finish, usage = None, None
    async for event in server.events("/inference/v1/generate", body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            got += choice["token_ids"] or []
            logprobs += [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or []]
            finish = choice["finish_reason"] or finish
    assert got == whole
    assert len(logprobs) == len(got)
    assert finish == "length"
    assert usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 12)


async def test_the_end_of_a_turn_is_among_the_ids_and_ends_the_answer(server: InferenceServer) -> None:
    end = tokenizer().eos
    ids = (await server.render(HELLO))["token_ids"]
    # The stand-in samples by a formula that no bias changes, and by itself ends one answer in 24 tokens.
    sampling = {"max_tokens": 400, "ignore_eos": False, "logit_bias": {str(end): 100}}
    (choice,) = (await server.generate(ids, sampling=sampling))["choices"]
    assert choice["token_ids"].index(end) == len(choice["token_ids"]) - 1
    assert choice["finish_reason"] == "stop"


async def test_ids_are_parsed_to_the_message_of_the_chat_route(server: InferenceServer) -> None:
    chat = {"model": MODEL, "messages": [HELLO], "temperature": 0.0, "max_tokens": 12, "seed": 1}
    direct = await server.post("/v1/chat/completions", {**chat, "return_token_ids": True, "logprobs": True})
    rendered = await server.render(HELLO, temperature=0.0, max_tokens=12, seed=1)
    assert direct["prompt_token_ids"] == rendered["token_ids"]
    generated = await server.post("/inference/v1/generate", rendered)
    assert generated["choices"][0]["token_ids"] == direct["choices"][0]["token_ids"]
    back = await server.post(
        "/v1/chat/completions/derender",
        {
            "model": MODEL,
            "generate_response": generated,
            "prompt_tokens": len(rendered["token_ids"]),
            "prompt_token_ids": rendered["token_ids"],
            "chat_request": chat,
        },
    )
    assert back["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]
    assert back["usage"] | {"prompt_tokens_details": None} == direct["usage"] | {"prompt_tokens_details": None}


@pytest.mark.parametrize(
    "text", ["Plain words.", 'See:\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>']
)
async def test_given_ids_are_decoded_to_text_and_tool_calls(server: InferenceServer, text: str) -> None:
    ids = tokenizer().encode(f"{text}<|im_end|>")
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
    body = {
        "model": MODEL,
        "generate_response": {"request_id": "r", "choices": [choice]},
        "prompt_tokens": 3,
        "prompt_token_ids": [1, 2, 3],
        "chat_request": {"model": MODEL, "messages": [HELLO], "tools": [BASH]},
    }
    message = (await server.post("/v1/chat/completions/derender", body))["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    if "<tool_call>" in text:
        assert calls == [{"name": "bash", "arguments": '{"command": "ls"}'}]
        assert (message["content"] or "").strip() == "See:"
    else:
        assert calls == []
        assert message["content"].startswith("Plain words.")


@pytest.mark.parametrize("ids", [[*tokenizer().encode("ab "), 0xE2], [*tokenizer().encode("ab "), 0xE2, 0x9C]])
async def test_incomplete_character_at_the_end_is_not_derendered(server: InferenceServer, ids: list[int]) -> None:
    chat = {"model": MODEL, "messages": [HELLO]}
    generated = {"request_id": "r", "choices": [{"index": 0, "token_ids": ids, "finish_reason": "length"}]}
    body = {"model": MODEL, "generate_response": generated, "prompt_tokens": 1, "chat_request": chat}
    answer = await server.post("/v1/chat/completions/derender", body)
    assert answer["choices"][0]["message"]["content"] == "ab "
    body = {"model": MODEL, "generate_responses": [generated], "prompt_tokens": [1]}
    assert (await server.post("/v1/completions/derender", body))["choices"][0]["text"] == "ab "
    back = await server.post("/detokenize", {"model": MODEL, "tokens": ids})
    assert back["prompt"] == "ab \ufffd"


async def test_completions_are_rendered_and_derendered_too(server: InferenceServer) -> None:
    body = {"model": MODEL, "prompt": "The model reads", "max_tokens": 6, "temperature": 0.0, "logprobs": 0}
    (rendered,) = await server.post("/v1/completions/render", body)
    assert rendered["token_ids"] == tokenizer().encode("The model reads")
    generated = await server.post("/inference/v1/generate", rendered)
    back = await server.post(
        "/v1/completions/derender",
        {
            "model": MODEL,
            "generate_responses": [generated],
            "prompt_tokens": [len(rendered["token_ids"])],
            "prompt_token_ids": [rendered["token_ids"]],
        },
    )
    assert back["choices"][0]["text"] == tokenizer().decode(generated["choices"][0]["token_ids"])


# --- Limits ---


async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(server: InferenceServer) -> None:
    body = {"model": MODEL, "token_ids": [300] * (MAX_MODEL_LEN + 5), "sampling_params": {"max_tokens": 4}}
    status, answer = await server.ask("POST", "/inference/v1/generate", body)
    message = error_of(answer)["message"]
    assert status == 400
    assert str(MAX_MODEL_LEN) in message
    assert "longer than the maximum model length" in message


async def test_a_chat_that_is_too_long_is_refused_as_such(server: InferenceServer) -> None:
    long = {"role": "user", "content": "word " * 2 * MAX_MODEL_LEN}
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        status, answer = await server.ask("POST", path, {"model": MODEL, "messages": [long], "max_tokens": 4})
        assert status == 400
        assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error_of(answer)["message"]


async def test_an_answer_may_ask_for_more_than_the_context_has(server: InferenceServer) -> None:
    ids = [300] * (MAX_MODEL_LEN - 4)
    (choice,) = (await server.generate(ids, sampling={"max_tokens": 100}))["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (4, "length")


@pytest.mark.parametrize(
    "body", [{"token_ids": [], "sampling_params": {}}, {"sampling_params": {}}, {"token_ids": [1]}]
)
async def test_request_without_a_required_field_is_refused(server: InferenceServer, body: dict[str, Any]) -> None:
    status, answer = await server.ask("POST", "/inference/v1/generate", {"model": MODEL, **body})
    assert status == 400
    assert error_of(answer)["message"]


async def test_unknown_reasoning_effort_is_refused(server: InferenceServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "default"}
    status, answer = await server.ask("POST", "/v1/chat/completions/render", body)
    assert status == 400
    assert "reasoning_effort" in str(answer)


# --- The prefix cache ---


async def cached(server: InferenceServer, ids: list[int], salt: str) -> int:
    answer = await server.generate(ids, cache_salt=salt, sampling={"max_tokens": 2})
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


async def test_a_prefix_is_found_again_under_its_own_salt_alone(server: InferenceServer) -> None:
    ids = [300 + number % 200 for number in range(400)]
    assert await cached(server, ids, "one") == 0
    assert await cached(server, ids, "one") > 200
    assert await cached(server, ids, "two") == 0


# --- Weights ---


async def test_unnamed_weights_have_a_label_that_is_not_a_version(server: InferenceServer) -> None:
    assert server.first_label == "default"


async def test_a_new_version_name_does_not_change_the_weights(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    before = await server.greedy(ids)
    await server.post("/update_weight_version", {"new_version": "7"})
    assert (await server.get("/weight_info"))["weight_version"] == "7"
    assert await server.greedy(ids) == before


async def test_other_weights_make_other_tokens_and_a_load_sets_no_name(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    zero = await server.greedy(ids)
    assert await server.load(server.checkpoint(1)) == (200, {"results": [None]})
    one = await server.greedy(ids)
    assert one != zero
    assert (await server.get("/weight_info"))["weight_version"] == "0"
    assert (await server.load(server.checkpoint(0)))[0] == 200
    assert await server.greedy(ids) == zero


async def test_load_without_a_path_uses_the_last_path(server: InferenceServer) -> None:
    """So it cannot return to the weights with which the server was started."""
    ids = (await server.render(HELLO))["token_ids"]
    await server.load(server.checkpoint(1))
    one = await server.greedy(ids)
    assert (await server.load(None))[0] == 200
    assert await server.greedy(ids) == one


async def test_a_failed_load_is_reported_and_the_next_one_succeeds(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    zero = await server.greedy(ids)
    status, answer = await server.load("/nowhere/at/all")
    assert status == 500
    assert error_of(answer)["message"]
    assert (await server.load(server.checkpoint(0)))[0] == 200
    assert await server.greedy(ids) == zero


async def test_the_checksums_of_two_versions_differ(server: InferenceServer) -> None:
    async def checksums() -> dict[str, str]:
        answer = await server.post("/weight_checker", {"action": "checksum"})
        found = answer["checksums"]
        assert isinstance(found, dict)
        assert found
        return found

    zero = await checksums()
    await server.load(server.checkpoint(1))
    one = await checksums()
    assert zero.keys() == one.keys()
    assert zero != one
    compared = await server.post("/weight_checker", {"action": "compare", "baseline": zero})
    assert compared["match"] is False
    assert set(compared["mismatches"]) == {name for name in zero if zero[name] != one[name]}
    await server.load(server.checkpoint(0))
    assert await checksums() == zero


async def test_a_paused_engine_makes_checksums_too(server: InferenceServer) -> None:
    await server.post("/pause?mode=keep&clear_cache=false")
    status, answer = await server.ask("POST", "/weight_checker", {"action": "checksum"})
    await server.post("/resume")
    assert status == 200, answer


# --- Pause ---


async def test_a_paused_engine_holds_new_requests_until_it_is_resumed(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    before = await server.greedy(ids)
    await server.post("/pause?mode=keep&clear_cache=false")
    assert (await server.get("/is_paused")) == {"is_paused": True}
    waiting = asyncio.create_task(server.greedy(ids))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await server.post("/resume")
    assert await waiting == before
    assert (await server.get("/is_paused")) == {"is_paused": False}


async def test_pause_and_resume_can_be_repeated(server: InferenceServer) -> None:
    for path in ("/pause?mode=keep", "/pause?mode=keep", "/resume", "/resume"):
        await server.post(path)
    assert (await server.get("/is_paused")) == {"is_paused": False}


async def test_running_call_continues_after_a_load_and_reports_its_weights(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    zero = await server.greedy(ids, 400)
    body = {
        "model": MODEL,
        "token_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_tokens": 400, "logprobs": 0, "ignore_eos": True},
        "stream": True,
    }
    got: list[int] = []
    spans: Any = None
    changed = False
    async for event in server.events("/inference/v1/generate", body):
        for choice in event["choices"]:
            got += choice["token_ids"] or []
            spans = choice.get("weight_versions") or spans
        if len(got) >= 20 and not changed:
            changed = True
            await server.post("/pause?mode=keep&clear_cache=false")
            await server.load(server.checkpoint(1))
            await server.post("/update_weight_version", {"new_version": "1"})
            await server.post("/resume")
    assert len(got) == 400
    assert got[:20] == zero[:20]
    assert got != zero
    assert [span["version"] for span in spans] == ["0", "1"]
    assert (spans[0]["start"], spans[-1]["end"]) == (0, 400)
    assert spans[0]["end"] == spans[1]["start"]
    assert got[: spans[0]["end"]] == zero[: spans[0]["end"]]


async def test_a_client_that_goes_away_ends_its_request(server: InferenceServer) -> None:
    body = {
        "model": MODEL,
        "token_ids": [300] * 10,
        "sampling_params": {"max_tokens": 3500, "ignore_eos": True},
        "stream": True,
    }
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{server.url}/inference/v1/generate", json=body) as response,
    ):
        await response.content.readline()
    async with asyncio.timeout(60):
        while await server.metric("vllm:num_requests_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_abort_ends_all_requests(server: InferenceServer) -> None:
    body = {"token_ids": [300] * 10, "sampling_params": {"max_tokens": 3500, "ignore_eos": True}, "model": MODEL}
    running = asyncio.create_task(server.ask("POST", "/inference/v1/generate", body))
    async with asyncio.timeout(60):
        while not await server.metric("vllm:num_requests_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    answer = await server.post("/abort_requests", {})
    assert answer["status"] == "aborted"
    status, ended = await running
    assert status == 200
    assert ended["choices"][0]["finish_reason"] == "abort"


# --- Sampling ---


async def test_a_seed_makes_the_same_tokens_again(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    sampling = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
    first, second, other = [
        (await server.generate(ids, sampling=sampling | {"seed": seed}))["choices"][0]["token_ids"]
        for seed in (11, 11, 12)
    ]
    assert first == second
    assert first != other


async def test_priorities_are_accepted(server: InferenceServer) -> None:
    ids = (await server.render(HELLO))["token_ids"]
    answers = await asyncio.gather(*(server.generate(ids, priority=number - 4) for number in range(8)))
    assert len({tuple(answer["choices"][0]["token_ids"]) for answer in answers}) == 1


# --- Adapters, sleep ---


async def test_missing_adapter_is_refused(server: InferenceServer) -> None:
    status, answer = await server.ask("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"})
    assert status in (400, 404)
    assert error_of(answer)["message"]
    status, _ = await server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "a"})
    assert status in (400, 404)


@pytest.mark.parametrize(
    "name",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    ],
)
async def test_metrics_that_runners_read_exist(server: InferenceServer, name: str) -> None:
    await server.metric(name)
