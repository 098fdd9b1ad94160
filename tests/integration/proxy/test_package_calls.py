"""72 calls of the openai and anthropic packages, as agents make them, against a proxy. Their own types check the answers.

Most go to an upstream without token ids, the last ones to a stand-in for vLLM.
"""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from pydantic import BaseModel

from tests.support.chat_upstream import NOT_TAKEN, THOUGHT
from tests.support.package_servers import Servers

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "run", "parameters": SCHEMA}}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": "run", "parameters": SCHEMA, "strict": None}]
ANTHROPIC_TOOLS: list[Any] = [{"name": "run", "input_schema": SCHEMA}]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def strict(*objects: Any) -> None:
    """Check answers strictly against the package's own types, which the package itself does not do."""
    for value in objects:
        type(value).model_validate(value.to_dict())


def notes(raw: Any) -> str:
    return str(raw.headers.get("x-rollout-notes", ""))


# Chat completions


def test_chat_is_answered(servers: Servers) -> None:
    reply = servers.gpt().chat.completions.create(model="m", messages=said("hi there"))
    assert reply.choices[0].message.content == "You said: hi there"
    strict(reply)


def test_chat_stream_has_usage(servers: Servers) -> None:
    stream = servers.gpt().chat.completions.create(
        model="m", messages=said("hi there"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 12
    strict(*chunks)


def test_chat_calls_a_tool(servers: Servers) -> None:
    reply = servers.gpt().chat.completions.create(model="m", messages=said("tool"), tools=TOOLS)
    choice: Any = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"command": "ls"}
    strict(reply)


def test_chat_stream_has_parallel_tool_calls(servers: Servers) -> None:
    stream = servers.gpt().chat.completions.create(model="m", messages=said("parallel"), tools=TOOLS, stream=True)
    chunks = list(stream)
    calls = [part for chunk in chunks if chunk.choices for part in chunk.choices[0].delta.tool_calls or []]
    assert [part.index for part in calls] == [0, 1]
    strict(*chunks)


def test_chat_stream_helper_puts_tool_calls_together(servers: Servers) -> None:
    with servers.gpt().chat.completions.stream(model="m", messages=said("parallel"), tools=TOOLS) as stream:
        message: Any = stream.get_final_completion().choices[0].message
    assert [call.function.arguments for call in message.tool_calls] == ['{"command": "a"}', '{"command": "b"}']


def test_chat_parse_helper_sends_its_schema(servers: Servers) -> None:
    class Form(BaseModel):
        x: int

    with contextlib.suppress(ValueError):  # the answer is no JSON
        servers.gpt().chat.completions.parse(model="m", messages=said("hi"), response_format=Form)
    assert servers.asked["response_format"]["type"] == "json_schema"


def test_chat_answer_has_reasoning_under_both_names(servers: Servers) -> None:
    message = servers.gpt().chat.completions.create(model="m", messages=said("reason")).choices[0].message
    extra: Any = message.model_extra
    assert extra["reasoning"] == extra["reasoning_content"] == THOUGHT


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
def test_chat_stream_has_reasoning_while_the_model_thinks(servers: Servers, tools: list[Any]) -> None:
    given: Any = {"tools": tools} if tools else {}
    kinds = ""
    servers.upstream.go_on.clear()
    stream = servers.gpt().chat.completions.create(model="m", messages=said("reason held"), stream=True, **given)
    for chunk in stream:
        delta: Any = chunk.choices[0].delta if chunk.choices else None
        if delta is not None and delta.model_extra.get("reasoning"):
            servers.upstream.go_on.set()
            kinds += "r"
        elif delta is not None and delta.content:
            kinds += "t"
    assert kinds.startswith("r")
    assert kinds.endswith("t")
    assert "tr" not in kinds


def test_chat_stream_begins_before_the_model_answers(servers: Servers) -> None:
    servers.upstream.go_on.clear()
    stream = servers.gpt().chat.completions.create(model="m", messages=said("slow held"), tools=TOOLS, stream=True)
    servers.upstream.go_on.set()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices).startswith("You said")


