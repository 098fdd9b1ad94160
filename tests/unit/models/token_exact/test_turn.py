"""Which ids of an answer are its text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from agent_runtime.models.base import ModelReply
from agent_runtime.models.http_client import CallOptions
from agent_runtime.models.token_exact.answer_text import Stops
from agent_runtime.models.token_exact.routes import Ending, ModelFacts, Progress, Rendered, TokenRoutes
from agent_runtime.models.token_exact.turn import ChatForm, TokenTurn
from tests.support.model_requests import model_request

END_OF_TURN, END_OF_TEXT = 1, 2
OPTIONS = CallOptions(1, 1)


class LetterRoutes(TokenRoutes):
    """Routes of a model whose tokens are letters, and which samples these ids."""

    def __init__(self, sampled: Sequence[int], finish: str, sampling: Mapping[str, Any]) -> None:
        self._sampled, self._finish, self._sampling = sampled, finish, sampling

    async def facts(self, options: CallOptions) -> ModelFacts:
        return ModelFacts(None, END_OF_TURN, "<end of turn>")

    async def render(self, body: Mapping[str, Any], options: CallOptions) -> Rendered:
        return Rendered(await self.encode("hello", options), {}, Stops.of(self._sampling))

    async def generate(
        self,
        rendered: Rendered,
        progress: Progress,
        options: CallOptions,
        *,
        on_tokens: Callable[[int], None],
        fields: Mapping[str, Any] | None = None,
    ) -> Ending:
        progress.ids, progress.logprobs = list(self._sampled), [0.0] * len(self._sampled)
        return Ending(self._finish)

    async def derender(
        self, chat: Mapping[str, Any], prompt: Sequence[int], ids: Sequence[int], finish: str, options: CallOptions
    ) -> ModelReply:
        return ModelReply({"role": "assistant", "content": await self.text(ids, options)}, finish, "m")

    async def text(self, ids: Sequence[int], options: CallOptions) -> str:
        words = {END_OF_TURN: "<end of turn>", END_OF_TEXT: "<end of text>"}
        return "".join(words.get(token) or chr(token) for token in ids)

    async def encode(self, text: str, options: CallOptions) -> list[int]:
        return [ord(letter) for letter in text]


async def said(text: str, *end: int, finish: str = "stop", **sampling: Any) -> str:
    """Return the text of an answer whose ids are those of `text` and then `end`."""
    ids = [*map(ord, text), *end]
    routes = LetterRoutes(ids, finish, sampling)
    reply = await TokenTurn(routes, ChatForm({}, None), model_request(), OPTIONS, {}).run(Progress(), None, own=True)
    assert reply.completion_token_ids == ids
    return reply.text


@pytest.mark.parametrize("end", [END_OF_TURN, END_OF_TEXT])
async def test_token_that_closed_an_answer_is_not_in_its_text(end: int) -> None:
    assert await said("yes", end) == "yes"
    assert await said("yes", end, stop=["no"]) == "yes"


async def test_last_token_is_in_the_text_if_something_else_ended_the_answer() -> None:
    assert await said("yes", END_OF_TEXT, finish="length") == "yes<end of text>"
    assert await said("yes", stop_regex="s$") == "yes"
    assert await said("yes", END_OF_TEXT, include_stop_str_in_output=True) == "yes<end of text>"
    assert await said("yes", stop=["s"]) == "ye"
