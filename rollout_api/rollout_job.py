"""`RolloutJob`: tasks × groupSize rollouts, with verified rewards and complete trajectories as the result."""

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from rollout_api.base import (
    ApiModel,
    Command,
    ObjectName,
    Path,
    Quantity,
    Seconds,
    ShortText,
    distinct,
    exactly_one,
    named_program,
)
from rollout_api.conditions import Condition, Metadata
from rollout_api.model import ApiKeySource, ModelSpec, Sampling
from rollout_api.records import Outcome
from rollout_api.rewards import RewardNormalization
from rollout_api.sandbox import SandboxTemplate, Security
from rollout_api.storage import Storage
from rollout_api.tasks import RewardRule, Task, Tasks, VerifierMode


class Mode(StrEnum):
    """`Train`: rollouts for training. `Eval`: rollouts for evaluation. Every record and export has the mode."""

    TRAIN = "Train"
    EVAL = "Eval"


AGENTS_WITHOUT_MODEL = frozenset({"Oracle", "Nop"})
TOOL_CALLING_AGENTS = ("ToolCalling", "Coding", "SWE")
"""Built-in agents that use the model's native tool calls; ReAct writes calls as text."""
COMMAND_AGENT = "Command"
"""The agent whose program the manifest names."""
CATALOG_AGENTS = (
    "ClaudeCode",
    "Codex",
    "QwenCode",
    "Pi",
    "OpenCode",
    "GeminiCLI",
    "MiniSWEAgent",
    "Aider",
    "OpenHands",
    "Terminus",
)
"""Agents that are published programs; `agent_runtime/agents/catalog` has the facts about each."""
PROGRAM_AGENTS = (COMMAND_AGENT, *CATALOG_AGENTS)
"""Agents that are programs in the sandbox."""
# A built-in name, the name of an entry point, or module:Class.
ExtensionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?$", max_length=512)]


class TrajectoryFormat(StrEnum):
    """`MiniSWEAgent`: its JSON. `SWEAgent`: its `.traj`. `ATIF`: Agent Trajectory Interchange Format.
    `ClaudeCode`, `Codex`, `QwenCode`, `Pi`, `GeminiCLI`: the session file of that agent. `OpenCode`: the output of
    `opencode export`. `OpenHands`: the files of a conversation, one a line, its state first.
    """

    MINI_SWE_AGENT = "MiniSWEAgent"
    """`mini-swe-agent-1.1`."""
    SWE_AGENT = "SWEAgent"
    ATIF = "ATIF"
    """Agent Trajectory Interchange Format, any version 1."""
    CLAUDE_CODE = "ClaudeCode"
    CODEX = "Codex"
    QWEN_CODE = "QwenCode"
    PI = "Pi"
    OPEN_CODE = "OpenCode"
    GEMINI_CLI = "GeminiCLI"
    OPEN_HANDS = "OpenHands"


class AgentTrajectory(ApiModel):
    """Location of the trajectory file that the program of `Command` writes."""

    path: Path
    """Relative to the working directory. `*` is any text without a slash; of several files, the one changed last is kept.
    """
    format: TrajectoryFormat | None = None
    """Detected from the file's contents when left out."""


class ContextMethod(StrEnum):
    """`Truncate`: drop the oldest turns. `Summarize`: replace all earlier turns by a summary that the model writes."""

    TRUNCATE = "Truncate"
    SUMMARIZE = "Summarize"


class ContextLimit(ApiModel):
    """Longest conversation; exactly one of `maxTokens` and `maxMessages`."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a call and its answer, as counted by the server; checked before the next call."""
    max_messages: Annotated[int, Field(ge=4)] | None = None
    """Messages of the next call."""
    method: ContextMethod = ContextMethod.TRUNCATE
    """How a longer conversation is shortened. The system prompt and the task always remain."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        exactly_one({"maxTokens": self.max_tokens, "maxMessages": self.max_messages})
        return self


class McpServer(ApiModel):
    """A tool server that speaks the Model Context Protocol; either `command` or `url`."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$", max_length=32)]
    """Its tools are named `<name>__<tool>`."""
    command: Annotated[
        list[Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=64), AfterValidator(named_program)
    ] = []
    """Program and arguments, started in the workspace of each rollout. Its standard input and output are the
    connection.
    """
    url: Annotated[str, StringConstraints(pattern=r"^https?://", max_length=2048)] | None = None
    """A Streamable HTTP endpoint that the runner calls."""
    api_key_from: ApiKeySource | None = None
    """Source of the key that is sent to `url` as a bearer token."""
    tools: Annotated[list[ShortText], Field(min_length=1, max_length=256)] | None = None
    """Tools offered to the model; all when left out."""

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give exactly one of command (in the sandbox) and url (HTTP)")
        if self.command and self.api_key_from is not None:
            raise ValueError("apiKeyFrom is only for url; set variables of a command in sandbox.env")
        return self


