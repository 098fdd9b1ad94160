"""`RolloutJob`: tasks × groupSize rollouts, with verified rewards and complete trajectories as the result."""

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from rollout_api.base import ApiModel, Command, ObjectName, Path, Quantity, Seconds, ShortText, distinct, exactly_one
from rollout_api.conditions import Condition, Metadata
from rollout_api.model import ApiKeySource, ModelSpec, Sampling
from rollout_api.records import Outcome
from rollout_api.rewards import RewardNormalization
from rollout_api.sandbox import SandboxTemplate, Security
from rollout_api.tasks import RewardRule, Task, Tasks, VerifierMode


class Mode(StrEnum):
    """`Train`: rollouts for training. `Eval`: rollouts for evaluation. Every record and export has the mode."""

    TRAIN = "Train"
    EVAL = "Eval"


AGENTS_WITHOUT_MODEL = frozenset({"Oracle", "Nop"})
TOOL_CALLING_AGENTS = ("ToolCalling", "Coding", "SWE")
"""Built-in agents that call tools by the model's own means; ReAct calls them in text."""
COMMAND_AGENT = "Command"
"""The agent that is a program in the sandbox."""
# A built-in name, the name of an entry point, or module:Class.
ExtensionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?$", max_length=512)]


class TrajectoryFormat(StrEnum):
    """`MiniSWEAgent`: its JSON. `SWEAgent`: its `.traj`. `ATIF`: Agent Trajectory Interchange Format."""

    MINI_SWE_AGENT = "MiniSWEAgent"
    """`mini-swe-agent-1.1`."""
    SWE_AGENT = "SWEAgent"
    """SWE-agent's `.traj`."""
    ATIF = "ATIF"
    """Agent Trajectory Interchange Format, any version 1."""


class AgentTrajectory(ApiModel):
    """The trajectory file that the program of `Command` writes of itself."""

    path: Path
    """Relative to the working directory."""
    format: TrajectoryFormat | None = None
    """Recognised by what is in the file when left out."""


class ContextMethod(StrEnum):
    """`Truncate`: the oldest turns are left out. `Summarize`: the model writes a summary in place of all earlier turns."""

    TRUNCATE = "Truncate"
    """The oldest turns are left out."""
    SUMMARIZE = "Summarize"
    """The model writes a summary, a turn of its own, which stands for all earlier turns."""


class ContextLimit(ApiModel):
    """How long a conversation may become; exactly one of `maxTokens` and `maxMessages`."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a call and its answer, as the server counts them; looked at before the next call."""
    max_messages: Annotated[int, Field(ge=4)] | None = None
    """Messages of the next call."""
    method: ContextMethod = ContextMethod.TRUNCATE
    """What is done beyond it. The system prompt and the task always stay."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        exactly_one({"maxTokens": self.max_tokens, "maxMessages": self.max_messages})
        return self


class McpServer(ApiModel):
    """A server of tools that speaks the Model Context Protocol; either `command` or `url`."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$", max_length=32)]
    """Its tools are named `<name>__<tool>`."""
    command: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(max_length=64)
    ] = []
    """Program and arguments, started in the workspace of each rollout; its standard input and output are the connection."""
    url: Annotated[str, StringConstraints(pattern=r"^https?://", max_length=2048)] | None = None
    """A Streamable HTTP endpoint, asked by the runner."""
    api_key_from: ApiKeySource | None = None
    """Where the key is read that is sent to `url` as a bearer token."""
    tools: Annotated[list[ShortText], Field(min_length=1, max_length=256)] | None = None
    """Those that the model is offered; all when left out."""

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give exactly one of command (in the sandbox) and url (HTTP)")
        if self.command and self.api_key_from is not None:
            raise ValueError("apiKeyFrom is sent to a url; what a command needs in the sandbox is sandbox.env")
        return self


