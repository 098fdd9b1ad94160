"""What is written down of a rollout: the records of an attempt's journal, and the seal that ends it.

A journal is a sequence of records. Nothing is acted on before it is durable, so a runner that takes an attempt over
replays them and goes on (docs/recording.md).
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from rollout_api.base import ApiModel
from rollout_api.tasks import Task, VerifierMode

RECORD_VERSION = 1
"""Version of the forms in this file; readers refuse a newer one."""

Message = dict[str, Any]
"""A chat message in OpenAI's form: role, content, tool_calls, tool_call_id."""


class Outcome(StrEnum):
    """How a rollout ended, as a trainer needs to know it."""

    COMPLETED = "Completed"
    """The policy's own doing, whatever it was: trained, with the verifier's reward."""
    INFRA_FAILED = "InfraFailed"
    """Not the policy's doing, and all attempts used up: masked, outside its group's mean."""
    VERIFIER_FAILED = "VerifierFailed"
    """Could not be graded: masked."""
    CANCELLED = "Cancelled"
    """Not wanted any more: masked."""


class StopReason(StrEnum):
    """Why a Completed rollout stopped."""

    FINISHED = "Finished"
    MAX_TURNS = "MaxTurns"
    TOKEN_BUDGET = "TokenBudget"
    CONTEXT_EXCEEDED = "ContextExceeded"
    CONTENT_FILTER = "ContentFilter"
    EMPTY_ANSWER = "EmptyAnswer"
    AGENT_TIMEOUT = "AgentTimeout"
    TOOL_FORMAT = "ToolFormat"
    RESOURCE_LIMIT = "ResourceLimit"
    AGENT_ERROR = "AgentError"


class Usage(ApiModel):
    """Tokens as the server counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class McpRecord(ApiModel):
    """An MCP server as it introduced itself, which it does once."""

    server: str
    process: str | None = None
    """Where it runs in the workspace; None where it is reached by HTTP."""
    initialized: dict[str, Any]
    """Its answer to `initialize`."""
    tools: list[dict[str, Any]]
    """As it listed them."""


class AttemptRecord(ApiModel):
    """First record of an epoch: where the attempt runs."""

    type: Literal["attempt"] = "attempt"
    time: float
    """Unix seconds."""
    runner: str
    workspace: dict[str, Any]
    """The provider's handle, by which another process reattaches."""
    sandbox: dict[str, Any] = {}
    """What the sandbox really was: provider, mode, root or image."""
    task: Task | None = None
    """The task as plugins changed it, used to the end of the rollout; None where none did."""
    mcp: list[McpRecord] = []
    """The servers of `agent.mcpServers`."""
    boot_seconds: float = 0
    """From asking for the workspace until it was there, before `time`."""


class PolicySpan(ApiModel):
    """Sampled tokens in a row that one policy version made."""

    tokens: int
    version: str | None
    """None where it is not known, and for tokens copied from another rollout: such tokens are not trained."""


class IntentRecord(ApiModel):
    """A model call that is about to be made."""

    type: Literal["intent"] = "intent"
    turn: int
    time: float
    conversation: int = 0
    """The conversation that this call belongs to, named by the turn of its first call."""
    parent: int | None = None
    """The turn of that conversation whose messages and answer this call goes on from; None for the first one. `keep`,
    `tools` and the response's `promptKeep` are relative to it."""
    keep: int
    """Messages of the parent turn, its answer included, that stand unchanged at the head of this call's."""
    messages: list[Message]
    """The messages after those."""
    tools: list[dict[str, Any]] | None = None
    """Tool definitions; None when they are the parent turn's."""
    repeated: dict[int, tuple[int, int]] = {}
    """In segments alone: by position among the messages and then the tools, the turn and position at which an earlier record
    has the same one."""
    branch: int = 0
    """Set by `message_tree.linear`, not in the journal: counts up each time the messages do not extend the turn before."""
    request_digest: str | None = None
    """SHA-256 of the client's request, by which a proxy knows its retry."""
    idempotency_key: str | None = None
    """The client's own name for the request."""
    agent_seconds: float | None = None
    """How much of its time (`timeouts.agentSeconds`) the agent had used; the next runner continues from here. The answer and
    the tools' results have it too."""