class CatalogOptions(ApiModel):
    """`agent.config` of an agent of the catalog."""

    version: Annotated[str, StringConstraints(pattern=r"^\d[0-9A-Za-z.+-]*$", max_length=64)] | None = None
    """Exact version of its package; the tested one when left out."""
    arguments: Annotated[list[Annotated[str, StringConstraints(max_length=65_536)]], Field(max_length=256)] = []
    """Further arguments of its command line."""


DEFAULT_TOOLS = ["bash", "editor", "search", "finish"]


class Agent(ApiModel):
    """The agent that works on the tasks."""

    type: ExtensionName = "ToolCalling"
    """`ToolCalling`, `ReAct`, `Coding`, `SWE`, `Environment` (acts by text in `tasks.environments`), `Command` (a
    program in the sandbox), a published program such as `ClaudeCode` (see docs/coding-agents.md), `Oracle` (runs the
    task's solution), `Nop`, an entry point, or module:Class.
    """
    tools: Annotated[list[ExtensionName], Field(max_length=64)] = DEFAULT_TOOLS
    """Built-in tools, entry points, or module:Class. Programs have their own tools."""
    command: Annotated[list[Annotated[str, StringConstraints(max_length=65_536)]], Field(max_length=256)] = []
    """The program of `Command` and its arguments, started without a shell; `{prompt}`, `{promptFile}` (a path) and `{model}`
    are filled in."""
    install: Annotated[list[Command], Field(max_length=64)] = []
    """Shell commands that install the program, run after the task's setup in the same way."""
    system_prompt: Annotated[str, StringConstraints(max_length=204_800)] | None = None
    """Replaces the agent's system prompt."""
    max_turns: Annotated[int, Field(ge=1, le=100_000)] = 30
    """Most model calls of one rollout."""
    token_budget: Annotated[int, Field(ge=1)] | None = None
    """Most tokens, prompt and completion, of one rollout. Calls that run at the same time may exceed it together."""
    max_format_errors: Annotated[int, Field(ge=1, le=1000)] = 3
    """Consecutive malformed answers after which the rollout ends with ToolFormat."""
    config: dict[str, Any] = {}
    """Options of a custom agent. A published program such as `ClaudeCode` has `version` (an exact version of its package)
    and `arguments` (a list of further arguments).
    """
    trajectory: AgentTrajectory | None = None
    """Trajectory file that the program of `Command` writes. It is kept with the rollout and converted to ATIF."""

    mcp_servers: Annotated[list[McpServer], Field(max_length=16)] = []
    """Servers whose tools are added to `tools`. Needs the extra `mcp` in the runner's environment.
    """
    context: ContextLimit | None = None
    """Limits the length of the conversation. Each cut begins a new branch. Without it, the server's own limit ends the
    rollout.
    """

    @property
    def is_program(self) -> bool:
        """Whether the agent is a program in the sandbox."""
        return self.type in PROGRAM_AGENTS

    @property
    def catalog_options(self) -> CatalogOptions:
        """Return `config` of an agent of the catalog. Raises ValidationError."""
        return CatalogOptions.model_validate(self.config)

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> Self:
        is_command = self.type == COMMAND_AGENT
        if self.type in CATALOG_AGENTS:
            self._fields_fit_the_catalog()
        if is_command != bool(self.command and self.command[0]):
            raise ValueError(
                "command, which begins with the name of a program, is needed for type Command, and for no other type"
            )
        if self.install and not is_command:
            raise ValueError("install is only for type Command; use the task's setup instead")
        if len({server.name for server in self.mcp_servers}) < len(self.mcp_servers):
            raise ValueError("mcpServers: two servers have the same name; give each a different name")
        if self.context is not None and (self.is_program or self.type in AGENTS_WITHOUT_MODEL):
            raise ValueError(
                f"context is not for type {self.type}, whose conversation the engine does not manage; remove it"
            )
        if self.mcp_servers and (self.is_program or self.type in AGENTS_WITHOUT_MODEL):
            raise ValueError(f"mcpServers is not for type {self.type}, which calls no MCP tools; remove it")
        # A cluster fills in the default, so it cannot be told from tools that somebody wrote.
        if self.is_program and self.tools not in ([], DEFAULT_TOOLS):
            raise ValueError(f"tools is not for type {self.type}, whose program has its own tools; remove it")
        if self.trajectory and not is_command:
            raise ValueError("trajectory is only for type Command; other agents are always recorded")
        if self.is_program and self.system_prompt is not None:
            raise ValueError(
                f"systemPrompt is not for type {self.type}, whose program has its own prompt; leave it out"
            )
        return self

    def _fields_fit_the_catalog(self) -> None:
        if self.command or self.install:
            field, option = ("command", "arguments") if self.command else ("install", "version")
            raise ValueError(
                f"{field} is not for type {self.type}, which has its own; remove it and use config.{option}, or use "
                "type Command"
            )
        try:
            self.catalog_options  # noqa: B018 it is validated
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            expected = {
                "string_pattern_mismatch": "expected an exact version such as 1.2.3",
                "extra_forbidden": f"unknown option; {self.type} has {' and '.join(CatalogOptions.model_fields)}",
            }.get(first["type"], first["msg"])
            raise ValueError(f"config.{where}: {expected}, found {str(first['input'])[:80]!r}") from None