class Agent(ApiModel):
    """Who works on the tasks."""

    type: ExtensionName = "ToolCalling"
    """`ToolCalling`, `ReAct`, `Coding`, `SWE`, `Environment` (acts by text in `tasks.environments`), `Command` (a program in
    the sandbox), `Oracle` (runs the task's solution), `Nop`, an entry point, or module:Class."""
    tools: Annotated[list[ExtensionName], Field(max_length=64)] = ["bash", "editor", "search", "finish"]
    """Built-in tools, entry points, or module:Class. A `Command` brings its own."""
    command: Annotated[list[Annotated[str, StringConstraints(max_length=65_536)]], Field(max_length=256)] = []
    """The program of `Command` and its arguments, started without a shell; `{prompt}`, `{promptFile}` (a path) and `{model}`
    are filled in."""
    install: Annotated[list[Command], Field(max_length=64)] = []
    """Shell commands that bring that program, run after the task's setup and like it."""
    system_prompt: Annotated[str, StringConstraints(max_length=204_800)] | None = None
    """Replaces the agent's own system prompt."""
    max_turns: Annotated[int, Field(ge=1, le=100_000)] = 30
    """Model calls of one rollout."""
    token_budget: Annotated[int, Field(ge=1)] | None = None
    """Tokens, prompt and completion, of one rollout."""
    max_format_errors: Annotated[int, Field(ge=1, le=1000)] = 3
    """Malformed answers in a row after which the rollout ends with ToolFormat."""
    config: dict[str, Any] = {}
    """Options of a custom agent."""
    trajectory: AgentTrajectory | None = None
    """What the program of `Command` writes of itself: kept with the rollout, and converted to ATIF."""

    mcp_servers: Annotated[list[McpServer], Field(max_length=16)] = []
    """Servers whose tools stand beside `tools`. Needs `pip install 'agent-rollouts[mcp]'` where the runner is."""
    context: ContextLimit | None = None
    """Keeps the conversation short; each cut begins a new branch. The server's own limit ends a rollout without it."""

    @property
    def is_command(self) -> bool:
        """A program in the sandbox is the agent."""
        return self.type == COMMAND_AGENT

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> Self:
        if self.is_command != bool(self.command and self.command[0]):
            raise ValueError(
                "command, which begins with the name of a program, is needed for type Command, and for no other type"
            )
        if self.install and not self.is_command:
            raise ValueError("install is for type Command; what a task needs is brought by its setup")
        if len({server.name for server in self.mcp_servers}) < len(self.mcp_servers):
            raise ValueError("mcpServers: two have the same name; their tools could not be told apart")
        if self.context is not None and (self.is_command or self.type in AGENTS_WITHOUT_MODEL):
            raise ValueError(f"context is not for type {self.type}, which holds no conversation of ours; leave it out")
        if self.mcp_servers and (self.is_command or self.type in AGENTS_WITHOUT_MODEL):
            raise ValueError(f"mcpServers is not for type {self.type}, which calls no tools of ours; leave it out")
        if self.trajectory and not self.is_command:
            raise ValueError("trajectory is for type Command; what any other agent does is recorded as it is")
        if self.is_command and self.system_prompt is not None:
            raise ValueError("systemPrompt is not for type Command, whose program has its own; leave it out")
        return self


class Verifier(ApiModel):
    """How all tasks are graded."""

    mode: VerifierMode | None = None
    """Where the grading runs, whatever a task says; left out: where the task says, else `Separate`."""
    artifacts: Annotated[list[Path], Field(min_length=1, max_length=64)] = ["."]
    """What is carried from the agent's workspace to the grading one: paths in the working directory; `*` is any text."""
    artifacts_limit: Quantity = "1Gi"
    """Most bytes of artifacts; a rollout over it is Completed with ResourceLimit."""
    reward: RewardRule = RewardRule.FRACTION
    """How the verdicts become a reward."""


class Attempts(ApiModel):
    """New tries after infrastructure failures; what the policy caused is never tried again."""

    limit: Annotated[int, Field(ge=1, le=100)] = 3
    """Attempts of one rollout."""
    backoff_seconds: Annotated[float, Field(ge=0, le=3600)] = 1
    """Before the second attempt; doubles from then on, with jitter."""


class Completion(ApiModel):
    """When a group, and the job, is done."""

    min_completed_per_group: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Completed members that make a group complete; all of them when left out."""
    cancel_stragglers: bool = False
    """Cancel the members that still run when their group is complete."""
    max_infra_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Abort the job when more of its ended rollouts are lost to infrastructure; judged from 20 ended ones on."""


class Runners(ApiModel):
    """The processes that drive the agents."""

    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    """Runner pods; groups are sharded among them. A laptop has one."""
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Rollouts that one runner works on at once."""
    image: ShortText | None = None
    """Image of the runner pods, with your own agents, tools and plugins in it."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of the runner pods, for workload identity."""
    image_pull_secrets: Annotated[list[ObjectName], Field(max_length=16)] = []
    """Pull secrets of the runner pods."""
    pod_template: dict[str, Any] | None = None
    """Merged over the runner pods: limits of container `runner`, tolerations, nodeSelector, affinity, priorityClassName and
    the like. The same fields are refused as in a sandbox's template."""


class PluginUse(ApiModel):
    """A plugin of the job."""

    name: ExtensionName
    """`PerformanceStop`, `TrajectoryAnalysis`, `SafetyFilter`, an entry point, or module:Class."""
    config: dict[str, Any] = {}
    """Its options; `rolloutctl plugins NAME` lists them."""
    timeout_seconds: Seconds = 60
    """Time that one call of one of its hooks may take; over it the plugin has failed."""


