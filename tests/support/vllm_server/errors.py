"""Errors as vLLM words them.

vLLM 0.26, vllm/entrypoints/serve/exception_handling/error_response.py: create_error_response;
vllm/entrypoints/serve/engine/protocol.py: ErrorResponse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web


class ApiError(Exception):
    """An answer with a status and vLLM's error body."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.headers = message, status, kind, param, headers

    def body(self) -> dict[str, Any]:
        """Return the JSON to send."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


def not_served(model: Any) -> ApiError:
    """vLLM 0.26, vllm/entrypoints/openai/models/serving.py: OpenAIModelRegistry.check_model."""
    return ApiError(f"The model `{model}` does not exist.", 404, "NotFoundError", "model")


def too_long(context: int, prompt: int, requested: int) -> ApiError:
    """vLLM 0.26, vllm/renderers/params.py: TokenizeParams. The prompt is counted only to the first token over the
    limit, so the message says "at least".
    """
    counted = min(prompt, max(context - requested, 0) + 1)
    return ApiError(
        f"This model's maximum context length is {context} tokens. However, you requested {requested} output tokens and "
        f"your prompt contains at least {counted} input tokens, for a total of at least {counted + requested} tokens. "
        "Please reduce the length of the input prompt or the number of requested output tokens. "
        f"(parameter=input_tokens, value={counted})",
        param="input_tokens",
    )


def prompt_too_long(context: int, prompt: int) -> ApiError:
    """vLLM 0.26, vllm/v1/engine/input_processor.py: InputProcessor, for prompts of token ids."""
    return ApiError(
        f"The decoder prompt (length {prompt}) is longer than the maximum model length of {context}. Make sure that "
        "`max_model_len` is no smaller than the number of text tokens."
    )


def bad_request(detail: str) -> ApiError:
    """An HTTPException of vLLM's own routes: the type is the status' phrase."""
    return ApiError(detail, 400, HTTPStatus.BAD_REQUEST.phrase)


def failed(message: str) -> ApiError:
    """The answer to an uncaught exception."""
    return ApiError(message, 500, "InternalServerError")


def on_demand(status: int, retry_after: float | None) -> ApiError:
    """The answer of a fault on demand."""
    headers = {} if retry_after is None else {"Retry-After": f"{retry_after:g}"}
    return ApiError("A fault on demand", status, HTTPStatus(status).phrase, headers=headers)


async def json_object(request: web.Request) -> dict[str, Any]:
    """Return the body. Raises ApiError if it is not a JSON object."""
    try:
        body = json.loads(await request.read() or b"null")
    except ValueError as error:
        raise bad_request(f"Invalid JSON format: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("Request body must be a JSON object")
    return body