class Verifier(ApiModel):
    """How all tasks are graded."""

    mode: VerifierMode | None = None
    """Where the grading runs; overrides the mode of tasks. Default: the mode of the task, else `Separate`."""
    artifacts: Annotated[list[Path], Field(min_length=1, max_length=64)] = ["."]
    """Paths to carry from the agent's workspace to the grading workspace, relative to the working directory; `*` is any
    text.
    """
    artifacts_limit: Quantity = "1Gi"
    """Most bytes of artifacts. A rollout beyond it is Completed with ResourceLimit."""
    reward: RewardRule = RewardRule.FRACTION
    """How verdicts are converted into a reward."""
    failed_reward: Annotated[float, Field(ge=-1, le=0)] = 0
    """Reward of work that cannot be graded, and of steps that were not reached. If verifiers give rewards below 0, set it to
    the lowest, or ending early pays.
    """


class Attempts(ApiModel):
    """Retries after infrastructure failures. Failures that the policy caused are never retried."""

    limit: Annotated[int, Field(ge=1, le=100)] = 3
    """Most attempts of one rollout."""
    backoff_seconds: Annotated[float, Field(ge=0, le=3600)] = 1
    """Seconds before the second attempt; doubled for each further one, with jitter."""


class Completion(ApiModel):
    """When a group, and the job, is complete."""

    min_completed_per_group: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Completed members that make a group complete; all of them when left out."""
    cancel_stragglers: bool = False
    """Cancel members that still run when their group is complete."""
    max_infra_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Abort the job when more than this fraction of its ended rollouts is lost to infrastructure. Checked once 20
    rollouts have ended.
    """


class Runners(ApiModel):
    """The processes in which the agents run."""

    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    """Runner pods, among which groups are sharded. A laptop has one."""
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Rollouts that one runner works on concurrently."""
    image: ShortText | None = None
    """Image of the runner pods, including your own agents, tools and plugins."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of the runner pods, for workload identity."""
    image_pull_secrets: Annotated[list[ObjectName], Field(max_length=16)] = []
    """Pull secrets of the runner pods."""
    pod_template: dict[str, Any] | None = None
    """Merged into the runner pods: limits of container `runner`, tolerations, nodeSelector, affinity, priorityClassName
    and the like. The fields that a sandbox's template may not have are refused here too.
    """


class PluginUse(ApiModel):
    """A plugin of the job."""

    name: ExtensionName
    """`PerformanceStop`, `TrajectoryAnalysis`, `SafetyFilter`, an entry point, or module:Class."""
    config: dict[str, Any] = {}
    """Options of the plugin."""
    timeout_seconds: Seconds = 60
    """Time limit of one hook call. A call beyond it counts as a failure of the plugin."""


_DISTINCT_PLUGINS = distinct("name", "{} is given twice, and results are stored by name; keep one of them")


FINISHED_JOB_SECONDS = 7 * 24 * 3600
"""How long a finished job stays in the cluster by default."""

MUTABLE_FIELDS = ("suspend", "ttlSecondsAfterFinished")
"""Fields of a job's spec that may change while it runs, because they do not affect its results."""


