"""Record types of a rollout: those in an attempt's journal, and the seal that completes the rollout.

A journal is a sequence of records. A runner acts on a record only when it is durable. A runner that takes over an attempt
therefore replays the records and continues (docs/recording.md).
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from rollout_api.base import ApiModel
from rollout_api.tasks import Task, VerifierMode

RECORD_VERSION = 1
"""Version of the formats in this file. Readers refuse newer ones."""

Message = dict[str, Any]
"""A chat message in OpenAI's form: role, content, tool_calls, tool_call_id."""


class Outcome(StrEnum):
    """How a rollout ended. It decides whether a trainer uses the rollout."""

    COMPLETED = "Completed"
    """The policy caused the end, in any way. The rollout is trained on with the verifier's reward."""
    INFRA_FAILED = "InfraFailed"
    """All attempts failed for reasons that the policy did not cause. Masked: excluded from training and group means."""
    VERIFIER_FAILED = "VerifierFailed"
    """The rollout could not be graded. It is masked, like InfraFailed."""
    CANCELLED = "Cancelled"
    """The rollout is no longer needed. It is masked, like InfraFailed."""


class StopReason(StrEnum):
    """Why a Completed rollout stopped."""

    FINISHED = "Finished"
    """The agent ended by itself: a final answer, `finish`, or a tool that stops the rollout."""
    MAX_TURNS = "MaxTurns"
    """`agent.maxTurns` model calls were made."""
    TOKEN_BUDGET = "TokenBudget"
    """`agent.tokenBudget` is used up."""
    CONTEXT_EXCEEDED = "ContextExceeded"
    """The prompt is longer than the model's context."""
    CONTENT_FILTER = "ContentFilter"
    """The model server filtered the conversation."""
    EMPTY_ANSWER = "EmptyAnswer"
    """The model answered with nothing, also after a reminder."""
    AGENT_TIMEOUT = "AgentTimeout"
    """`timeouts.agentSeconds` are used up."""
    TOOL_FORMAT = "ToolFormat"
    """`agent.maxFormatErrors` answers in a row had no valid tool call."""
    RESOURCE_LIMIT = "ResourceLimit"
    """The workspace used up its memory, disk or processes, or another limit that the policy can reach."""
    AGENT_ERROR = "AgentError"
    """The agent's own code raised, or its program failed."""


class Usage(ApiModel):
    """Tokens as the server counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Tokens of reasoning among those of the completion; 0 if the server does not count them."""


class McpRecord(ApiModel):
    """What an MCP server returned at its initialization."""

    server: str
    process: str | None = None
    """The server's process in the workspace; None if the server is reached by HTTP."""
    initialized: dict[str, Any]
    """The server's response to `initialize`."""
    tools: list[dict[str, Any]]
    """The server's list of tools."""


class AttemptRecord(ApiModel):
    """First record that each runner writes when it starts or takes over an attempt (an epoch): where it runs."""

    type: Literal["attempt"] = "attempt"
    time: float
    """Unix seconds."""
    runner: str
    workspace: dict[str, Any]
    """The provider's handle, with which another process reattaches."""
    sandbox: dict[str, Any] = {}
    """Description of the sandbox: provider, mode, root or image."""
    task: Task | None = None
    """The task as changed by plugins; None if unchanged."""
    mcp: list[McpRecord] = []
    """The servers of `agent.mcpServers`."""
    boot_seconds: float = 0
    """Seconds from the request for the workspace until it was ready, before `time`."""


class PolicySpan(ApiModel):
    """Consecutive sampled tokens of one policy version."""

    tokens: int
    version: str | None
    """None if unknown, and for tokens copied from another rollout. Such tokens are not trained on."""


