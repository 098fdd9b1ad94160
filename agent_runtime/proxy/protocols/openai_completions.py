"""OpenAI's completions (platform.openai.com/docs/api-reference/completions): a bare prompt without a chat template.
Pure.
"""

from collections.abc import Mapping
from typing import Any

from agent_runtime.models.base import ModelReply
from agent_runtime.proxy.chat import (
    PING,
    PROMPT_ROLE,
    BadRequest,
    ChatAnswer,
    ChatRequest,
    Earlier,
    JsonObject,
    NoteKind,
)
from agent_runtime.proxy.protocols.fields import (
    ENGINE_SAMPLING,
    Fields,
    Notes,
    given,
    one,
    required,
    sampling,
    typed,
    words,
)
from agent_runtime.proxy.protocols.openai_chat import IGNORED
from agent_runtime.proxy.protocols.openai_errors import ChunkEncoder, OpenAIErrors, usage
from rollout_api.records import Message

MAX_TOKENS = 16  # the API's own default

FIELDS = Fields(
    honoured=words(
        "best_of logprobs max_tokens model n prompt return_token_ids seed stop stream stream_options temperature top_p"
    ),
    passed=ENGINE_SAMPLING | words("frequency_penalty logit_bias presence_penalty"),
    ignored=IGNORED,
    dropped={},
    refused={
        "echo": "answers cannot include the prompt; leave it out",
        "suffix": "filling in the middle is not supported",
    },
)


class OpenAICompletions(OpenAIErrors):
    """A `Translation`."""

    name = "completions"
    path = "/completions"

    def parse(self, body: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        notes = Notes()
        unknown = FIELDS.check(body, notes, passes_unknown=True)
        one(body, "n", "best_of")
        logprobs = body.get("logprobs")
        if logprobs not in (None, False, True):
            typed(logprobs, int, "logprobs")
            notes.drop(NoteKind.FIELD, "logprobs", f"{logprobs}; only the sampled token's is recorded")
        limited = {"max_tokens": MAX_TOKENS} | {name: value for name, value in body.items() if value is not None}
        return ChatRequest(
            model=required(body, "model", str),
            messages=[_prompt(body.get("prompt"))],
            sampling=sampling(
                limited, max_tokens=("max_tokens",), stop="stop", extra={}, passed=FIELDS.passed | unknown
            ),
            seed=required(body, "seed", int) if body.get("seed") is not None else None,
            stream=given(body, "stream", bool, False),
            extra={
                "usage": bool(given(body, "stream_options", dict, {}).get("include_usage")),
                "logprobs": logprobs not in (None, False),
                "ids": given(body, "return_token_ids", bool, False),
            },
            notes=notes.all,
            unknown=unknown,
        )

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> JsonObject:
        return {
            **_head(request, answer.id, answer.created),
            "choices": [{"index": 0, **_last_choice(request.extra, answer.reply, answer.reply.text)}],
            "usage": usage(answer.reply),
        }

    def encoder(self, request: ChatRequest, id: str, created: int) -> "CompletionsEncoder":
        return CompletionsEncoder(request, _head(request, id, created))


class CompletionsEncoder(ChunkEncoder):
    """Chunks of a streamed completion; see `Encoder`."""

    def start(self, prompt_tokens: int) -> bytes:
        """Return a comment: the API begins with the first text."""
        return PING

    def reasoning(self, piece: str) -> bytes:
        """Return nothing: the API has no reasoning."""
        return b""

    def text(self, piece: str) -> bytes:
        self._sent.add(piece)
        return self._chunk({"text": piece, "logprobs": None, "finish_reason": None})

    def end(self, answer: ChatAnswer) -> bytes:
        last = _last_choice(self._extra, answer.reply, self._sent.rest(answer.reply.text))
        return self._chunk(last) + self._end(answer.reply)


def _prompt(prompt: Any) -> Message:
    match prompt:
        case str() | [str()]:
            text = prompt if isinstance(prompt, str) else prompt[0]
            return {"role": PROMPT_ROLE, "content": text}
        case [int(), *_] | [[int(), *_]]:
            ids = prompt if isinstance(prompt[0], int) else prompt[0]
            if all(type(token) is int and token >= 0 for token in ids):
                return {"role": PROMPT_ROLE, "token_ids": list(ids)}
    raise BadRequest(
        f"prompt: expected one text, or one list of token ids, got {prompt!r:.100}; send a request for each prompt",
        "prompt",
    )


def _head(request: ChatRequest, id: str, created: int) -> JsonObject:
    return {"id": f"cmpl-{id}", "object": "text_completion", "created": created, "model": request.model}


def _last_choice(extra: Mapping[str, Any], reply: ModelReply, text: str) -> JsonObject:
    choice: JsonObject = {"text": text, "logprobs": None, "finish_reason": reply.finish_reason}
    if extra["logprobs"] and reply.logprobs is not None and reply.completion_token_ids is not None:
        choice["logprobs"] = {
            "tokens": [f"token_id:{token}" for token in reply.completion_token_ids],
            "token_logprobs": reply.logprobs,
            "top_logprobs": None,
            "text_offset": None,
        }
    if extra["ids"]:
        choice |= {"prompt_token_ids": reply.prompt_token_ids, "token_ids": reply.completion_token_ids}
    return choice
