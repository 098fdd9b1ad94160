"""`spec.model`: what answers the agents."""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from rollout_api.base import ApiModel, LongText, ObjectName, Seconds, ShortText, TaskName, exactly_one
from rollout_api.model_server import ModelServerSpec


class SecretKeyRef(ApiModel):
    """One key of a Secret in the job's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
    """Key in it."""


class ApiKeySource(ApiModel):
    """Where the API key is read: exactly one of the fields."""

    env: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)] | None = None
    """A variable of the environment in which the job runs; a laptop only."""
    secret_key_ref: SecretKeyRef | None = None
    """A Secret; a cluster only."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        exactly_one({"env": self.env, "secretKeyRef": self.secret_key_ref})
        return self


class EndpointApi(StrEnum):
    """`OpenAI`: chat completions, which most servers have. `Anthropic`: Messages."""

    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"


class Endpoint(ApiModel):
    """A model that is served elsewhere."""

    base_url: Annotated[
        str, Field(alias="baseURL"), StringConstraints(pattern=r"^https?://[^\s/]+(/[^\s?#]*)?$", max_length=2048)
    ]
    """Base URL, up to and including `/v1` where the server has it."""
    name: ShortText
    """Name under which the server knows the model."""
    api: EndpointApi = EndpointApi.OPENAI
    """Protocol of the endpoint."""
    api_key_from: ApiKeySource | None = None
    """Where the API key is read; no key is sent without it."""
    call_seconds: Seconds = 600
    """Deadline of one model call, retries included."""


class ScriptedToolCall(ApiModel):
    """A tool call of a scripted turn."""

    name: ShortText
    """Tool."""
    arguments: dict[str, Any] | LongText = {}
    """Its arguments; a string is sent as it stands, malformed JSON included."""


class ScriptedTurn(ApiModel):
    """What a scripted model answers once."""

    content: LongText = ""
    """Text."""
    tool_calls: Annotated[list[ScriptedToolCall], Field(max_length=64)] = []
    """Tool calls."""
    delay_seconds: Annotated[float, Field(ge=0, le=3600)] = 0
    """Time before it answers."""


class ScriptedMember(ApiModel):
    """The turns of one member of a group."""

    turns: Annotated[list[ScriptedTurn], Field(min_length=1, max_length=1024)]
    """One after another; the last one is repeated for ever."""


class ScriptedTask(ApiModel):
    """The script of one task."""

    task: TaskName
    """Name of the task."""
    members: Annotated[list[ScriptedMember], Field(min_length=1, max_length=1024)]
    """By member of the group; member i takes number i modulo their count."""


class Scripted(ApiModel):
    """A deterministic stand-in for a model: fixed turns per task and member. For quickstarts and tests."""

    tasks: Annotated[list[ScriptedTask], Field(min_length=1, max_length=4096)]
    """Scripts by task; a task without one is an error."""


class OnStale(StrEnum):
    """What becomes of a rollout whose policy is too old: `Drop` cancels it, `Keep` finishes it and marks its result."""

    DROP = "Drop"
    KEEP = "Keep"


MODEL_SOURCES = ("endpoint", "serverRef", "server", "scripted", "function")


class ModelSpec(ApiModel):
    """What answers: exactly one of the fields."""

    endpoint: Endpoint | None = None
    """A model that is served elsewhere."""
    server_ref: ObjectName | None = None
    """Name of a ModelServer in the same namespace."""
    server: ModelServerSpec | None = None
    """A ModelServer of the job's own."""
    scripted: Scripted | None = None
    """Fixed turns."""
    function: Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$", max_length=512)] | None = None
    """`module:name` of `async f(messages, max_tokens, temperature, **kw)`."""
    allow_text_only: bool = False
    """Let a job of mode Train use a model that returns no token ids."""
    max_policy_lag: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Most policy versions that the newest may be ahead of a rollout's first sampled token; any number when left out."""
    on_stale: OnStale = OnStale.DROP
    """A rollout beyond `maxPolicyLag`: `Drop` ends it as Cancelled (StalePolicy), `Keep` marks its result `stale`."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        fields = {**vars(self), "serverRef": self.server_ref}
        exactly_one({name: fields[name] for name in MODEL_SOURCES})
        return self


class Sampling(ApiModel):
    """How the model samples; left out, a field takes the server's own default."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """Temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus."""
    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Tokens of one answer."""
    stop: Annotated[list[ShortText], Field(max_length=16)] = []
    """Strings that end an answer."""
    extra: dict[str, Any] = {}
    """Further fields of the request, sent as they stand."""