class RolloutJobSpec(ApiModel):
    """Desired state of a RolloutJob."""

    mode: Mode = Mode.TRAIN
    """Purpose of the rollouts."""
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Seed of all randomness. Member m of a group samples with a seed derived from it."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts of each task."""
    tasks: Tasks
    """The tasks of the job."""
    model: ModelSpec | None = None
    """The model that the agents call. Optional only for agents that need none."""
    sampling: Sampling = Sampling()
    """Sampling parameters."""
    agent: Agent = Agent()
    """The agent that works on the tasks."""
    sandbox: SandboxTemplate = SandboxTemplate()
    """The sandbox in which tools run."""
    verifier: Verifier = Verifier()
    """How results are graded."""
    attempts: Attempts = Attempts()
    """Retries after infrastructure failures."""
    completion: Completion = Completion()
    """When a group is complete."""
    runners: Runners = Runners()
    """The processes in which the agents run."""
    output: Storage
    """Destination of results and trajectories."""
    security: Security = Security.STANDARD
    """Which parts of the sandbox pods `sandbox.podTemplate` may change."""
    suspend: bool = False
    """Stop the runners after their running turns and delete all sandboxes; `false` resumes. Only in a cluster."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=-1, le=2**31 - 1)] = FINISHED_JOB_SECONDS
    """Delete the job this long after its end; results remain in storage. -1 keeps the job until it is deleted by hand.
    Only in a cluster.
    """
    plugins: Annotated[list[PluginUse], Field(max_length=32), _DISTINCT_PLUGINS] = []
    """Your code that is called around groups, rollouts, tool calls and verifier commands, in this order."""
    reward: RewardNormalization | None = None
    """How advantages are computed from rewards, for results and exports; none are computed when left out."""

    @model_validator(mode="before")
    @classmethod
    def _take_group_size_from_branch(cls, value: Any) -> Any:
        """Set the group size from `count` of `tasks.branch`, unless it is set. An API server sets 1 by default."""
        match value:
            case {"tasks": {"branch": [{"count": count}, *_]}} if count is not None:
                if value.get("groupSize", value.get("group_size", 1)) == 1:
                    return {name: field for name, field in value.items() if name != "group_size"} | {"groupSize": count}
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.tasks.branch is not None:
            self._branches_fit()
        minimum = self.completion.min_completed_per_group
        if minimum is not None and minimum > self.group_size:
            raise ValueError(
                f"completion.minCompletedPerGroup is {minimum}, more than groupSize {self.group_size}; lower it"
            )
        if self.model is None and self.agent.type not in AGENTS_WITHOUT_MODEL:
            raise ValueError(f"model is needed for agent {self.agent.type}; only Oracle and Nop need none")
        if self.calls_tools and self.model and self.model.server and self.model.server.tool_call_parser is None:
            raise ValueError(
                f"model.server.toolCallParser is missing: agent {self.agent.type} calls tools, and the engine finds calls "
                "in answers with a parser for the model; set it, such as hermes"
            )
        if self.agent.is_program and self.tasks.environments:
            raise ValueError(
                f"agent.type {self.agent.type} runs a program in a sandbox, which cannot act in tasks.environments; use "
                "Environment (text), ToolCalling (the tool act), or a custom agent"
            )
        if self.agent.type == "Oracle" and self.tasks.inline:
            for index, task in enumerate(self.tasks.inline):
                if not task.has_solution:
                    raise ValueError(f"tasks.inline[{index}] ({task.name}) has no solution for the Oracle agent to run")
        return self

    def _branches_fit(self) -> None:
        count = (self.tasks.branch or [])[0].count
        if self.group_size != count:
            raise ValueError(
                f"groupSize is {self.group_size}, and count of tasks.branch is {count}; leave groupSize out"
            )
        if self.agent.is_program:
            raise ValueError(
                f"agent.type {self.agent.type} cannot be used with tasks.branch: its program cannot start from a "
                "recorded turn; use another agent type"
            )

    def verifier_of(self, task: Task) -> Verifier:
        """Return how one task is graded: the job's rules, overridden by the task's."""
        own = task.verifier
        mode = self.verifier.mode or (own and own.mode) or VerifierMode.SEPARATE
        # The next step starts from the state that a step leaves, so it is graded there.
        changes: dict[str, Any] = {"mode": VerifierMode.SHARED if task.steps else mode}
        if own is not None and own.reward is not None:
            changes["reward"] = own.reward
        return self.verifier.model_copy(update=changes)

    @property
    def calls_tools(self) -> bool:
        """Whether a built-in agent uses the model's native tool calls."""
        offered = self.agent.tools or self.agent.mcp_servers or self.tasks.environments
        return self.agent.type in TOOL_CALLING_AGENTS and bool(offered)

    @property
    def per_sandbox(self) -> int:
        """Return how many workspaces one sandbox hosts at once."""
        return self.sandbox.workspaces.per_sandbox or self.group_size

    @property
    def min_completed(self) -> int:
        """Return how many completed members make a group complete."""
        return self.completion.min_completed_per_group or self.group_size


