"""Chat, completions, and routes with token ids give the same answer for the same request."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.vllm_server import Answer, Prompt, ToolCall, logprobs_by, made_by, tokenizer
from tests.unit.vllm_server.conftest import MESSAGES, TOOLS, Standin

SCRIPT = {
    "s": [Answer("I look.", [ToolCall("bash", {"command": "ls"}), ToolCall("bash", {"command": "pwd"})]), "Done."]
}
ASK = {"model": "policy", "messages": MESSAGES, "tools": TOOLS, "logprobs": True, "return_token_ids": True}


async def test_ids_and_logprobs_depend_on_the_prompt_and_the_loaded_version(standin: Standin) -> None:
    async with standin(base_version=7) as client:
        answer = await client.chat(return_token_ids=True, logprobs=True, seed=3)
        choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
        assert choice["token_ids"] == made_by(7, prompt, 1000, seed=3)
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == logprobs_by(
            7, prompt, choice["token_ids"]
        )
        assert choice["message"]["content"] == tokenizer().decode(choice["token_ids"])
        (served,) = client.server.served
        assert (served.prompt_ids, served.ids, served.spans) == (prompt, choice["token_ids"], [[7, 0, len(served.ids)]])


async def test_render_generate_and_derender_give_the_result_of_chat(standin: Standin) -> None:
    async with standin(script=SCRIPT) as client:
        _, chat = await client.post("/v1/chat/completions", ASK, X_Session_ID="s")
        _, rendered = await client.post("/v1/chat/completions/render", ASK)
        assert rendered["token_ids"] == chat["prompt_token_ids"]
        assert rendered["sampling_params"]["logprobs"] == 0
        _, generated = await client.post("/inference/v1/generate", rendered, X_Session_ID="s")
        assert generated["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
        body = {"model": "policy", "generate_response": generated, "prompt_tokens": 5, "chat_request": ASK}
        _, derendered = await client.post("/v1/chat/completions/derender", body)
        said, told = chat["choices"][0], derendered["choices"][0]
        assert [call["function"] for call in told["message"]["tool_calls"]] == [
            call["function"] for call in said["message"]["tool_calls"]
        ]
        assert told["message"]["content"] == said["message"]["content"] == "I look.\n"
        assert [entry["logprob"] for entry in told["logprobs"]["content"]] == [
            entry["logprob"] for entry in said["logprobs"]["content"]
        ]
        assert (said["finish_reason"], told["finish_reason"]) == ("tool_calls", "stop")


# At 200 a second, the stand-in makes at most 20 tokens in one step, however long its process stood still.
@pytest.mark.parametrize("tokens_per_second", [None, 200])
async def test_a_generate_stream_is_the_answer_in_pieces(standin: Standin, tokens_per_second: float | None) -> None:
    async with standin(tokens_per_second=tokens_per_second) as client:
        body = {"token_ids": [1, 2, 3], "sampling_params": {"logprobs": 0, "ignore_eos": True, "max_tokens": 60}}
        _, whole = await client.post("/inference/v1/generate", body)
        events = [event async for event in client.events("/inference/v1/generate", {**body, "stream": True})]
        ids = [token for event in events for token in event["choices"][0]["token_ids"]]
        logprobs = [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]]
        assert ids == whole["choices"][0]["token_ids"] == made_by(0, [1, 2, 3], 60, ignore_eos=True)
        assert logprobs == whole["choices"][0]["logprobs"]["content"]
        assert [entry["token_id"] for entry in logprobs] == ids
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
        assert len(events) > 1


async def test_a_completion_of_token_ids_streams_the_same_text(standin: Standin) -> None:
    async with standin() as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        _, whole = await client.post("/v1/completions", body)
        events = [event async for event in client.events("/v1/completions", {**body, "stream": True})]
        assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
        assert [t for e in events for t in e["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]
        assert events[0]["choices"][0]["prompt_token_ids"] == [5, 6, 7]
        assert len(whole["choices"][0]["logprobs"]["tokens"]) == 40


async def test_openais_own_client_reads_the_stream_with_tools_as_it_reads_the_answer(standin: Standin) -> None:
    async with standin(script=SCRIPT, tokens_per_second=2000) as client:
        ai = openai.AsyncOpenAI(
            base_url=f"{client.server.url}/v1", api_key="none", default_headers={"X-Session-ID": "s"}
        )
        whole = await ai.chat.completions.create(model="policy", messages=MESSAGES, tools=TOOLS)
        async with ai.chat.completions.stream(model="policy", messages=MESSAGES, tools=TOOLS) as stream:
            streamed = await stream.get_final_completion()
        one: Any = whole.choices[0]
        other = streamed.choices[0]
        assert one.message.tool_calls
        assert other.message.tool_calls
        assert [call.function.arguments for call in one.message.tool_calls] == [
            '{"command": "ls"}',
            '{"command": "pwd"}',
        ]
        assert [(c.function.name, c.function.arguments) for c in other.message.tool_calls] == [
            (c.function.name, c.function.arguments) for c in one.message.tool_calls
        ]
        assert (one.message.content, one.finish_reason) == (other.message.content, other.finish_reason)
        await ai.close()


@pytest.mark.parametrize("drops", [True, False])
async def test_streamed_chat_with_tools_loses_ids_as_old_servers_do(standin: Standin, drops: bool) -> None:
    async with standin(script=SCRIPT, tokens_per_second=500, drops_streamed_ids=drops) as client:
        events = [e async for e in client.events("/v1/chat/completions", {**ASK, "stream": True}, X_Session_ID="s")]
        ids = [token for event in events for token in event["choices"][0].get("token_ids") or []]
        assert (ids == client.server.served[0].ids) is not drops


async def test_script_depends_on_the_turns_so_that_a_retry_gets_the_same_answer(standin: Standin) -> None:
    async with standin(script=SCRIPT) as client:
        for _ in range(2):
            _, first = await client.post("/v1/chat/completions", ASK, X_Session_ID="s")
            assert len(first["choices"][0]["message"]["tool_calls"]) == 2
        answered = [*MESSAGES, first["choices"][0]["message"], {"role": "tool", "content": "a b", "tool_call_id": "x"}]
        _, second = await client.post("/v1/chat/completions", {**ASK, "messages": answered}, X_Session_ID="s")
        assert second["choices"][0]["message"]["content"] == "Done."
        assert client.server.served_in("s")[-1].ids == second["choices"][0]["token_ids"]


async def test_scripted_answer_continues_from_the_tokens_so_far(standin: Standin) -> None:
    def script(prompt: Prompt) -> str:
        assert prompt.text.endswith("assistant\n")
        return "One two three four five six seven."

    async with standin(script=script) as client:
        _, rendered = await client.post("/v1/chat/completions/render", {"messages": MESSAGES})
        _, whole = await client.post("/inference/v1/generate", rendered)
        ids = whole["choices"][0]["token_ids"]
        again = {**rendered, "token_ids": [*rendered["token_ids"], *ids[:9]]}
        _, rest = await client.post("/inference/v1/generate", again)
        assert rest["choices"][0]["token_ids"] == ids[9:]


async def test_stop_strings_cut_the_text_and_not_the_ids(standin: Standin) -> None:
    async with standin(script=lambda prompt: "One two STOP three") as client:
        answer = await client.chat(stop=["STOP"], return_token_ids=True)
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
            "One two ",
            "stop",
            "STOP",
        )
        assert "STOP" in tokenizer().decode(choice["token_ids"])
        events = [
            e
            async for e in client.events("/v1/chat/completions", {"messages": MESSAGES, "stop": "STOP", "stream": True})
        ]
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == "One two "


async def test_tokenize_and_detokenize_give_the_tokens_of_prompts(standin: Standin) -> None:
    async with standin() as client:
        _, chat = await client.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS})
        _, rendered = await client.post("/v1/chat/completions/render", {"messages": MESSAGES, "tools": TOOLS})
        assert chat["tokens"] == rendered["token_ids"]
        _, text = await client.post("/detokenize", {"tokens": chat["tokens"]})
        _, again = await client.post("/tokenize", {"prompt": text["prompt"]})
        assert again["tokens"] == chat["tokens"]


async def test_rendering_a_closed_turn_adds_an_unsampled_newline(standin: Standin) -> None:
    async with standin(script=SCRIPT) as client:
        _, answer = await client.post("/v1/chat/completions", ASK, X_Session_ID="t")
        message = answer["choices"][0]["message"]
        _, closed = await client.post(
            "/v1/chat/completions/render", {**ASK, "messages": [*MESSAGES, message], "add_generation_prompt": False}
        )
        assert answer["choices"][0]["token_ids"][-1] == tokenizer().eos
        assert closed["token_ids"][-2:] == [tokenizer().eos, *tokenizer().encode("\n")]


async def test_completion_is_the_same_through_render_generate_and_derender(standin: Standin) -> None:
    async with standin() as client:
        body = {"prompt": "Once upon", "max_tokens": 20, "ignore_eos": True}
        _, whole = await client.post("/v1/completions", body)
        _, (rendered,) = await client.post("/v1/completions/render", body)
        _, generated = await client.post("/inference/v1/generate", rendered)
        derender = {"model": "policy", "generate_responses": [generated], "prompt_tokens": [len(rendered["token_ids"])]}
        _, derendered = await client.post("/v1/completions/derender", derender)
        assert derendered["choices"][0]["text"] == whole["choices"][0]["text"]
        assert derendered["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        assert (await client.post("/v1/completions/derender", {**derender, "prompt_tokens": []}))[0] == 400


async def test_generate_ends_where_the_context_does(standin: Standin) -> None:
    async with standin(max_model_len=30) as client:
        body = {"token_ids": [1] * 20, "sampling_params": {"max_tokens": 500, "ignore_eos": True}, "session_id": "a"}
        choice = (await client.post("/inference/v1/generate", body))[1]["choices"][0]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (10, "length")
        assert [request.session for request in client.server.served] == ["a"]
