"""Completions of a bare prompt over OpenAI's route, for a server without the token routes.

vLLM, vllm/entrypoints/openai/completion: `return_token_ids` adds ids to the choice, including those of the prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_runtime.executor.timing import working_timeout
from agent_runtime.models.answers import arrived
from agent_runtime.models.base import AnswerAborted, ModelError, ModelReply, is_given_up
from agent_runtime.models.chat_parts import AnswerParts
from agent_runtime.models.http_client import CallOptions, JsonClient
from agent_runtime.models.providers.openai_endpoint import stop_sequence, usage_of
from agent_runtime.models.refusals import final_refusal

PATH = "/v1/completions"
_CHAT_ONLY_FIELDS = frozenset(
    {"logprobs", "max_completion_tokens", "messages", "return_token_ids", "tools", "top_logprobs"}
)


def prompt_body(chat: Mapping[str, Any], prompt: str | Sequence[int]) -> dict[str, Any]:
    """Return the body of a completion with the sampling of a chat request."""
    limit = chat.get("max_tokens", chat.get("max_completion_tokens"))
    kept = {name: value for name, value in chat.items() if name not in _CHAT_ONLY_FIELDS}
    # vLLM's default is 16 tokens.
    return kept | {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": limit}


async def complete_text(
    client: JsonClient, body: Mapping[str, Any], options: CallOptions, on_text: Callable[[str], None] | None
) -> ModelReply:
    """Return one completion; its text goes to `on_text` as it arrives. Raises as `Model.complete`."""
    parts = CompletionParts(client.base_url)
    if on_text is None:
        answer = await client.call("POST", PATH, body, options)
        if answer.status != 200:
            raise final_refusal(f"{client.base_url}{PATH}", answer.status, answer.error)
        parts.add(answer.payload)
        with arrived("BadResponse", f"{client.base_url}: the answer cannot be read"):
            return parts.reply()
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with working_timeout(options.seconds), client.stream(PATH, body, options) as events:
            async for event in events:
                options.health.on_tokens(1)
                if piece := parts.add(event):
                    on_text(piece)
    except TimeoutError:
        raise ModelError("Timeout", f"{client.base_url} did not finish within {options.seconds:g} s") from None
    return parts.reply()


class CompletionParts(AnswerParts):
    """Parts of a completion, streamed or whole."""

    expected = "a completion"

    def __init__(self, source: str = "the model") -> None:
        super().__init__(source)
        self._text = ""

    def _read(self, choice: Mapping[str, Any], logprobs: Mapping[str, Any]) -> str:
        self.logprobs += [float(value) for value in logprobs.get("token_logprobs") or []]
        piece = str(choice.get("text") or "")
        self._text += piece
        return piece

    def reply(self) -> ModelReply:
        """Return the complete reply. Raises ModelError if its end is missing."""
        if self.finish_reason is None:
            raise ModelError("BadResponse", f"{self.source}: the completion has no finish_reason")
        if is_given_up(self.finish_reason):
            raise AnswerAborted(self.model, self.finish_reason)
        exact = self.prompt_ids is not None and bool(self.ids) and len(self.ids) == len(self.logprobs)
        return ModelReply(
            message={"role": "assistant", "content": self._text},
            finish_reason=self.finish_reason,
            model=self.model,
            usage=usage_of(self.usage),
            prompt_token_ids=self.prompt_ids if exact else None,
            completion_token_ids=self.ids if exact else None,
            logprobs=self.logprobs if exact else None,
            stop_sequence=stop_sequence({"stop_reason": self.stop_reason}),
        )
