"""The real openai and anthropic packages as clients: whole conversations with tools, streamed and not, and errors."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import ErrorKind
from rollout_api.records import Message, Usage
from tests.support.protocol_server import Fails, Session, serve_protocols

ARGUMENTS = '{"command":  "ls \\u00e9", "n": 1.0}'  # neither package would write it like this
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "number"}}}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "run", "parameters": SCHEMA}}]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "name": "run", "parameters": SCHEMA, "strict": None}]
ANTHROPIC_TOOLS: list[Any] = [{"name": "run", "input_schema": SCHEMA}]

CALLING: Message = {
    "role": "assistant",
    "content": "Let me look.",
    "reasoning_content": "I should list files.",
    "tool_calls": [
        {"id": f"call_{i}", "type": "function", "function": {"name": "run", "arguments": ARGUMENTS}} for i in range(2)
    ],
}
DONE: Message = {"role": "assistant", "content": "All done here.", "reasoning_content": "That was it."}


def model(messages: list[Message]) -> ModelReply:
    """A model that makes two tool calls, then ends, and then answers `thanks` to every further message."""
    answers = sum(message["role"] == "assistant" for message in messages)
    message = (
        (CALLING, DONE)[answers] if answers < 2 else {"role": "assistant", "content": f"You are welcome {answers}."}
    )
    reason = "tool_calls" if message is CALLING else "stop"
    return ModelReply(message, reason, usage=Usage(prompt_tokens=20, completion_tokens=7, cached_tokens=4))


TOOL_RESULTS: list[Message] = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"file{i}"} for i in range(2)]
CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be good."},
    {"role": "user", "content": "List files."},
    CALLING,
    *TOOL_RESULTS,
    DONE,
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with serve_protocols() as session:
        yield session


@pytest.fixture
async def gpt(session: Session) -> AsyncIterator[openai.AsyncOpenAI]:
    session.model = model
    async with openai.AsyncOpenAI(base_url=f"{session.url}/v1", api_key="k", max_retries=2) as client:
        yield client


@pytest.fixture
async def claude(session: Session) -> AsyncIterator[anthropic.AsyncAnthropic]:
    session.model = model
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key="k", max_retries=2) as client:
        yield client


def assert_one_conversation(session: Session) -> None:
    """Check that the model gets its own messages back unchanged each time, and that each request extends the turn
    before.
    """
    assert [known.turn for known in session.known] == [None, 0, 1]
    assert session.known[-1].messages == CONVERSATION
    for before, after in zip(session.known, session.known[1:], strict=False):
        assert after.messages[: len(before.messages)] == before.messages


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_completions_with_tools(session: Session, gpt: openai.AsyncOpenAI, streamed: bool) -> None:
    messages: list[Any] = [dict(message) for message in CONVERSATION[:2]]

    async def ask() -> Any:
        if not streamed:
            return await gpt.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
        async with gpt.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as stream:
            return await stream.get_final_completion()

    first = (await ask()).choices[0]
    assert first.finish_reason == "tool_calls"
    assert [call.function.arguments for call in first.message.tool_calls] == [ARGUMENTS] * 2
    messages += [first.message, *TOOL_RESULTS]
    second = (await ask()).choices[0].message
    assert second.content == DONE["content"]
    messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Thanks."}]
    assert (await ask()).choices[0].message.content == "You are welcome 2."
    assert_one_conversation(session)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("chained", [False, True])
async def test_responses_with_tools(session: Session, gpt: openai.AsyncOpenAI, streamed: bool, chained: bool) -> None:
    previous: str | None = None
    items: list[Any] = []

    async def ask(new: list[Any]) -> Any:
        nonlocal previous, items
        items = new if chained else [*items, *new]
        asked: dict[str, Any] = {"model": "m", "input": items, "instructions": "Be good.", "tools": RESPONSES_TOOLS}
        if chained:
            asked["previous_response_id"] = previous
        if streamed:
            async with gpt.responses.stream(**asked) as stream:
                response: Any = await stream.get_final_response()
        else:
            response = await gpt.responses.create(**asked)
        previous = response.id
        items += [item.to_dict() for item in response.output]
        return response

    first = await ask([{"role": "user", "content": "List files."}])
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.call_id, call.arguments) for call in calls] == [("call_0", ARGUMENTS), ("call_1", ARGUMENTS)]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"file{i}"} for i, call in enumerate(calls)
    ]
    second = await ask(outputs)
    assert second.output_text == DONE["content"]
    assert second.usage.input_tokens_details.cached_tokens == 4
    third = await ask([{"role": "user", "content": [{"type": "input_text", "text": "Thanks."}]}])
    assert third.output_text == "You are welcome 2."
    assert_one_conversation(session)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}])
async def test_anthropic_messages_with_tools(
    session: Session, claude: anthropic.AsyncAnthropic, streamed: bool, thinking: Any
) -> None:
    messages: list[Any] = [{"role": "user", "content": "List files."}]

    async def ask() -> Any:
        asked: dict[str, Any] = {
            "model": "m",
            "max_tokens": 2000,
            # What Claude Code sends: the first block differs in every request.
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cch={len(messages)};"},
                {"type": "text", "text": "Be good.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": messages,
            "tools": ANTHROPIC_TOOLS,
            "thinking": thinking,
        }
        if streamed:
            async with claude.messages.stream(**asked) as stream:
                return await stream.get_final_message()
        return await claude.messages.create(**asked)

    first = await ask()
    assert (first.stop_reason, first.usage.input_tokens, first.usage.cache_read_input_tokens) == ("tool_use", 16, 4)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [json.loads(ARGUMENTS)] * 2
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"file{i}"} for i, call in enumerate(calls)]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await ask()
    assert [block.text for block in second.content if block.type == "text"] == [DONE["content"]]
    messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Thanks."}]
    assert (await ask()).content[0].text == "You are welcome 2."
    assert_one_conversation(session)


async def test_completions_give_the_model_a_bare_prompt(session: Session, gpt: openai.AsyncOpenAI) -> None:
    session.model = lambda messages: ModelReply(
        {"role": "assistant", "content": " upon a time"}, "length", completion_token_ids=[7, 8], logprobs=[-0.5, -0.25]
    )
    whole = await gpt.completions.create(model="m", prompt="Once", max_tokens=2, logprobs=1)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" upon a time", "length")
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.token_logprobs == [-0.5, -0.25]
    chunks = [chunk async for chunk in await gpt.completions.create(model="m", prompt=[1, 2, 3], stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == " upon a time"
    assert [request.messages for request in session.requests] == [
        [{"role": "prompt", "content": "Once"}],
        [{"role": "prompt", "token_ids": [1, 2, 3]}],
    ]
    assert [request.sampling.max_tokens for request in session.requests] == [2, 16]


async def test_token_ids_and_logprobs_reach_a_trainer_that_asks_for_them(
    session: Session, gpt: openai.AsyncOpenAI
) -> None:
    session.model = lambda messages: ModelReply(
        {"role": "assistant", "content": "ok"},
        "stop",
        prompt_token_ids=[1, 2],
        completion_token_ids=[3],
        logprobs=[-0.125],
    )
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    whole: Any = await gpt.chat.completions.create(**asked)
    assert (whole.prompt_token_ids, whole.choices[0].token_ids) == ([1, 2], [3])
    assert [token.logprob for token in whole.choices[0].logprobs.content] == [-0.125]
    chunks: list[Any] = [chunk async for chunk in await gpt.chat.completions.create(**asked, stream=True)]
    assert (chunks[-1].prompt_token_ids, chunks[-1].choices[0].token_ids) == ([1, 2], [3])
    assert [token.logprob for token in chunks[-1].choices[0].logprobs.content] == [-0.125]


OPENAI_ERRORS = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    413: openai.APIStatusError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
}
ANTHROPIC_ERRORS = {
    400: anthropic.BadRequestError,
    401: anthropic.AuthenticationError,
    403: anthropic.PermissionDeniedError,
    404: anthropic.NotFoundError,
    409: anthropic.ConflictError,
    413: anthropic.APIStatusError,
    429: anthropic.RateLimitError,
    500: anthropic.InternalServerError,
}
ASKED: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("kind", ErrorKind)
async def test_the_openai_package_raises_its_own_error_for_each_failure(
    session: Session, gpt: openai.AsyncOpenAI, kind: ErrorKind
) -> None:
    def fails(messages: list[Message]) -> ModelReply:
        raise Fails(kind)

    session.model = fails
    once = gpt.with_options(max_retries=0)
    for ask in (
        once.chat.completions.create(model="m", messages=ASKED),
        once.completions.create(model="m", prompt="hi"),
        once.responses.create(model="m", input="hi"),
    ):
        with pytest.raises(OPENAI_ERRORS[min(kind.status, 500)], match="the model failed") as raised:
            await ask
        assert raised.value.status_code == kind.status
        assert raised.value.code == (None if kind is ErrorKind.BAD_REQUEST else kind.code)


@pytest.mark.parametrize("kind", ErrorKind)
async def test_the_anthropic_package_raises_its_own_error_for_each_failure(
    session: Session, claude: anthropic.AsyncAnthropic, kind: ErrorKind
) -> None:
    def fails(messages: list[Message]) -> ModelReply:
        raise Fails(kind)

    session.model = fails
    with pytest.raises(ANTHROPIC_ERRORS[min(kind.status, 500)], match="the model failed") as raised:
        await claude.with_options(max_retries=0).messages.create(model="m", max_tokens=9, messages=ASKED)
    body: Any = raised.value.body
    assert (raised.value.status_code, body["type"], body["error"]["code"]) == (kind.status, "error", kind.code)
    if kind is ErrorKind.CONTEXT_EXCEEDED:
        assert "prompt is too long" in body["error"]["message"]


@pytest.mark.parametrize("kind", [ErrorKind.SESSION_ENDED, ErrorKind.OVER_BUDGET])
async def test_the_packages_do_not_retry_permanent_errors(
    session: Session, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, kind: ErrorKind
) -> None:
    def fails(messages: list[Message]) -> ModelReply:
        raise Fails(kind)

    session.model = fails
    with pytest.raises(openai.APIStatusError):
        await gpt.chat.completions.create(model="m", messages=ASKED)
    with pytest.raises(anthropic.APIStatusError):
        await claude.messages.create(model="m", max_tokens=9, messages=ASKED)
    assert len(session.requests) == 2


async def test_an_image_is_refused_with_a_message(
    session: Session, gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    url = "data:image/png;base64,AA=="
    part: Any = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(openai.BadRequestError, match="reads text only") as in_chat:
        await gpt.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
    assert in_chat.value.param == "messages[0].content[0]"
    image: Any = {"type": "input_image", "image_url": url, "detail": "auto"}
    with pytest.raises(openai.BadRequestError, match="reads text only"):
        await gpt.responses.create(model="m", input=[{"role": "user", "content": [image]}])
    source: Any = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        await claude.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]
        )
    assert session.requests == []