_DISTINCT_PLUGINS = distinct("name", "{} is given twice; results are kept by name, keep one of them")


class Output(ApiModel):
    """Where results and trajectories go."""

    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    """`s3://`, `gs://`, `az://` with a prefix, or a local folder."""
    secret_ref: ObjectName | None = None
    """Secret whose keys are the store's own environment variables, such as AWS_ACCESS_KEY_ID."""

    @field_validator("uri")
    @classmethod
    def _known_scheme(cls, uri: str) -> str:
        scheme, separator, _ = uri.partition("://")
        if separator and scheme.lower() not in ("s3", "gs", "az", "file"):
            raise ValueError(f"scheme {scheme!r} is unknown; use s3://, gs://, az://, file:// or a local folder")
        return uri


FINISHED_JOB_SECONDS = 7 * 24 * 3600
"""How long a finished job stays in the cluster by default."""

MUTABLE_FIELDS = ("suspend", "ttlSecondsAfterFinished")
"""Fields of a job's spec that may change while it runs: they say nothing about its results."""


class RolloutJobSpec(ApiModel):
    """What is asked for."""

    mode: Mode = Mode.TRAIN
    """What the rollouts are for."""
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Seed of everything random; member m of a group samples with a seed derived from it."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts of each task."""
    tasks: Tasks
    """What is worked on."""
    model: ModelSpec | None = None
    """What answers; left out only for the agents that need none."""
    sampling: Sampling = Sampling()
    """How the model samples."""
    agent: Agent = Agent()
    """Who works on the tasks."""
    sandbox: SandboxTemplate = SandboxTemplate()
    """Where the tools run."""
    verifier: Verifier = Verifier()
    """How results are graded."""
    attempts: Attempts = Attempts()
    """New tries after infrastructure failures."""
    completion: Completion = Completion()
    """When a group is done."""
    runners: Runners = Runners()
    """The processes that drive the agents."""
    output: Output
    """Where results go."""
    security: Security = Security.STANDARD
    """What `sandbox.podTemplate` may change of the sandbox pods."""
    suspend: bool = False
    """Stop the runners after their running turns and give all sandboxes back; `false` again goes on. In a cluster only."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=-1, le=2**31 - 1)] = FINISHED_JOB_SECONDS
    """Delete the job so long after its end; results stay in storage. -1 keeps the job until somebody deletes it. In a
    cluster only."""
    plugins: Annotated[list[PluginUse], Field(max_length=32), _DISTINCT_PLUGINS] = []
    """Code of yours that is called around groups, rollouts, tool calls and verifier commands, in this order."""
    reward: RewardNormalization | None = None
    """How rewards become advantages in results and exports; none are computed when left out."""

    @model_validator(mode="before")
    @classmethod
    def _a_branch_sizes_its_group(cls, value: Any) -> Any:
        """`count` of `tasks.branch` is the groups' size, which need not be given twice; an API server fills in 1."""
        branch = (
            value.get("tasks", {}).get("branch")
            if isinstance(value, dict) and isinstance(value.get("tasks"), dict)
            else None
        )
        count = branch[0].get("count") if isinstance(branch, list) and branch and isinstance(branch[0], dict) else None
        if count is None:
            return value
        given = value.get("groupSize", value.get("group_size", 1))
        if given == 1:
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
            raise ValueError(f"model is needed for agent {self.agent.type}; only Oracle and Nop do without")
        if self.calls_tools and self.model and self.model.server and self.model.server.tool_call_parser is None:
            raise ValueError(
                f"model.server.toolCallParser is missing: agent {self.agent.type} calls tools, and vLLM finds calls in "
                "answers with a parser for the model; set it, such as hermes"
            )
        if self.agent.is_command and self.tasks.environments:
            raise ValueError(
                "agent.type Command runs a program in a sandbox, and tasks.environments have to be acted in: use "
                "Environment (text), ToolCalling (the tool act), or an agent of your own"
            )
        if self.agent.type == "Oracle" and self.tasks.inline:
            for index, task in enumerate(self.tasks.inline):
                if not task.has_solution:
                    raise ValueError(f"tasks.inline[{index}] ({task.name}) has no solution for the Oracle agent to run")
        return self

    def _branches_fit(self) -> None:
        count = (self.tasks.branch or [])[0].count
        if self.group_size != count:
            raise ValueError(f"groupSize is {self.group_size}, and tasks.branch asks for {count}; leave groupSize out")
        if self.agent.is_command:
            raise ValueError(
                "agent.type Command cannot branch: its program cannot be brought to the turn at which it would go on; "
                "use an agent that calls the model through its context"
            )

    def verifier_of(self, task: Task) -> Verifier:
        """How one task is graded: the job's rules, with what the task itself says in their place."""
        own = task.verifier
        mode = self.verifier.mode or (own and own.mode) or VerifierMode.SEPARATE
        # What a step leaves behind is where the next one begins, so it is graded there.
        changes: dict[str, Any] = {"mode": VerifierMode.SHARED if task.steps else mode}
        if own is not None and own.reward is not None:
            changes["reward"] = own.reward
        return self.verifier.model_copy(update=changes)

    @property
    def calls_tools(self) -> bool:
        """Whether a built-in agent calls tools by the model's own means."""
        offered = self.agent.tools or self.agent.mcp_servers or self.tasks.environments
        return self.agent.type in TOOL_CALLING_AGENTS and bool(offered)

    @property
    def per_sandbox(self) -> int:
        """Workspaces of one sandbox at once."""
        return self.sandbox.workspaces.per_sandbox or self.group_size

    @property
    def min_completed(self) -> int:
        """Completed members that make a group complete."""
        return self.completion.min_completed_per_group or self.group_size