def test_chat_usage_has_reasoning_tokens(servers: Servers) -> None:
    usage: Any = servers.gpt().chat.completions.create(model="m", messages=said("reason")).usage
    assert usage.completion_tokens_details.reasoning_tokens == 5


def test_chat_image_of_the_user_is_refused(servers: Servers) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]
    with pytest.raises(openai.BadRequestError, match="reads text only") as refused:
        servers.gpt().chat.completions.create(model="m", messages=messages)
    assert refused.value.param == "messages[0].content[1]"


def test_chat_with_several_choices_is_refused(servers: Servers) -> None:
    with pytest.raises(openai.BadRequestError, match="n: 2"):
        servers.gpt().chat.completions.create(model="m", messages=said("hi"), n=2)


@pytest.mark.parametrize("count", [0, 2])
def test_chat_top_logprobs_are_dropped(servers: Servers, count: int) -> None:
    raw = servers.gpt().chat.completions.with_raw_response.create(
        model="m", messages=said("hi"), logprobs=True, top_logprobs=count
    )
    assert ("top_logprobs" in notes(raw)) == bool(count)
    strict(raw.parse())


def test_chat_errors_are_exceptions_of_the_package(servers: Servers) -> None:
    ask = servers.gpt().chat.completions.create
    with pytest.raises(openai.NotFoundError) as no_model:
        ask(model="zz", messages=said("x"))
    with pytest.raises(openai.BadRequestError) as no_messages:
        ask(model="m", messages=[])
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(model="m", messages=said("toolong"))
    with (
        openai.OpenAI(base_url=f"{servers.plain_url}/v1", api_key="sk-x", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as no_key,
    ):
        stranger.models.list()
    codes = [raised.value.code for raised in (no_model, no_messages, too_long, no_key)]
    assert codes == ["model_not_found", None, "context_length_exceeded", "invalid_api_key"]


@pytest.mark.parametrize(("word", "status"), [("e429", 503), ("e500", 502)])
def test_chat_failing_model_has_a_status_that_clients_retry(servers: Servers, word: str, status: int) -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        servers.gpt(hasty=True).chat.completions.create(model="m", messages=said(word))
    assert failed.value.status_code in (status, 504), "on a loaded machine the second ends before the first try"
    assert failed.value.response.headers["retry-after"] == "1"


def test_chat_fields_without_effect_are_accepted(servers: Servers) -> None:
    raw = servers.gpt().chat.completions.with_raw_response.create(
        model="m",
        messages=said("hi"),
        store=True,
        service_tier="auto",
        metadata={"a": "b"},
        user="u",
        prompt_cache_key="k",
        safety_identifier="q",
        verbosity="low",
    )
    assert notes(raw) == ""
    assert servers.asked["verbosity"] == "low"


def test_chat_custom_tool_is_called_with_text(servers: Servers) -> None:
    client = servers.gpt()
    tools: list[Any] = [{"type": "custom", "custom": {"name": "patch"}}]
    messages = said("patch")
    reply = client.chat.completions.create(model="m", messages=messages, tools=tools)
    calls: Any = reply.choices[0].message.tool_calls
    [made] = calls
    assert (made.type, made.custom.name, made.custom.input) == ("custom", "patch", "*** Begin\n+x")
    strict(reply)
    messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "ok"}, *said("go on")]
    client.chat.completions.create(model="m", messages=messages, tools=tools)
    assert servers.asked["messages"][1]["tool_calls"][0]["function"]["name"] == "patch"


