"""The messages of `POST /api/v1/runs`, as verl-recipe PR #83 has them (`agentic/serversdk`).

A request is multipart: `metadata`, the JSON of `RunRequest`, and `task_archive`, a tar.gz of the task's folder. The answer
is a `RunResult`. Ours adds `running` to the statuses and `warnings` to the answer.
"""

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

PATH: Final = "/api/v1/runs"
METADATA, ARCHIVE = "metadata", "task_archive"


class _Form(BaseModel):
    # What is not known here is kept, and reported: a newer client must not be refused for it.
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    def unknown(self) -> list[str]:
        """Fields of this form that nobody here knows."""
        return sorted(self.model_extra or {})


_TimeLimit = Annotated[float, Field(gt=0, le=604_800)] | None


class AgentRequest(_Form):  # type: ignore[no-redef]  # pydantic's plugin takes the field `kwargs` for that of __init__
    """Who works on the task."""

    name: str | None = None
    import_path: str | None = None
    """`module:Class`."""
    model_name: str | None = None
    override_timeout_sec: _TimeLimit = None
    override_setup_timeout_sec: _TimeLimit = None
    max_timeout_sec: _TimeLimit = None
    llm_proxy_url: str | None = None
    """Base URL of the model, up to `/v1`."""
    kwargs: dict[str, Any] = {}


class VerifierRequest(_Form):
    """How it is graded."""

    override_timeout_sec: _TimeLimit = None
    max_timeout_sec: _TimeLimit = None
    disable: bool = False


class RunRequest(_Form):
    """What is asked for, beside the task itself."""

    task_path: str = ""
    """Where the client has the task; said for its own records."""
    agent: AgentRequest = AgentRequest()
    timeout_multiplier: Annotated[float, Field(gt=0, le=1000)] = 1.0
    verifier: VerifierRequest = VerifierRequest()
    environment_overrides: dict[str, Any] = {}
    """Variables for the agent, among them the model's OPENAI_API_KEY, and Harbor's `override_cpus` and the like."""
    environment_kwargs: dict[str, Any] = {}


class RunStatus(StrEnum):
    """How far a run is."""

    RUNNING = "running"
    COMPLETED = "completed"
    """Graded, whatever the agent did."""
    FAILED = "failed"
    """Lost to infrastructure, not gradable, or cancelled; it has no rewards."""
    TIMEOUT = "timeout"
    """The agent's time ran out: of other servers alone. Ours grades what it left."""


class RolloutDetail(BaseModel):
    """One conversation, an entry a turn; `prompt_token_ids` has the whole prompt of its turn."""

    prompt_token_ids: list[list[int]] | None = None
    completion_token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None


class RunResult(BaseModel):
    """The answer."""

    run_id: str
    status: str
    """A RunStatus; other servers have words of their own (`error`)."""
    rewards: dict[str, float] | None = None
    rollout_details: list[RolloutDetail] | None = None
    error: str | None = None
    result_uri: str | None = None
    warnings: list[str] = []
    """What was asked for and is not honoured."""
