"""Models for the agents of this package: a client of a server, or an async function."""

import inspect
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.models.base import Model, ModelReply, ModelRequest
from agent_runtime.models.factory import open_model
from agent_runtime.models.providers.from_environment import model_from_environment
from agent_runtime.models.providers.function import FunctionModel
from rollout_api.model import ApiKeySource, Endpoint, EndpointApi, ModelSpec, Sampling
from rollout_api.records import Message

LLMFunction = Callable[..., Awaitable[str | dict[str, Any] | ModelReply]]
"""`async f(messages, max_tokens=..., temperature=...)` that returns the answer's text, or a message in OpenAI's format.
"""

_KEY = "LLM_API_KEY"
"""Environment variable that passes the API key to a run, because manifests and records must not contain it."""


@dataclass(frozen=True)
class LLMClient:
    """Client of a model server. An agent that gets its `generate` calls the server directly and records tokens."""

    spec: ModelSpec
    """The model as in a manifest."""
    api_key: str = field(default="", repr=False)
    """Key of the server, instead of the value of the environment variable that `spec.endpoint.apiKeyFrom` names."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables of a run that calls the server, with the key."""
        source = self.spec.endpoint.api_key_from if self.spec.endpoint else None
        return {**os.environ, source.env: self.api_key} if self.api_key and source and source.env else os.environ

    async def generate(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        temperature: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str | dict[str, Any]:
        """Return the text of one answer; with `tools`, definitions in OpenAI's form, the whole message with its tool calls.

        Raises ModelError, ContextExceeded, ContentFiltered.
        """
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
        model = open_model(self.spec, self.variables)
        try:
            await model.check()
            request = ModelRequest(
                messages,
                tools=tools or [],
                sampling=sampling,
                seed=secrets.randbits(31),
                session="",
                task="",
                member=0,
                turn=0,
            )
            reply = await model.complete(request)
            return reply.text if tools is None else dict(reply.message)
        finally:
            await model.close()


def create_llm_client(
    api_key: str, base_url: str, model: str, *, api: EndpointApi | str = EndpointApi.OPENAI
) -> LLMClient:
    """Create a client of a server with OpenAI's API, or with Anthropic's if `api="Anthropic"`. Does not connect yet.

    Failed calls are retried (docs/models.md).
    """
    key = ApiKeySource(env=_KEY) if api_key else None
    endpoint = Endpoint(base_url=base_url, name=model, api=EndpointApi(api), api_key_from=key)
    return LLMClient(ModelSpec(endpoint=endpoint), api_key)


def llm_client_from_environment() -> LLMClient:
    """Create a client from environment variables: OPENAI_MODEL, ANTHROPIC_MODEL or LLM_MODEL_NAME, with the matching
    `..._BASE_URL` and `..._API_KEY`.

    Raises ModelConfigError.
    """
    return LLMClient(model_from_environment(os.environ))


def client_of(function: LLMFunction) -> LLMClient | None:
    """Return the client to which a `generate` method belongs; None for another function."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, LLMClient) and function == owner.generate else None


def name_of(function: LLMFunction) -> str:
    """Return the name of a function in a manifest (`module:name`)."""
    named = function if inspect.isroutine(function) else type(function)
    return f"{named.__module__}:{named.__name__}"


def as_model(function: LLMFunction) -> Model:
    """Wrap a function as a model. It gets messages, and max_tokens, temperature and tools if it accepts them."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    async def ask(
        messages: list[Message],
        max_tokens: int | None = None,
        temperature: float | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str | dict[str, Any] | ModelReply:
        given = {"max_tokens": max_tokens, "temperature": temperature, "tools": tools}
        taken = {name: value for name, value in given.items() if takes_all or name in parameters}
        return await function(messages, **{name: value for name, value in taken.items() if value is not None})

    return FunctionModel(ask, name_of(function))