class IntentRecord(ApiModel):
    """A model call that is about to start."""

    type: Literal["intent"] = "intent"
    turn: int
    time: float
    conversation: int = 0
    """The conversation that this call belongs to, named by the turn of its first call."""
    parent: int | None = None
    """The turn of that conversation whose messages and answer this call extends; None for the first. `keep`, `tools`
    and the response's `promptKeep` are relative to it.
    """
    keep: int
    """How many messages at the start of this call equal those of the parent turn, its answer included."""
    messages: list[Message]
    """Messages after the kept ones."""
    tools: list[dict[str, Any]] | None = None
    """Tool definitions; None if they equal the parent turn's."""
    repeated: dict[int, tuple[int, int]] = {}
    """Only in segments. Maps positions among messages and then tools to the turn and position of an earlier equal one.
    """
    branch: int = 0
    """Set by `messages.linear`, not stored in the journal. Increases each time the messages do not extend the
    previous turn.
    """
    request_digest: str | None = None
    """SHA-256 of the client's request, with which a proxy detects its retry."""
    idempotency_key: str | None = None
    """The client's idempotency key."""
    agent_seconds: float | None = None
    """Part of `timeouts.agentSeconds` that the agent had used. The next runner continues from it. The response and the
    tools' results have the same field.
    """


class ObjectDigest(ApiModel):
    """Digest of an object that a seal lists. Its key is relative to the job's folder."""

    key: str
    sha256: str
    bytes: int


class RecordedExperts(ApiModel):
    """The experts that processed tokens of a turn: unsigned integers in an array [tokens, `layers`, `top_k`], stored in an
    object beside the records, in a zstd frame.
    """

    object: ObjectDigest
    item_bytes: Literal[1, 2]
    """Bytes of each integer, little-endian."""
    layers: int
    top_k: int
    spans: list[tuple[int, int]]
    """Positions of the array's tokens in the turn's prompt and completion together, in order: first, and after the last.
    No server reported the experts of other positions. The last sampled token of a turn has none before the next turn,
    because the model has not processed it yet.
    """


class ResponseRecord(ApiModel):
    """The model's response, as the server returned it."""

    type: Literal["response"] = "response"
    turn: int
    time: float
    seconds: float
    message: Message
    finish_reason: str
    model: str = ""
    usage: Usage = Usage()
    prompt_keep: int = 0
    """How many ids at the start of this prompt equal those of the previous response with ids, its completion included."""
    prompt_token_ids: list[int] | None = None
    """The prompt's ids after the kept ones."""
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    """One entry for each completion token."""
    policy_spans: list[PolicySpan] = []
    """Policy version of each completion token, in order; empty if the server does not report it."""
    stop_sequence: str | None = None
    """The stop string that ended the answer, if known."""
    routed_experts: RecordedExperts | None = None
    """None unless `model.routedExperts` is set."""
    agent_seconds: float | None = None
    """See `IntentRecord`."""


class CallError(ApiModel):
    """Why a call of a proxy's client has no answer."""

    reason: str
    """One CamelCase word."""
    message: str
    of_request: bool = False
    """Whether the request is the cause: the model refused it."""


class DeliveryRecord(ApiModel):
    """Whether an answer reached the client of a proxy. The latest record of a turn counts.

    A call that failed or was cancelled by its client has one too. It shows that the runner did not die during the call.
    """

    type: Literal["delivery"] = "delivery"
    turn: int
    time: float
    delivered: bool
    """False: the connection was closed. Exports omit the answer unless the client continues from it."""
    error: CallError | None = None
    """Why there is no answer; None if there is one, or if the client disconnected while the model was only slow."""
    abandoned_tokens: int = 0
    """Tokens of an answer that had arrived when its client disconnected in the middle of the text. Such an answer is not
    recorded. It counts as a turn with this many tokens.
    """


class Observation(ApiModel):
    """The result of one tool call."""

    call_id: str
    tool: str
    content: str
    """Text that the model sees."""
    error: bool = False
    """The call itself failed: unknown tool, invalid arguments, or an exception of the tool."""
    stop: bool = False
    """The tool ended the rollout as Finished."""
    seconds: float = 0
    """0 if the call was not run: refused by a plugin, or beyond the limit of one answer."""
    data: dict[str, Any] = {}
    """Machine-readable output of the tool, such as an exit code."""
    traceback: str | None = None
    """Traceback of the tool's own exception."""
    arguments: str | None = None
    """Arguments of a call that the model's answer does not contain as a tool call: the agent's own code made it, or the
    model wrote it as text.
    """