def test_chat_allowed_tools_choose_the_mode(servers: Servers) -> None:
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "run"}}]}
    raw = servers.gpt().chat.completions.with_raw_response.create(
        model="m", messages=said("hi"), tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    assert notes(raw) == "tool_choice.allowed_tools: only its mode is applied"
    assert servers.asked["tool_choice"] == "required"


def test_chat_deprecated_functions_are_dropped(servers: Servers) -> None:
    raw = servers.gpt().chat.completions.with_raw_response.create(
        model="m", messages=said("hi"), functions=[{"name": "f"}]
    )
    assert notes(raw) == "functions: deprecated; use tools"


def test_chat_unknown_fields_are_passed_on_unless_the_server_refuses_them(servers: Servers) -> None:
    client = servers.gpt()
    for unknown in ("newest", NOT_TAKEN):
        client.chat.completions.create(model="m", messages=said("hi"), extra_body={unknown: 1})
        assert (unknown in servers.asked) == (unknown == "newest")
    count = len(servers.upstream.bodies)
    raw = client.chat.completions.with_raw_response.create(model="m", messages=said("hi"), extra_body={NOT_TAKEN: 1})
    assert notes(raw) == f"{NOT_TAKEN}: refused by the inference server"
    assert len(servers.upstream.bodies) == count + 1


def test_models_are_listed_and_retrieved(servers: Servers) -> None:
    client = servers.gpt()
    strict(client.models.list().data[0], client.models.retrieve("m"))


def test_chat_tells_that_the_answer_was_filtered(servers: Servers) -> None:
    reply = servers.gpt().chat.completions.create(model="m", messages=said("filter"))
    assert reply.choices[0].finish_reason == "content_filter"


# Responses


def test_response_is_answered(servers: Servers) -> None:
    response = servers.gpt().responses.create(model="m", input="hi you")
    assert response.output_text == "You said: hi you"
    strict(response)


def test_response_stream_is_in_order(servers: Servers) -> None:
    events: list[Any] = list(servers.gpt().responses.create(model="m", input="hi you", stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    strict(*events)


def test_response_stream_helper_puts_calls_together(servers: Servers) -> None:
    with servers.gpt().responses.stream(model="m", input="parallel", tools=RESPONSE_TOOLS) as stream:
        assert sum(item.type == "function_call" for item in stream.get_final_response().output) == 2


def test_response_reasoning_is_streamed_first(servers: Servers) -> None:
    client = servers.gpt()
    response = client.responses.create(model="m", input="reasontool", tools=RESPONSE_TOOLS)
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    events: list[Any] = list(client.responses.create(model="m", input="reason", stream=True))
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == THOUGHT
    strict(response, *events)


def test_response_usage_has_reasoning_tokens(servers: Servers) -> None:
    usage: Any = servers.gpt().responses.create(model="m", input="reason").usage
    assert usage.output_tokens_details.reasoning_tokens == 5


def test_response_continues_another_with_new_instructions(servers: Servers) -> None:
    client = servers.gpt()
    first = client.responses.create(model="m", input="one x", instructions="old")
    client.responses.create(model="m", input="two y", previous_response_id=first.id, instructions="new")
    messages = servers.asked["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"] == "new"


def test_response_that_is_cut_off_is_incomplete(servers: Servers) -> None:
    response: Any = servers.gpt().responses.create(model="m", input="length")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    strict(response)


def test_response_stream_that_is_cut_off_ends_as_incomplete(servers: Servers) -> None:
    events = list(servers.gpt().responses.create(model="m", input="length", stream=True))
    assert events[-1].type == "response.incomplete"


def test_response_to_codex_is_made(servers: Servers) -> None:
    raw = servers.gpt().responses.with_raw_response.create(
        model="m",
        input=said("reason"),
        include=["reasoning.encrypted_content"],
        store=False,
        reasoning={"effort": "high", "summary": "auto"},
        parallel_tool_calls=False,
        prompt_cache_key="x",
        text={"verbosity": "low"},
        extra_body={"client_metadata": {"a": "b"}},
    )
    response: Any = raw.parse()
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (response.store, notes(raw)) == (False, "")


def test_response_custom_tool_is_called_with_text(servers: Servers) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools: list[Any] = [*RESPONSE_TOOLS, {"type": "custom", "name": "patch", "format": grammar}]
    client = servers.gpt()
    events: list[Any] = list(client.responses.create(model="m", input="patch", tools=tools, stream=True))
    [item] = events[-1].response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", "*** Begin\n+x")
    strict(*events)
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
    again: list[Any] = [*said("patch"), item.to_dict(), output, *said("go on")]
    client.responses.create(model="m", input=again, tools=tools)
    assert [message["role"] for message in servers.asked["messages"]] == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize("tools", [[*RESPONSE_TOOLS, {"type": "web_search"}], [{"type": "local_shell"}]])
def test_response_tool_of_openai_is_dropped(servers: Servers, tools: list[Any]) -> None:
    raw = servers.gpt().responses.with_raw_response.create(model="m", input="hi", tools=tools)
    assert "only function and custom tools are supported" in notes(raw)
    assert len(servers.asked.get("tools", [])) == len(tools) - 1


def test_response_image_of_a_tool_is_replaced_by_text(servers: Servers) -> None:
    client = servers.gpt()
    calls: Any = client.responses.create(model="m", input="tool", tools=RESPONSE_TOOLS).output
    [made] = calls
    image = [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}]
    output = {"type": "function_call_output", "call_id": made.call_id, "output": image}
    items: list[Any] = [*said("tool"), made.to_dict(), output]
    raw = client.responses.with_raw_response.create(model="m", tools=RESPONSE_TOOLS, input=items)
    assert notes(raw).startswith("input[2].output[0]: image")
    assert servers.asked["messages"][-1]["content"] == "[image left out: this model reads text only]"


def test_response_is_retrieved_counted_compacted_and_deleted(servers: Servers) -> None:
    client = servers.gpt()
    made = client.responses.create(model="m", input="hi x", instructions="Be good.", tools=RESPONSE_TOOLS)
    stored = client.responses.retrieve(made.id)
    assert (stored.id, stored.output_text, stored.instructions) == (made.id, made.output_text, "Be good.")
    assert (stored.usage, stored.created_at) == (made.usage, made.created_at)
    items: Any = client.responses.input_items.list(made.id).data
    assert [item.content[0].text for item in items] == ["hi x"]
    counted = client.responses.input_tokens.with_raw_response.count(model="m", input="hi")
    assert counted.parse().input_tokens > 0
    assert "an estimate" in notes(counted)
    conversation: list[Any] = [*said("hi x"), *made.output]
    compacted: Any = client.responses.compact(model="m", input=conversation)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    client.responses.create(model="m", input=[compacted.output[-1].to_dict(), *said("go on")])
    assert servers.asked["messages"][0]["content"].startswith("Summary of the conversation so far:\nYou said:")
    strict(stored, *items, counted.parse(), compacted.output[-1])
    with pytest.raises(openai.BadRequestError, match="is complete"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_response_fields_without_effect_are_accepted(servers: Servers) -> None:
    raw = servers.gpt().responses.with_raw_response.create(
        model="m",
        input="hi",
        truncation="auto",
        max_tool_calls=3,
        background=False,
        service_tier="auto",
        safety_identifier="x",
        top_logprobs=0,
    )
    assert notes(raw) == ""


def test_response_of_a_stored_conversation_is_refused(servers: Servers) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        servers.gpt().responses.create(model="m", input="hi", conversation="conv_1")


def test_response_allowed_tools_choose_the_mode(servers: Servers) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "run"}]}
    servers.gpt().responses.create(model="m", input="hi", tools=RESPONSE_TOOLS, tool_choice=choice)
    assert servers.asked["tool_choice"] == "required"