class ResponseRecord(ApiModel):
    """What the model answered, as the server returned it."""

    type: Literal["response"] = "response"
    turn: int
    time: float
    seconds: float
    message: Message
    finish_reason: str
    model: str = ""
    usage: Usage = Usage()
    prompt_keep: int = 0
    """Ids of the previous response with ids, prompt and completion, that stand unchanged at the head of this prompt."""
    prompt_token_ids: list[int] | None = None
    """The prompt's ids after those."""
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    """One for each completion token."""
    policy_spans: list[PolicySpan] = []
    """Which version made which completion token, in order; empty where the server does not say."""
    stop_sequence: str | None = None
    """The stop string that ended the answer, where it is known."""
    agent_seconds: float | None = None
    """See `IntentRecord`."""


class DeliveryRecord(ApiModel):
    """Whether an answer reached the client of a proxy; the latest one of a turn counts. A call that failed, or that its
    client gave up, has one too: the runner did not end in the middle of it."""

    type: Literal["delivery"] = "delivery"
    turn: int
    time: float
    delivered: bool
    """False: the connection was gone. Unless the client goes on from that answer, no export has it."""


class Observation(ApiModel):
    """The result of one tool call."""

    call_id: str
    tool: str
    content: str
    """What the model sees."""
    error: bool = False
    """The call itself failed: unknown tool, bad arguments, a tool that raised."""
    stop: bool = False
    """The tool ended the rollout as Finished."""
    seconds: float = 0
    data: dict[str, Any] = {}
    """What the tool has to say to machines, such as an exit code."""
    traceback: str | None = None
    """Where the tool's own code raised."""


class ObservationsRecord(ApiModel):
    """The results of a turn's tool calls, in the order of the calls."""

    type: Literal["observations"] = "observations"
    turn: int
    time: float
    seconds: float = 0
    """Wall time of all of them together."""
    results: list[Observation]
    agent_seconds: float | None = None
    """See `IntentRecord`."""


class PluginCall(ApiModel):
    """One call of one plugin."""

    plugin: str
    hook: str
    seconds: float
    did: Literal["Refused", "Changed", "Stopped", "Failed"] | None = None
    """A tool call refused, a tool call or task changed, a group ended early; or it failed."""
    message: str = ""
    """Why."""


class PluginsRecord(ApiModel):
    """Calls of plugins since the last such record."""

    type: Literal["plugins"] = "plugins"
    time: float
    calls: list[PluginCall]


class Layer(ApiModel):
    """A tar in object storage, `layers/<digest>.tar.zst` beside the runs: what was changed over the layers below it."""

    digest: str
    """SHA-256 of the tar, 64 hex characters."""
    bytes: int
    """Of the tar."""


class SnapshotRecord(ApiModel):
    """The state of the workspace after the tool calls of a turn."""

    type: Literal["snapshot"] = "snapshot"
    turn: int
    time: float
    layers: list[Layer] = []
    """Lowest first; empty where it could not be taken."""
    mode: str = ""
    """Mode of the workspace, and of those that it can be restored into: `Overlay` or `Plain`."""
    seconds: float = 0
    message: str = ""
    """Why it could not be taken."""


class CheckpointRecord(ApiModel):
    """A state of the workspace that the agent keeps to go back to. It goes on in the workspace of the next AttemptRecord."""

    type: Literal["checkpoint"] = "checkpoint"
    name: str
    turn: int
    time: float
    workspace: str
    """The provider's name of the frozen workspace, in `Overlay`."""
    layers: list[Layer] = []
    """In `Plain`: the snapshot, lowest layer first."""


class ReturnRecord(ApiModel):
    """The agent goes back to a checkpoint."""

    type: Literal["return"] = "return"
    checkpoint: str
    turn: int
    time: float