class ObservationsRecord(ApiModel):
    """The results of a turn's tool calls, in the order of the calls."""

    type: Literal["observations"] = "observations"
    turn: int
    time: float
    seconds: float = 0
    """Wall time of all calls together."""
    results: list[Observation]
    agent_seconds: float | None = None
    """See `IntentRecord`."""


class PluginCall(ApiModel):
    """One call of one plugin."""

    plugin: str
    hook: str
    seconds: float
    did: Literal["Refused", "Changed", "Stopped", "Failed"] | None = None
    """Effect of the call: a tool call refused, a tool call or task changed, a group ended early, or a failure."""
    message: str = ""
    """Explanation."""
    traceback: str | None = None
    """Traceback of the plugin's own exception."""


class CommandRecord(ApiModel):
    """A command that an agent's own code has run outside of any tool call (`AgentContext.run_command`)."""

    type: Literal["command"] = "command"
    number: int
    """Number of the call among those outside of turns, from 1."""
    turn: int
    """The latest turn before it; -1 for none."""
    time: float
    """Unix seconds at its end."""
    seconds: float
    command: str
    result: str
    """Its output and how it ended, shortened, as the tool `bash` shows them."""


class PluginsRecord(ApiModel):
    """Plugin calls since the last such record."""

    type: Literal["plugins"] = "plugins"
    time: float
    calls: list[PluginCall]


class Layer(ApiModel):
    """A tar in object storage with the changes over the layers below it: `layers/<digest>.tar.zst` beside the runs."""

    digest: str
    """SHA-256 of the tar, 64 hex characters."""
    bytes: int
    """Size of the tar."""


class SnapshotRecord(ApiModel):
    """The state of the workspace after the tool calls of a turn."""

    type: Literal["snapshot"] = "snapshot"
    turn: int
    time: float
    layers: list[Layer] = []
    """Lowest first; empty if the snapshot failed."""
    services: dict[str, list[Layer]] = {}
    """Layers of the workspaces of services, by the service's name. `layers` have the volumes."""
    mode: str = ""
    """Mode of the workspace, which a restored workspace must have too: `Overlay` or `Plain`."""
    seconds: float = 0
    message: str = ""
    """Why the snapshot failed."""

    @property
    def all_layers(self) -> list[Layer]:
        """Return the layers of the workspace and of its services."""
        return [layer for chain in (self.layers, *self.services.values()) for layer in chain]


class CheckpointRecord(ApiModel):
    """A workspace state that the agent keeps as a checkpoint. The agent continues in the workspace of the next
    AttemptRecord.
    """

    type: Literal["checkpoint"] = "checkpoint"
    name: str
    turn: int
    time: float
    workspace: str
    """In `Overlay`: the provider's handle of the frozen workspace."""
    layers: list[Layer] = []
    """In `Plain`: the snapshot's layers, lowest first."""
    error: str = ""
    """Why the state could not be saved. The agent got a FileError, and may have continued."""


class ReturnRecord(ApiModel):
    """The agent returns to a checkpoint."""

    type: Literal["return"] = "return"
    checkpoint: str
    turn: int
    time: float
    error: str = ""
    """Why the state could not be restored. The agent got a FileError, and may have continued."""


class BranchRecord(ApiModel):
    """The attempt continues from a turn of another rollout. Records up to that turn are copies from it."""

    type: Literal["branch"] = "branch"
    time: float
    job: str
    """URI of the run."""
    index: int
    attempt: int
    turn: int
    """The last copied turn."""
    snapshot_turn: int | None = None
    """Turn of the restored snapshot; None if all tool calls were run again."""
    differences: list[str] = []
    """Repeated tool calls whose results differ from the recorded ones."""


class ProgramTrajectory(ApiModel):
    """The trajectory file that a program wrote, and its conversion."""

    file: ObjectDigest | None = None
    """The unchanged file, in zstd frames."""
    bytes: int = 0
    """Size of the file."""
    format: str | None = None
    """A value of `agent.trajectory.format`; None for an unknown format."""
    atif: ObjectDigest | None = None
    """The trajectory converted to ATIF."""
    note: str = ""
    """Why the file or its conversion is missing."""