def test_response_repeats_its_tools(servers: Servers) -> None:
    response = servers.gpt().responses.create(model="m", input="hi", tools=RESPONSE_TOOLS, tool_choice="auto")
    assert response.tools[0].type == "function"
    strict(response)


def test_response_tells_that_it_was_filtered(servers: Servers) -> None:
    response: Any = servers.gpt().responses.create(model="m", input="filter")
    assert response.incomplete_details.reason == "content_filter"


# Anthropic's Messages


def test_message_is_answered(servers: Servers) -> None:
    message: Any = servers.claude().messages.create(model="m", max_tokens=50, messages=said("hi there"))
    assert (message.content[0].text, message.stop_reason) == ("You said: hi there", "end_turn")
    strict(message)


def test_message_stream_is_in_order(servers: Servers) -> None:
    events = list(servers.claude().messages.create(model="m", max_tokens=50, messages=said("hi"), stream=True))
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    expected = ["content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert kinds == ["message_start", *expected]
    strict(*events)


def test_message_start_has_the_input_tokens_that_are_known(servers: Servers) -> None:
    client = servers.claude(exact=True)
    start, *rest = list(client.messages.create(model="m", max_tokens=50, messages=said("hi there"), stream=True))
    ends: list[Any] = [event for event in rest if event.type == "message_delta"]
    counted = client.messages.count_tokens(model="m", messages=said("hi there"))
    assert start.type == "message_start"
    assert start.message.usage.input_tokens == counted.input_tokens > 0
    assert ends[0].usage.input_tokens + ends[0].usage.cache_read_input_tokens == counted.input_tokens


def test_message_stream_helper_puts_calls_together(servers: Servers) -> None:
    with servers.claude().messages.stream(
        model="m", max_tokens=50, messages=said("parallel"), tools=ANTHROPIC_TOOLS
    ) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    strict(message)


def tool_round(servers: Servers, client: anthropic.Anthropic, *following: Any, **result: Any) -> Any:
    """Make a tool call, and send its result; return the raw reply to that."""
    first = client.messages.create(model="m", max_tokens=50, messages=said("tool"), tools=ANTHROPIC_TOOLS)
    calls: Any = first.content
    [made] = calls
    messages: list[Any] = [
        *said("tool"),
        {"role": "assistant", "content": [made.to_dict()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": made.id, **result}, *following]},
    ]
    return client.messages.with_raw_response.create(model="m", max_tokens=50, tools=ANTHROPIC_TOOLS, messages=messages)


def test_message_tool_loop_continues(servers: Servers) -> None:
    tool_round(servers, servers.claude(), {"type": "text", "text": "next word"}, content="f1")
    assert [message["role"] for message in servers.asked["messages"]] == ["user", "assistant", "tool", "user"]


def test_message_image_of_a_tool_is_replaced_by_text(servers: Servers) -> None:
    raw = tool_round(servers, servers.claude(), content=[{"type": "text", "text": "one file"}, IMAGE])
    assert notes(raw) == "messages[2].content[0].content[1]: image; this model reads text only"
    assert servers.asked["messages"][-1]["content"] == "one file\n[image left out: this model reads text only]"


def test_message_failed_tool_is_visible_to_the_model(servers: Servers) -> None:
    tool_round(servers, servers.claude(), content="bad", is_error=True)
    assert servers.asked["messages"][-1]["content"] == "Error: bad"


def test_message_thinking_comes_before_the_text(servers: Servers) -> None:
    client = servers.claude()
    asked: Any = {"model": "m", "max_tokens": 3000, "messages": said("reason"), "thinking": THINKING}
    message = client.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text"]
    with client.messages.stream(**asked) as stream:
        streamed: Any = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert (streamed.content[0].thinking, bool(streamed.content[0].signature)) == (THOUGHT, True)
    strict(message)


def test_message_stream_has_thinking_and_pings_while_the_model_thinks(servers: Servers) -> None:
    url, key = servers.key()
    events: list[str] = []
    servers.upstream.go_on.clear()
    body = {"model": "m", "max_tokens": 3000, "messages": said("reason held"), "thinking": THINKING, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/messages", json=body, headers={"x-api-key": key}, timeout=100) as reply:
        for line in reply.iter_lines():
            if line.startswith("event: "):
                events.append(line.removeprefix("event: "))
                if "content_block_delta" in events and "ping" in events:
                    servers.upstream.go_on.set()
    assert events[-1] == "message_stop"
    with servers.claude().messages.stream(model="m", max_tokens=9, messages=said("slow 2")) as stream:
        assert stream.get_final_message().stop_reason == "end_turn", "the package takes pings"


def test_message_tokens_are_counted(servers: Servers) -> None:
    raw = servers.claude().messages.with_raw_response.count_tokens(model="m", messages=said("hi"))
    assert raw.parse().input_tokens > 0
    assert "an estimate" in notes(raw)
    exact = servers.claude(exact=True).messages.with_raw_response.count_tokens(
        model="m", messages=said("hi"), tools=ANTHROPIC_TOOLS, system="Be good."
    )
    assert exact.parse().input_tokens > 10
    assert notes(exact) == ""


def test_message_that_continues_a_partial_answer_is_refused(servers: Servers) -> None:
    messages: list[Any] = [*said("hi"), {"role": "assistant", "content": "{"}]
    with pytest.raises(anthropic.BadRequestError, match="cannot continue"):
        servers.claude().messages.create(model="m", max_tokens=50, messages=messages)


def test_message_image_of_the_user_is_refused(servers: Servers) -> None:
    messages: list[Any] = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "hi"}]}]
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        servers.claude().messages.create(model="m", max_tokens=50, messages=messages)