class BranchRecord(ApiModel):
    """The attempt goes on from a turn of another rollout. Records up to that turn are copies of that rollout's."""

    type: Literal["branch"] = "branch"
    time: float
    job: str
    """URI of the run."""
    index: int
    attempt: int
    turn: int
    """The last turn that is copied."""
    snapshot_turn: int | None = None
    """Turn of the snapshot that was restored; None where all tool calls were run again."""
    differences: list[str] = []
    """Tool calls that were run again and did not give what is recorded."""


class ObjectDigest(ApiModel):
    """An object that a seal vouches for; its key is relative to the job's folder."""

    key: str
    sha256: str
    bytes: int


class ProgramTrajectory(ApiModel):
    """What became of the trajectory file that a program wrote of itself."""

    file: ObjectDigest | None = None
    """The file as it was, in zstd frames."""
    bytes: int = 0
    """Of the file."""
    format: str | None = None
    """A value of `agent.trajectory.format`; None where it is no known one."""
    atif: ObjectDigest | None = None
    """The same as ATIF."""
    note: str = ""
    """Why one of these is missing."""


class StopRecord(ApiModel):
    """The agent is done; what follows is grading."""

    type: Literal["stop"] = "stop"
    time: float
    stop_reason: StopReason
    message: str = ""
    traceback: str | None = None
    """Where the agent's own code raised (AgentError)."""
    agent_seconds: float = 0
    program_trajectory: ProgramTrajectory | None = None
    """Where `agent.trajectory` asks for it."""


class ArtifactsRecord(ApiModel):
    """The declared artifacts are stored; the agent's workspace is not needed any more."""

    type: Literal["artifacts"] = "artifacts"
    time: float
    key: str | None = None
    """Object, or None where there is nothing to carry (`Shared`, no verifier)."""
    bytes: int = 0


class Unexplained(StrEnum):
    """What failed after the policy had acted, for no known reason."""

    SANDBOX = "Sandbox"
    """It was lost with something in it that the policy made."""
    REQUEST = "Request"
    """The model failed at it, and answered another one right afterwards."""
    ACTION = "Action"
    """The environment failed at it."""


class FailedRecord(ApiModel):
    """The attempt is lost to infrastructure; another one may follow."""

    type: Literal["failed"] = "failed"
    time: float
    reason: str
    message: str = ""
    counted: bool = True
    """It uses up one of `attempts.limit`. Interruptions of the runner do not."""
    unexplained: Unexplained | None = None
    """What failed, where nothing says whether the policy caused it."""
    alone: bool = False
    """The sandbox hosted no other attempt."""


class CommandVerdict(ApiModel):
    """One verifier command."""

    command: str
    exit_code: int | None
    seconds: float
    output: str
    """Head and tail of what it printed."""
    cause: str | None = None


class TestVerdict(ApiModel):
    """One test, as reported."""

    __test__ = False  # not a test class of pytest's

    name: str
    passed: bool
    message: str = ""


class Verdict(ApiModel):
    """The grading of one rollout."""

    reward: float
    rewards: dict[str, float] = {}
    """Further named rewards of a reward file."""
    passed: bool
    """Everything that was asked for passed."""
    commands: list[CommandVerdict] = []
    tests: list[TestVerdict] = []
    mode: VerifierMode | None = None
    """Where it was graded; None for an environment, which grades itself."""
    forgeable: bool = False
    """The code that was graded could reach what the verdict is read from (docs/verification.md)."""
    dropped: list[str] = []
    """Artifacts that were not carried over, because the test runner would load them by itself."""
    message: str = ""


class StepRecord(ApiModel):
    """A task's step, in up to three records: its workspace is ready, its grading begins, its verdict.

    A task without steps that is graded in place (`Shared`) has the second one alone.
    """

    type: Literal["step"] = "step"
    time: float
    step: str
    """Name of the step, or of the task."""
    verdict: Verdict | None = None
    """None: it has begun, or it has no verifier."""
    ended: bool = False
    grading: bool = False
    """The verifier is about to run in the agent's workspace, which is then no longer as the agent left it."""