class StopRecord(ApiModel):
    """The agent has ended; its artifacts are stored next. The last such record counts, because storing may append one."""

    type: Literal["stop"] = "stop"
    time: float
    stop_reason: StopReason
    message: str = ""
    traceback: str | None = None
    """Traceback of the agent's own exception (AgentError)."""
    agent_seconds: float = 0
    program_trajectory: ProgramTrajectory | None = None
    """Set if `agent.trajectory` is configured."""


class ArtifactsRecord(ApiModel):
    """The declared artifacts are stored. The agent's workspace is no longer needed."""

    type: Literal["artifacts"] = "artifacts"
    time: float
    key: str | None = None
    """Key of the object; None if there is nothing to carry (`Shared`, or no verifier)."""
    bytes: int = 0
    message: str = ""
    """Why the artifacts cannot be graded; the verdict is then a failure."""


class Unexplained(StrEnum):
    """Part that failed for an unknown reason after the policy had acted, so that the policy may be the cause."""

    SANDBOX = "Sandbox"
    """A sandbox was lost that contained the policy's work."""
    REQUEST = "Request"
    """The model failed at this request but answered another one right afterwards."""
    ACTION = "Action"
    """The environment failed at this action."""


class FailedRecord(ApiModel):
    """An attempt was lost to infrastructure; another one may follow."""

    type: Literal["failed"] = "failed"
    time: float
    reason: str
    message: str = ""
    counted: bool = True
    """Whether it counts towards `attempts.limit`. Interruptions of the runner do not."""
    unexplained: Unexplained | None = None
    """What failed, if it is unknown whether the policy caused it."""
    alone: bool = False
    """Whether the sandbox hosted no other attempt."""
    usage: Usage = Usage()
    """Tokens of the attempt."""


class CommandVerdict(ApiModel):
    """Result of one verifier command."""

    command: str
    exit_code: int | None
    seconds: float
    output: str
    """Beginning and end of its output."""
    cause: str | None = None


class TestVerdict(ApiModel):
    """Result of one test, as reported."""

    __test__ = False  # not a test class of pytest's

    name: str
    passed: bool
    message: str = ""


class Verdict(ApiModel):
    """The verdict on one rollout."""

    reward: float
    rewards: dict[str, float] = {}
    """Further named rewards from a reward file."""
    passed: bool
    """Whether everything that was required passed."""
    commands: list[CommandVerdict] = []
    tests: list[TestVerdict] = []
    mode: VerifierMode | None = None
    """Where it was graded; None for an environment, whose own rewards count."""
    forgeable: bool = False
    """Whether the graded code could change the source of the verdict (docs/verification.md)."""
    dropped: list[str] = []
    """Artifacts that were not carried over because the test runner would load them automatically."""
    message: str = ""


class StepRecord(ApiModel):
    """Progress of one step of a task. A step has up to three records: workspace ready, grading begins, verdict.

    A task without steps that is graded in the agent's workspace (`Shared`) has only the second one.
    """

    type: Literal["step"] = "step"
    time: float
    step: str
    """Name of the step, or of the task."""
    verdict: Verdict | None = None
    """None: the step has begun, or has no verifier."""
    ended: bool = False
    grading: bool = False
    """The verifier is about to run in the agent's workspace and will change it."""


class ChangesRecord(ApiModel):
    """What the agent changed, as found when its files were carried into the grading's workspace."""

    type: Literal["changes"] = "changes"
    time: float
    diff: str
    """Unified diff from the prepared files. Large and binary files are only named, and its size is limited."""


Record = Annotated[
    AttemptRecord
    | IntentRecord
    | ResponseRecord
    | DeliveryRecord
    | ObservationsRecord
    | CommandRecord
    | PluginsRecord
    | SnapshotRecord
    | CheckpointRecord
    | ReturnRecord
    | BranchRecord
    | StopRecord
    | ArtifactsRecord
    | FailedRecord
    | StepRecord
    | ChangesRecord,
    Field(discriminator="type"),
]