def test_message_web_search_is_dropped(servers: Servers) -> None:
    tools: list[Any] = [{"type": "web_search_20250305", "name": "web_search"}]
    raw = servers.claude().messages.with_raw_response.create(model="m", max_tokens=50, messages=said("hi"), tools=tools)
    assert notes(raw).startswith("tools[0]: web_search_20250305")


def test_message_bash_and_editor_are_functions_for_the_model(servers: Servers) -> None:
    tools: list[Any] = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ]
    raw = servers.claude().messages.with_raw_response.create(model="m", max_tokens=50, messages=said("hi"), tools=tools)
    assert notes(raw) == ""
    bash, editor = (tool["function"] for tool in servers.asked["tools"])
    assert (bash["name"], "command" in bash["parameters"]["properties"]) == ("bash", True)
    assert editor["name"] == "str_replace_based_edit_tool"


def test_message_sampling_reaches_the_model(servers: Servers) -> None:
    marked: Any = {"type": "ephemeral"}
    servers.claude().messages.create(
        model="m",
        max_tokens=50,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi you", "cache_control": marked}]}],
        stop_sequences=["X"],
        metadata={"user_id": "u"},
        system=[{"type": "text", "text": "s", "cache_control": marked}],
        extra_body={"top_k": 5},
    )
    assert (servers.asked["top_k"], servers.asked["stop"]) == (5, ["X"])