Record = Annotated[
    AttemptRecord
    | IntentRecord
    | ResponseRecord
    | DeliveryRecord
    | ObservationsRecord
    | PluginsRecord
    | SnapshotRecord
    | CheckpointRecord
    | ReturnRecord
    | BranchRecord
    | StopRecord
    | ArtifactsRecord
    | FailedRecord
    | StepRecord,
    Field(discriminator="type"),
]


class AttemptSummary(ApiModel):
    """How one attempt of a rollout ended."""

    attempt: int
    reason: str
    message: str = ""


class PluginReport(ApiModel):
    """What one plugin did in a rollout, and what it has to say of it."""

    calls: int = 0
    """Times that a hook of it was called in the sealed attempt."""
    seconds: float = 0
    refused: int = 0
    """Tool calls."""
    changed: int = 0
    """Tool calls, and the task."""
    failed: int = 0
    """Calls in which it raised, took too long, or returned what it may not."""
    error: str | None = None
    """Of the first failure."""
    scores: dict[str, float] = {}
    """Of an EpisodeEvaluator; the reward is the verifier's alone."""
    analysis: dict[str, Any] = {}
    """Of a TrajectoryAnalyzer."""


class Result(ApiModel):
    """One rollout: a line of `results.jsonl`, and the head of its seal."""

    version: int = RECORD_VERSION
    index: int
    """`task * groupSize + member`."""
    group: int
    member: int
    task: str
    tags: list[str] = []
    mode: str
    """Train | Eval."""
    seed: int
    """Seed that this rollout was sampled with."""
    outcome: Outcome
    stop_reason: StopReason | None = None
    reason: str | None = None
    """Why it is not Completed: one word for machines."""
    message: str = ""
    traceback: str | None = None
    """Where the agent's own code raised (AgentError)."""
    tool_tracebacks: dict[str, str] = {}
    """By tool: where its own code raised first."""
    reward: float | None = None
    """The verifier's; null unless Completed and graded."""
    rewards: dict[str, float] = {}
    passed: bool | None = None
    forgeable: bool = False
    attempt: int
    """The attempt that was sealed."""
    failed_attempts: list[AttemptSummary] = []
    turns: int = 0
    tool_calls: int = 0
    usage: Usage = Usage()
    branches: int = 1
    """Samples that this rollout gives: 1 and one for each fork of its token sequence."""
    token_forks: int = 0
    """Of these forks, those in which the messages went on and the server's prompt ids did not: a tokenizer or chat
    template that does not give back what was sampled. Those of an agent that rewrote its history are not in it."""
    policy_versions: list[str] = []
    stale: bool = False
    """When it ended, its first token's policy was more than `model.maxPolicyLag` versions old."""
    token_capture: str = "TextOnly"
    """Tokens | Chat | TextOnly: how token ids were recorded."""
    sandbox: dict[str, Any] = {}
    """Provider, mode and the real root of the sandbox."""
    seconds: dict[str, float] = {}
    """Seconds of the sealed attempt by part (`engine/attempt/results.py`): boot, agent, model, tools, verifier, total."""
    started: float | None = None
    """Unix seconds at which its workspace was asked for."""
    ended: float | None = None
    trajectory: str | None = None
    """Key of the ATIF trajectory, relative to the job's folder."""
    plugins: dict[str, PluginReport] = {}
    """Of each plugin that was called, by name."""
    batch: str | None = None
    """Label that its group was submitted with."""
    advantage: float | None = None
    """The reward as `spec.reward` normalises it. In results and exports, never in a seal: it needs the other rollouts."""
    branched_from: BranchRecord | None = None
    """Where it went on from. Turns, tool calls, usage and seconds count what came after."""
    program_trajectory: ProgramTrajectory | None = None
    """The trajectory that the program of `Command` wrote of itself."""


class Seal(ApiModel):
    """The create-only end of a rollout. What it lists is the rollout; nothing else counts."""

    version: int = RECORD_VERSION
    result: Result
    verdict: Verdict | None = None
    objects: list[ObjectDigest]
    """The journal's segments in order, artifacts, trajectory."""