class RunnerState(StrEnum):
    """`Running`: working. `Draining`: ending soon. `Completed`: the shard is complete. `Aborted`: the shard failed."""

    RUNNING = "Running"
    DRAINING = "Draining"
    COMPLETED = "Completed"
    ABORTED = "Aborted"


Count = Annotated[int, Field(ge=0, le=10**12)]
"""A count. The limit is far above real values, and sums over all runners fit into 64 bits."""


class RunnerReport(ApiModel):
    """What one runner reports of its shard."""

    index: Annotated[int, Field(ge=0, le=255)]
    """Index of the runner."""
    state: RunnerState = RunnerState.RUNNING
    """Progress of the runner. `Completed` and `Aborted` are final for its shard."""
    message: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Why it was aborted, or what it waits for."""
    total: Count | None = None
    """Rollouts of its shard; unknown while a stream is open."""
    sealed: Count = 0
    """Rollouts that are sealed."""
    running: Count = 0
    """Running rollouts."""
    sealed_indexes: Annotated[str, StringConstraints(max_length=4096)] | None = None
    """Indexes of sealed rollouts as intervals in the shard's own numbering (`0-14,17`); left out if too long."""
    outcomes: Annotated[dict[Outcome, Count], Field(max_length=16)] = {}
    """Sealed rollouts by outcome."""
    reward_sum: float = 0
    """Sum of the rewards."""
    rewarded: Count = 0
    """Rollouts with a reward."""
    token_forks: Count = 0
    """Prompts in its sealed rollouts whose token ids did not extend the previous ones although the messages did."""
    policy_update: Annotated[int, Field(ge=0)] | None = None
    """Latest update of its ModelServer's policy for which the policy version of every token is settled."""
    pools: Annotated[dict[ObjectName, Count], Field(max_length=256)] = {}
    """Places that it wants now in each SandboxPool, used ones included."""
    drains: Count = 0
    """How often a runner of this shard was asked to end, as by an eviction. Its pod did not fail."""


class Restarts(ApiModel):
    """Failed runner pods and sealed rollouts when progress was last observed."""

    failed_pods: Annotated[int, Field(ge=0)] = 0
    """Failed runner pods at that moment."""
    sealed: Annotated[int, Field(ge=0)] = 0
    """Sealed rollouts at that moment."""
    disrupted_pods: Annotated[int, Field(ge=0)] | None = None
    """Runner pods that ended since then by eviction, preemption or the loss of their node. They do not count as failures."""
    drains: Annotated[int, Field(ge=0)] | None = None
    """Drains that all runners had reported at that moment. Pods that drained since then do not count as failures either."""


class RolloutJobStatus(ApiModel):
    """Observed state of a RolloutJob."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Ready, Progressing, Succeeded, Failed, Suspended, Invalid."""
    total: Annotated[int, Field(ge=0)] | None = None
    """Number of rollouts; unknown while a stream is open."""
    sealed: Annotated[int, Field(ge=0)] | None = None
    """Rollouts that are sealed."""
    outcomes: Annotated[dict[Outcome, Annotated[int, Field(ge=0)]], Field(max_length=16)] | None = None
    """Sealed rollouts by outcome."""
    mean_reward: float | None = None
    """Mean over the rollouts that have a reward."""
    token_forks: Annotated[int, Field(ge=0)] | None = None
    """Prompts whose token ids did not extend the previous ones although the messages did."""
    restarts: Restarts | None = None
    """Counters of the last observed progress. Ten failed runner pods after it fail the job."""
    result_uri: Annotated[Annotated[str, StringConstraints(max_length=2048)] | None, Field(alias="resultURI")] = None
    """Folder of the results."""


class RolloutJob(ApiModel):
    """Tasks × groupSize rollouts, with verified rewards and complete trajectories as the result."""

    api_version: Literal["rollout.dev/v1alpha1"]
    kind: Literal["RolloutJob"]
    metadata: Metadata
    spec: RolloutJobSpec
    """Desired state."""
    status: RolloutJobStatus | None = None
    """Observed state."""


class RolloutShard(ApiModel):
    """One runner's part of a RolloutJob. The operator creates it, its runner reports in it, and the job's status has
    the sum.
    """

    api_version: Literal["rollout.dev/v1alpha1"]
    kind: Literal["RolloutShard"]
    metadata: dict[str, Any]
    """Metadata as the operator writes it. The name is longer than that of the job."""
    status: RunnerReport | None = None
    """The runner's report."""