class AttemptSummary(ApiModel):
    """How one attempt of a rollout ended."""

    attempt: int
    reason: str
    message: str = ""


class PluginReport(ApiModel):
    """Effects and outputs of one plugin in a rollout."""

    calls: int = 0
    """Calls of its hooks in the sealed attempt."""
    seconds: float = 0
    refused: int = 0
    """Refused tool calls."""
    changed: int = 0
    """Changed tool calls, and the task if changed."""
    failed: int = 0
    """Calls that raised, timed out, or returned an invalid value."""
    error: str | None = None
    """Error of the first failure."""
    traceback: str | None = None
    """First traceback of the plugin's own exceptions."""
    scores: dict[str, float] = {}
    """Scores of an EpisodeEvaluator. The reward comes from the verifier alone."""
    analysis: dict[str, Any] = {}
    """Output of a TrajectoryAnalyzer."""


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
    """Sampling seed of this rollout."""
    outcome: Outcome
    stop_reason: StopReason | None = None
    reason: str | None = None
    """Machine-readable reason if it is not Completed."""
    message: str = ""
    traceback: str | None = None
    """Traceback of the agent's own exception (AgentError)."""
    tool_tracebacks: dict[str, str] = {}
    """First traceback of each tool whose own code raised."""
    reward: float | None = None
    """Reward from the verifier; null unless Completed and graded."""
    rewards: dict[str, float] = {}
    passed: bool | None = None
    forgeable: bool = False
    dropped: int = 0
    """Number of the verdict's `dropped` files: an agent may have tried to cheat."""
    verifier_message: str | None = None
    """Why a failed verdict has no usable report of the verifier: an exception of its files, or a missing report. None if
    it has one. Shortened to 300 characters.
    """
    attempt: int
    """Number of the sealed attempt."""
    failed_attempts: list[AttemptSummary] = []
    turns: int = 0
    tool_calls: int = 0
    usage: Usage = Usage()
    """Tokens of the sealed attempt."""
    lost_usage: Usage = Usage()
    """Tokens of the other attempts, which were lost to infrastructure."""
    branches: int = 1
    """Number of token sequences of this rollout: 1, plus 1 for each fork."""
    token_forks: int = 0
    """Forks in which the messages continued but the server's prompt ids did not. The cause is a tokenizer or chat
    template that does not reproduce sampled tokens. Forks by agents that rewrite their history are not counted.
    """
    policy_versions: list[str] = []
    stale: bool = False
    """Whether, at its end, its first token's policy was more than `model.maxPolicyLag` versions old."""
    token_capture: str = "TextOnly"
    """How token ids were recorded: Tokens | Chat | TextOnly."""
    sandbox: dict[str, Any] = {}
    """Provider, mode and actual root of the sandbox."""
    seconds: dict[str, float] = {}
    """Seconds of the sealed attempt by part (`engine/attempt/results.py`): boot, agent, model, tools, verifier, total."""
    started: float | None = None
    """Unix time at which its workspace was requested."""
    ended: float | None = None
    trajectory: str | None = None
    """Key of the ATIF trajectory, relative to the job's folder."""
    plugins: dict[str, PluginReport] = {}
    """Reports of the called plugins, by name."""
    batch: str | None = None
    """Label with which its group was submitted."""
    advantage: float | None = None
    """The reward as normalised by `spec.reward`. In results and exports, never in a seal, because it depends on other
    rollouts.
    """
    branched_from: BranchRecord | None = None
    """Where the branch started. Turns, tool calls, usage and seconds count only what followed."""
    program_trajectory: ProgramTrajectory | None = None
    """The trajectory that the program of `Command` wrote."""


class Seal(ApiModel):
    """The object that completes a rollout. It is created once and never changed. Only objects that it lists count."""

    version: int = RECORD_VERSION
    result: Result
    verdict: Verdict | None = None
    objects: list[ObjectDigest]
    """The journal's segments in order, artifacts, trajectory."""
