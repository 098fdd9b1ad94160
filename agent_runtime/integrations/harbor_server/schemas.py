"""The messages of `POST /api/v1/runs`, as in verl-recipe PR #83 (`agentic/serversdk`).

A request is multipart: `metadata`, the JSON of `RunRequest`, and `task_archive`, a tar.gz of the task's folder. The
answer is a `RunResult`. We add `running` to the statuses and `warnings` to the answer.
"""

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

PATH: Final = "/api/v1/runs"
METADATA, ARCHIVE = "metadata", "task_archive"


class _Form(BaseModel):
    # Unknown fields are accepted and reported, for newer clients.
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    def unknown(self) -> list[str]:
        """Return the unknown fields of this message."""
        return sorted(self.model_extra or {})


_TimeLimit = Annotated[float, Field(gt=0, le=604_800)] | None


class AgentRequest(_Form):  # type: ignore[no-redef]  # pydantic's plugin confuses the field `kwargs` with that of __init__
    """The agent for the task."""

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
    """The verifier for the task."""

    override_timeout_sec: _TimeLimit = None
    max_timeout_sec: _TimeLimit = None
    disable: bool = False


class RunRequest(_Form):
    """A requested run, besides the task itself."""

    task_path: str = ""
    """The client's path of the task, for its own records."""
    agent: AgentRequest = AgentRequest()
    timeout_multiplier: Annotated[float, Field(gt=0, le=1000)] = 1.0
    verifier: VerifierRequest = VerifierRequest()
    environment_overrides: dict[str, Any] = {}
    """Variables for the agent, including the model's OPENAI_API_KEY, and Harbor's `override_cpus` and the like."""
    environment_kwargs: dict[str, Any] = {}


class RunStatus(StrEnum):
    """Status of a run."""

    RUNNING = "running"
    COMPLETED = "completed"
    """Graded, whatever the reward."""
    FAILED = "failed"
    """Lost to infrastructure, not gradable, or cancelled; without rewards."""
    TIMEOUT = "timeout"
    """The agent's time ran out. Used only by other servers; ours grades the agent's work."""


class RolloutDetail(BaseModel):
    """One conversation, with one entry for each turn; `prompt_token_ids` has the whole prompt of its turn."""

    prompt_token_ids: list[list[int]] | None = None
    completion_token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None


class RunResult(BaseModel):
    """The answer."""

    run_id: str
    status: str
    """A RunStatus; other servers have further values (`error`)."""
    rewards: dict[str, float | None] | None = None
    """A number without a value is one that JSON lacks, NaN or infinite: servers with FastAPI write null for it."""
    rollout_details: list[RolloutDetail] | None = None
    error: str | None = None
    result_uri: str | None = None
    warnings: list[str] = []
    """Requested settings that are not supported."""