def test_message_context_management_is_accepted(servers: Servers) -> None:
    servers.claude().beta.messages.create(
        model="m",
        max_tokens=50,
        messages=said("hi"),
        betas=["context-management-2025-06-27"],
        context_management={"edits": []},
    )


def test_message_fields_of_a_beta_are_dropped(servers: Servers) -> None:
    raw = servers.claude().beta.messages.with_raw_response.create(
        model="m",
        max_tokens=50,
        messages=said("hi"),
        extra_body={"fallbacks": [{"model": "x"}], "compaction": {"type": "auto"}, "newest": 1},
    )
    assert [note.partition(":")[0] for note in notes(raw).split("; ")] == ["compaction", "fallbacks", "newest"]


def test_message_with_a_number_out_of_range_is_refused(servers: Servers) -> None:
    for wrong in ({"max_tokens": 0}, {"max_tokens": 5, "extra_body": {"temperature": 30.0}}):
        fields: Any = wrong
        with pytest.raises(anthropic.BadRequestError):
            servers.claude().messages.create(model="m", messages=said("hi"), **fields)


def test_message_errors_have_anthropics_body(servers: Servers) -> None:
    client, found = servers.claude(), []
    with pytest.raises(anthropic.NotFoundError) as no_model:
        client.messages.create(max_tokens=5, model="zz", messages=said("x"))
    with pytest.raises(anthropic.BadRequestError) as too_long:
        client.messages.create(max_tokens=5, model="m", messages=said("toolong"))
    with pytest.raises(anthropic.NotFoundError) as no_such_model:
        client.models.retrieve("zz")
    for raised in (no_model, too_long, no_such_model):
        body: Any = raised.value.body
        found.append(body["error"]["type"])
    assert found == ["not_found_error", "invalid_request_error", "not_found_error"]
    assert "prompt is too long" in too_long.value.message