class RunnerState(StrEnum):
    """`Running`: working. `Draining`: ending soon. `Completed`: the shard is done. `Aborted`: the shard failed."""

    RUNNING = "Running"
    DRAINING = "Draining"
    COMPLETED = "Completed"
    ABORTED = "Aborted"


Count = Annotated[int, Field(ge=0, le=10**12)]
"""Far more than a job can have. The sum over its runners fits into the 64 bits that the API server takes."""


class RunnerReport(ApiModel):
    """What one runner reports of its shard."""

    index: Annotated[int, Field(ge=0, le=255)]
    """The runner."""
    state: RunnerState = RunnerState.RUNNING
    """How far it is; `Completed` and `Aborted` are its verdict on its shard."""
    message: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Why it was aborted, or what it waits for."""
    total: Count | None = None
    """Rollouts of its shard; unknown while a stream is open."""
    sealed: Count = 0
    """Rollouts that are sealed."""
    running: Count = 0
    """Rollouts at work."""
    sealed_indexes: Annotated[str, StringConstraints(max_length=4096)] | None = None
    """Which ones are sealed, as intervals in the shard's own numbering (`0-14,17`); left out where it gets too long."""
    outcomes: Annotated[dict[Outcome, Count], Field(max_length=16)] = {}
    """Sealed rollouts by outcome."""
    reward_sum: float = 0
    """Sum of the rewards."""
    rewarded: Count = 0
    """Rollouts with a reward."""
    token_forks: Count = 0
    """Times that a prompt's token ids did not extend those before it although the messages did, in its sealed rollouts."""
    policy_update: Annotated[int, Field(ge=0)] | None = None
    """Update of its ModelServer's policy up to which it has settled which version each token has."""


class Restarts(ApiModel):
    """Runner pods that failed, and the seals there were when progress was last seen."""

    failed_pods: Annotated[int, Field(ge=0)] = 0
    """Failed runner pods at that moment."""
    sealed: Annotated[int, Field(ge=0)] = 0
    """Sealed rollouts at that moment."""


class RolloutJobStatus(ApiModel):
    """What has been seen."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Ready, Progressing, Succeeded, Failed, Suspended, Invalid."""
    total: Annotated[int, Field(ge=0)] | None = None
    """Rollouts in all; unknown while a stream is open."""
    sealed: Annotated[int, Field(ge=0)] | None = None
    """Rollouts that are sealed."""
    outcomes: Annotated[dict[Outcome, Annotated[int, Field(ge=0)]], Field(max_length=16)] | None = None
    """Sealed rollouts by outcome."""
    mean_reward: float | None = None
    """Mean over the rollouts that have a reward."""
    token_forks: Annotated[int, Field(ge=0)] | None = None
    """Times that a prompt's token ids did not extend those before it although the messages did."""
    restarts: Restarts | None = None
    """When progress was last seen: ten failed runner pods after it fail the job."""
    result_uri: Annotated[Annotated[str, StringConstraints(max_length=2048)] | None, Field(alias="resultURI")] = None
    """Folder of the results."""


class RolloutJob(ApiModel):
    """Tasks × groupSize rollouts, with verified rewards and complete trajectories as the result."""

    api_version: Literal["rollout.dev/v1alpha1"]
    kind: Literal["RolloutJob"]
    metadata: Metadata
    spec: RolloutJobSpec
    """What is asked for."""
    status: RolloutJobStatus | None = None
    """What has been seen."""


class RolloutShard(ApiModel):
    """One runner's part of a RolloutJob. The operator creates it, its runner reports in it, the job's status sums it up."""

    api_version: Literal["rollout.dev/v1alpha1"]
    kind: Literal["RolloutShard"]
    metadata: dict[str, Any]
    """As the operator writes it: the name is longer than that of the job."""
    status: RunnerReport | None = None
    """The runner's report."""
