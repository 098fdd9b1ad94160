"""`spec.model`: the model that the agents call."""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from rollout_api.base import ApiModel, LongText, ObjectName, Seconds, ShortText, TaskName, exactly_one
from rollout_api.model_server import AdapterName, ModelServerSpec


class SecretKeyRef(ApiModel):
    """One key of a Secret in the job's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
    """Key in the Secret."""


class ApiKeySource(ApiModel):
    """Source of the API key: exactly one of the fields."""

    env: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)] | None = None
    """Environment variable of the process that runs the job; only outside a cluster."""
    secret_key_ref: SecretKeyRef | None = None
    """Key of a Secret; only in a cluster."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        exactly_one({"env": self.env, "secretKeyRef": self.secret_key_ref})
        return self


class EndpointApi(StrEnum):
    """`OpenAI`: chat completions, which most servers support. `Anthropic`: Messages."""

    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"


class Endpoint(ApiModel):
    """A model served by an existing endpoint."""

    base_url: Annotated[
        str, Field(alias="baseURL"), StringConstraints(pattern=r"^https?://[^\s/]+(/[^\s?#]*)?$", max_length=2048)
    ]
    """Base URL, including `/v1` if the server uses it."""
    name: ShortText
    """Name of the model on the server."""
    api: EndpointApi = EndpointApi.OPENAI
    """Protocol of the endpoint."""
    api_key_from: ApiKeySource | None = None
    """Source of the API key. Without it, no key is sent."""
    call_seconds: Seconds = 600
    """Deadline of one model call, retries included."""


class Prices(ApiModel):
    """Prices of a model's tokens, with which results show the cost of a run."""

    prompt: Annotated[float, Field(ge=0, le=1e6)]
    """Price of a million prompt tokens."""
    completion: Annotated[float, Field(ge=0, le=1e6)]
    """Price of a million completion tokens."""
    cached: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Price of a million prompt tokens from the server's cache. When left out, that of prompt tokens."""
    currency: Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$", max_length=3)] = "USD"
    """Currency as a code of ISO 4217."""


class ScriptedToolCall(ApiModel):
    """A tool call of a scripted turn."""

    name: ShortText
    """Name of the tool."""
    arguments: dict[str, Any] | LongText = {}
    """Arguments of the call. A string is sent unchanged, malformed JSON included."""


class ScriptedTurn(ApiModel):
    """One answer of a scripted model."""

    content: LongText = ""
    """Text."""
    tool_calls: Annotated[list[ScriptedToolCall], Field(max_length=64)] = []
    """Tool calls."""
    delay_seconds: Annotated[float, Field(ge=0, le=3600)] = 0
    """Seconds before the answer."""


class ScriptedMember(ApiModel):
    """The turns of one member of a group."""

    turns: Annotated[list[ScriptedTurn], Field(min_length=1, max_length=1024)]
    """Turns in order. The last one is repeated indefinitely."""


class ScriptedTask(ApiModel):
    """The script of one task."""

    task: TaskName
    """Name of the task."""
    members: Annotated[list[ScriptedMember], Field(min_length=1, max_length=1024)]
    """Scripts by group member: member i uses number i modulo their count."""


class Scripted(ApiModel):
    """A deterministic replacement for a model, with fixed turns for each task and member. For quickstarts and tests."""

    tasks: Annotated[list[ScriptedTask], Field(min_length=1, max_length=4096)]
    """Scripts by task. A task without one is an error."""


class RoutedExperts(ApiModel):
    """Recording of the experts that processed each token in a mixture-of-experts model. A trainer repeats this routing
    (router replay, R3).
    """

    top_k: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Experts of a token in one layer: `num_experts_per_tok` of the model. Only SGLang needs it, because its answers do
    not contain it.
    """


class OnStale(StrEnum):
    """Handling of a rollout whose policy is too old: `Drop` cancels it, `Keep` finishes it and marks its result."""

    DROP = "Drop"
    KEEP = "Keep"


MODEL_SOURCES = ("endpoint", "serverRef", "server", "scripted", "function")


class ModelSpec(ApiModel):
    """The model that the agents call: exactly one of the fields."""

    endpoint: Endpoint | None = None
    """A model served by an existing endpoint."""
    server_ref: ObjectName | None = None
    """Name of a ModelServer in the same namespace."""
    server: ModelServerSpec | None = None
    """A ModelServer that the job creates and owns."""
    adapter: AdapterName | None = None
    """LoRA adapter of that ModelServer, by its name in `adapters`; the model itself when left out."""
    scripted: Scripted | None = None
    """A scripted model with fixed turns."""
    function: Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$", max_length=512)] | None = None
    """`module:name` of `async f(messages, max_tokens, temperature, **kw)`."""
    prices: Prices | None = None
    """Prices of its tokens, with which the cost of a run is shown."""
    allow_text_only: bool = False
    """Allow a job of mode Train to use a model that returns no token ids."""
    routed_experts: RoutedExperts | None = None
    """Record the routed experts of a mixture-of-experts model. Its server must be vLLM or SGLang, started with
    `--enable-return-routed-experts`.
    """
    max_policy_lag: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Largest allowed distance, in policy versions, between the newest version and that of a rollout's first sampled
    token. Unlimited when left out.
    """
    on_stale: OnStale = OnStale.DROP
    """Handling of a rollout beyond `maxPolicyLag`: `Drop` ends it as Cancelled (StalePolicy), `Keep` marks its result
    `stale`.
    """

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        fields = {**vars(self), "serverRef": self.server_ref}
        exactly_one({name: fields[name] for name in MODEL_SOURCES})
        is_openai = self.endpoint is not None and self.endpoint.api is EndpointApi.OPENAI
        if self.routed_experts is not None and not (is_openai or self.server or self.server_ref):
            raise ValueError("routedExperts is allowed only with server, serverRef, or an endpoint with api: OpenAI")
        if self.adapter is not None and self.server is None and self.server_ref is None:
            raise ValueError("adapter is allowed only with server or serverRef")
        if self.adapter is not None and self.server is not None and self.adapter not in self.server.adapters:
            raise ValueError(
                f"adapter {self.adapter} is not in server.adapters; add it there, at version 0 if it has no weights yet"
            )
        return self


class Sampling(ApiModel):
    """Sampling parameters. The server's default applies to a field that is left out."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """Temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling probability."""
    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Most tokens of one answer."""
    stop: Annotated[list[ShortText], Field(max_length=16)] = []
    """Strings that end an answer."""
    extra: dict[str, Any] = {}
    """Further fields of the request, sent unchanged."""