def test_anthropic_models_are_listed(servers: Servers) -> None:
    client = servers.claude()
    strict(*client.models.list().data, client.models.retrieve("m"))


def test_message_tool_choice_reaches_the_model(servers: Servers) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    servers.claude().messages.create(
        model="m", max_tokens=50, messages=said("tool"), tools=ANTHROPIC_TOOLS, tool_choice=choice
    )
    assert (servers.asked["tool_choice"], servers.asked["parallel_tool_calls"]) == ("required", False)


def test_replies_have_request_ids(servers: Servers) -> None:
    message = servers.claude().messages.with_raw_response.create(model="m", max_tokens=5, messages=said("hi"))
    chat = servers.gpt().chat.completions.with_raw_response.create(model="m", messages=said("hi"))
    assert message.headers["request-id"].startswith("req_")
    assert chat.headers["x-request-id"] != message.headers["x-request-id"]
    with pytest.raises(openai.BadRequestError) as refused:
        servers.gpt().chat.completions.create(model="m", messages=said("hi"), n=2)
    assert str(refused.value.request_id).startswith("req_")


# The stand-in for vLLM


def test_exact_chat_stream_with_tools_keeps_token_ids(servers: Servers) -> None:
    stream = servers.gpt(exact=True, name="tools").chat.completions.create(
        model="m", messages=said("go"), tools=TOOLS, stream=True, extra_body={"return_token_ids": True}
    )
    last: Any = [chunk.choices[0] for chunk in stream if chunk.choices][-1]
    assert last.finish_reason == "tool_calls"
    assert last.model_extra["token_ids"]


def test_exact_message_has_parallel_calls(servers: Servers) -> None:
    message = servers.claude(exact=True, name="par").messages.create(
        model="m", max_tokens=300, messages=said("go"), tools=ANTHROPIC_TOOLS
    )
    assert [block.type for block in message.content] == ["tool_use", "tool_use"]
    strict(message)


def test_exact_message_names_its_stop_sequence(servers: Servers) -> None:
    message = servers.claude(exact=True, name="stop").messages.create(
        model="m", max_tokens=300, messages=said("go"), stop_sequences=["STOP"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")


@pytest.mark.parametrize("count", [1, 3])
def test_exact_completion_has_logprobs(servers: Servers, count: int) -> None:
    raw = servers.gpt(exact=True).completions.with_raw_response.create(
        model="m", prompt="hello world", max_tokens=5, logprobs=count
    )
    completion: Any = raw.parse()
    assert completion.choices[0].logprobs.tokens[0].startswith("token_id:")
    assert bool(notes(raw)) == (count > 1)
    strict(completion)


def test_exact_completion_of_several_prompts_is_refused(servers: Servers) -> None:
    with pytest.raises(openai.BadRequestError, match="each prompt"):
        servers.gpt(exact=True).completions.create(model="m", prompt=["a", "b"], max_tokens=5)


def test_exact_calls_in_parallel_are_separate_samples(servers: Servers) -> None:
    client = servers.gpt(exact=True)

    def ask(_: int) -> str:
        return client.chat.completions.create(model="m", messages=said("q"), max_tokens=20).id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 8


def test_exact_chat_names_tokens_by_their_ids(servers: Servers) -> None:
    reply = servers.gpt(exact=True).chat.completions.create(model="m", messages=said("q"), logprobs=True)
    logprobs: Any = reply.choices[0].logprobs
    assert logprobs.content[0].token.startswith("token_id:")


def test_exact_chat_drops_fields_that_vllm_ignores(servers: Servers) -> None:
    raw = servers.gpt(exact=True).chat.completions.with_raw_response.create(
        model="m", messages=said("q"), verbosity="low", extra_body={"newest": 1}
    )
    assert notes(raw) == (
        "newest: without effect at the inference server; verbosity: without effect at the inference server"
    )
