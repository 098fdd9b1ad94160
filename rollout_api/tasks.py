"""The tasks of a job, and their sources."""

from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from rollout_api.base import ApiModel, Command, Path, Seconds, ShortText, TaskName, distinct, exactly_one
from rollout_api.environments import ENVIRONMENT_PROMPT, EnvironmentId, RunIn, TaskEnvironment
from rollout_api.files import TASK_FILES, Dockerfile, TaskFile, without_parents
from rollout_api.sandbox import EnvVar, SandboxOverrides, UserName, VariableName
from rollout_api.services import MOST_SERVICES, TaskService, Volumes, services_problem

INLINE_TASKS_BYTES = 200 * 1024
"""Most bytes of inline tasks. etcd refuses objects over 1.5 MiB, and status and managed fields need room."""


ISOLATED_FOLDER: Final = "/verifier"
"""Folder of the hidden files and of the commands of an isolated verifier."""


class VerifierKind(StrEnum):
    """`commands`: exit codes. `pytest`, `junit`: every test must be reported as passed. `rewardFile`: a file it writes."""

    COMMANDS = "commands"
    PYTEST = "pytest"
    JUNIT = "junit"
    REWARD_FILE = "rewardFile"


class VerifierMode(StrEnum):
    """`Separate`: graded in a new workspace that gets only the artifacts. `Shared`: graded in the agent's workspace,
    forgeable.
    """

    SEPARATE = "Separate"
    SHARED = "Shared"


class RewardRule(StrEnum):
    """`Fraction`: share of the commands or tests that passed. `AllOrNothing`: 1 if all passed, else 0."""

    FRACTION = "Fraction"
    ALL_OR_NOTHING = "AllOrNothing"


class UnpassedResult(StrEnum):
    """Result of a test that neither passed nor failed. `XFail`: it has pytest's mark `xfail`, and failed. `Skipped`: it was
    not run.
    """

    XFAIL = "XFail"
    SKIPPED = "Skipped"


class TaskVerifier(ApiModel):
    """How the result of a task is graded."""

    kind: VerifierKind = VerifierKind.COMMANDS
    """How a verdict is determined: by exit codes, by reported tests, or from a reward file."""
    files: Annotated[list[TaskFile], Field(max_length=TASK_FILES)] = []
    """Hidden files, present only during grading. They replace existing files at their paths."""
    commands: Annotated[list[Command], Field(min_length=1, max_length=256)]
    """Commands, run in order in the working directory, or in `/verifier` if `isolated`."""
    tests: Annotated[list[ShortText], Field(max_length=10_000)] = []
    """Tests that must be reported as passed (`file::test`); every reported test when left out."""
    also_passed: Annotated[list[UnpassedResult], Field(max_length=2)] = []
    """Results of reported tests that count as passed too, as harnesses of some datasets count them. Code under test can
    cause them.
    """
    report: Path | None = None
    """For `junit`: the report that the commands write, relative to the folder in which they run."""
    collect: Annotated[list[Command], Field(max_length=64)] = []
    """Commands run in the agent's workspace after it has ended, before its artifacts are taken; for mode Separate."""
    artifacts: Annotated[list[Path], Field(max_length=256)] = []
    """Files and folders carried to the same paths of the grading workspace, instead of `spec.verifier.artifacts`.
    Absolute, or relative to the working directory.
    """
    reward: RewardRule | None = None
    """How verdicts are converted into a reward, instead of `spec.verifier.reward`."""
    mode: VerifierMode | None = None
    """Where this task is graded if `spec.verifier.mode` is left out; `Separate` if both are."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = []
    """Variables added to the environment of the verifier's commands alone."""
    user: UserName | None = None
    """User of the verifier's commands; the sandbox's user when left out."""
    image: ShortText | None = None
    """Image of the grading workspace, for mode Separate; the task's own when left out."""
    dockerfile: Dockerfile | None = None
    """Dockerfile of the grading workspace, instead of `image`."""
    isolated: bool = False
    """Hidden files are written into `/verifier`, and commands run there. By this, the task's author states that the
    verifier's user runs and loads nothing from the agent. Without it, every verdict counts as forgeable
    (docs/verification.md).
    """

    @field_validator("artifacts")
    @classmethod
    def _artifacts_are_below_the_root(cls, paths: list[str]) -> list[str]:
        if any(not path.strip("/.") and path.startswith("/") for path in paths):
            raise ValueError("the root folder cannot be carried; list files or folders in it")
        return [without_parents(path) for path in paths]

    @field_validator("report")
    @classmethod
    def _report_stays_inside(cls, path: str | None) -> str | None:
        return None if path is None else without_parents(path)

    @model_validator(mode="after")
    def _isolated_files_are_apart(self) -> Self:
        if self.isolated:
            given = [*(file.path for file in self.files), *([self.report] if self.report else [])]
            absolute = next((path for path in given if path.startswith("/")), None)
            if absolute is not None:
                raise ValueError(
                    f"{absolute!r} is absolute; the files and the report of an isolated verifier are in "
                    f"{ISOLATED_FOLDER}: give their paths relative to it"
                )
            if any(f"{path}/".startswith(f"{ISOLATED_FOLDER}/") for path in self.artifacts):
                raise ValueError(f"{ISOLATED_FOLDER} is the folder of an isolated verifier, and cannot be an artifact")
        return self

    @model_validator(mode="after")
    def _report_belongs_to_junit(self) -> Self:
        if (self.kind is VerifierKind.JUNIT) != (self.report is not None):
            raise ValueError("report is needed for kind junit, and for no other kind")
        if self.kind not in (VerifierKind.PYTEST, VerifierKind.JUNIT):
            if self.tests:
                raise ValueError(f"tests can be named for kinds pytest and junit only, not for {self.kind.value}")
            if self.also_passed:
                raise ValueError(f"alsoPassed is for kinds pytest and junit only, not for {self.kind.value}")
        return self


class Timeouts(ApiModel):
    """Time limits of the parts of a rollout, in seconds. The start of the sandbox counts towards none of them."""

    setup_seconds: Seconds = 600
    """All setup commands together."""
    agent_seconds: Seconds = 1800
    """The agent, all turns together. A rollout beyond it is Completed with AgentTimeout."""
    command_seconds: Seconds = 120
    """One tool call."""
    verifier_seconds: Seconds = 600
    """All verifier commands together. Beyond it the verdict is a failure."""


Prompt = Annotated[str, StringConstraints(min_length=1, max_length=204_800, pattern=r"\S")]


class TaskStep(ApiModel):
    """One step of a task, with its own prompt and verifier, in the workspace that the previous step left."""

    name: TaskName
    """Name, unique in its task."""
    prompt: Prompt
    """The agent's instructions for this step. It does not see the conversations of earlier steps."""
    files: Annotated[list[TaskFile], Field(max_length=TASK_FILES)] = []
    """Files written before the step."""
    setup: Annotated[list[Command], Field(max_length=256)] = []
    """Commands run before the step, with the agent's network."""
    solution: Annotated[list[Command], Field(max_length=256)] = []
    """Commands that the Oracle agent runs in this step."""
    solution_files: Annotated[list[TaskFile], Field(max_length=TASK_FILES)] = []
    """Files that this solution needs."""
    verifier: TaskVerifier | None = None
    """How the step is graded."""
    min_rewards: Annotated[dict[str, float], Field(max_length=64)] = {}
    """Least values of named rewards; the rollout ends after this step if one is missed. `reward` is the step's reward.
    """
    verifier_seconds: Seconds | None = None
    """Time limit of this step's verifier; `timeouts.verifierSeconds` when left out."""

    @field_validator("verifier")
    @classmethod
    def _is_graded_in_the_agents_workspace(cls, verifier: TaskVerifier | None) -> TaskVerifier | None:
        given = verifier and (verifier.image or verifier.collect or verifier.artifacts)
        if verifier is not None and (given or verifier.mode is VerifierMode.SEPARATE):
            raise ValueError(
                "a step is graded in the agent's own workspace; leave out mode Separate, image, collect and artifacts"
            )
        return verifier


class StepReward(StrEnum):
    """`Mean`: mean over the steps that were taken. `Final`: reward of the last step that was taken."""

    MEAN = "Mean"
    FINAL = "Final"


class Task(ApiModel):
    """One problem: prompt, files, setup and verifier."""

    name: TaskName
    """Name, unique in its job."""
    prompt: Prompt
    """The agent's instructions."""
    files: Annotated[
        list[TaskFile], Field(max_length=TASK_FILES), distinct("path", "{!r} is given twice; keep one of them")
    ] = []
    """Files that the workspace has from the start."""
    setup: Annotated[list[Command], Field(max_length=256)] = []
    """Commands that prepare the workspace, once for each group."""
    solution: Annotated[list[Command], Field(max_length=256)] = []
    """Commands that solve the task, which the Oracle agent runs."""
    verifier: TaskVerifier | None = None
    """How the result is graded. Without it, the reward is null."""
    timeouts: Timeouts = Timeouts()
    """Time limits of this task."""
    sandbox: SandboxOverrides = SandboxOverrides()
    """Changes to `spec.sandbox` for this task."""
    dockerfile: Dockerfile | None = None
    """Dockerfile of the workspace, instead of `sandbox.image`. Only for workspaces in `Overlay`."""
    services: Annotated[
        list[TaskService],
        Field(max_length=MOST_SERVICES),
        distinct("name", "two services are named {!r}; names must differ"),
    ] = []
    """Programs that run beside the agent, such as databases, in its network. They share its `resources`."""
    volumes: Volumes = {}
    """Folders of the agent's workspace that services share, by the volume's name."""
    tags: Annotated[list[ShortText], Field(max_length=64)] = []
    """Labels for statistics."""
    environment: TaskEnvironment | None = None
    """Environment in which the agent acts. Its steps give the reward. `prompt` is used like that of `tasks.environments`.
    """
    solution_files: Annotated[list[TaskFile], Field(max_length=TASK_FILES)] = []
    """Files that the solution needs. Only the Oracle agent gets them."""
    steps: Annotated[
        list[TaskStep], Field(max_length=32), distinct("name", "two steps are named {!r}; names must differ")
    ] = []
    """Steps in one workspace, instead of `solution` and `verifier`. Agents get their prompts instead of the task's. Each is
    graded in the agent's workspace (mode Shared).
    """
    step_reward: StepReward = StepReward.MEAN
    """How the steps' rewards are combined."""

    @property
    def needs_sandbox(self) -> bool:
        """Whether the task needs a workspace."""
        return self.environment is None or self.environment.run_in is RunIn.SANDBOX

    @property
    def is_graded(self) -> bool:
        """Whether it has a verifier, one of its steps has one, or it is an environment."""
        return any((self.verifier, self.environment, *(step.verifier for step in self.steps)))

    @property
    def has_solution(self) -> bool:
        """Whether the Oracle agent can solve every step of it."""
        return all(step.solution for step in self.steps) if self.steps else bool(self.solution)

    @model_validator(mode="after")
    def _services_can_start(self) -> Self:
        if (problem := services_problem(self.services)) is not None:
            raise ValueError(problem)
        for service in self.services:
            if not (service.command or service.dockerfile or self.dockerfile):
                raise ValueError(f"service {service.name!r} has no command; give it one, or a dockerfile with CMD")
        return self

    @model_validator(mode="after")
    def _environments_grade_themselves(self) -> Self:
        if self.environment is not None and (self.verifier is not None or self.steps):
            raise ValueError(
                "the reward of an environment is the sum of its steps; remove verifier and steps, or the environment"
            )
        return self


class TaskFormat(StrEnum):
    """Format of a task source.

    `Rows`: a row is a task, JSONL or Parquet. `Harbor`, `TerminalBench`: folders. `SWEBench`, `R2E`: rows of those sets.
    """

    ROWS = "Rows"
    HARBOR = "Harbor"
    TERMINAL_BENCH = "TerminalBench"
    SWE_BENCH = "SWEBench"
    R2E = "R2E"


FilterValues = Annotated[list[ShortText], Field(min_length=1, max_length=10_000)]


class TaskSource(ApiModel):
    """Tasks read from a file or folder."""

    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    """File or folder, relative to the manifest or in object storage."""
    format: TaskFormat = TaskFormat.ROWS
    """Format of the source."""
    limit: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Use only the first tasks, after `filter` and `shuffleSeed`."""
    columns: Annotated[dict[str, ShortText], Field(max_length=64)] = {}
    """Column of each field, as `prompt: question`. Other fields use the column of the same name."""
    filter: Annotated[dict[str, FilterValues], Field(max_length=64)] = {}
    """Use only rows whose column has one of the values; `*`, `?` and `[…]` match as in file names."""
    shuffle_seed: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Seed of a shuffled order; the order of the source when left out."""
    variables: Annotated[list[VariableName], Field(max_length=64)] = []
    """Environment variables of `rolloutctl` or of the runner that files of task folders may use, as `${NAME}`. Their agents
    and verifiers may read the values.
    """
    skip_unusable: bool = False
    """Leave out tasks that cannot be used, with a warning, instead of refusing the job. They do not count for `limit`."""


class TaskStream(ApiModel):
    """Groups are submitted while the job runs. Closing the stream completes the job."""

    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Most groups that are submitted and not yet finished."""


class EnvironmentGroups(TaskEnvironment):
    """A number of groups of one environment. Group g is reset with `seed` + g."""

    tag: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+=-]*$", max_length=180)] | None = None
    """Label of its results, and prefix of its tasks' names. Its id when left out."""
    groups: Annotated[int, Field(ge=1, le=10_000_000)] = 1
    """Number of tasks, each with its own seed."""
    prompt: Prompt = ENVIRONMENT_PROMPT
    """Prompt of the model: agent `Environment` uses it at each turn, other agents at the first. `{observation}`,
    `{feedback}` (the problem of the last answer), `{turn}` and `{actionsLeft}` are filled in.
    """
    timeouts: Timeouts = Timeouts()
    """Time limits: a reset has `setupSeconds`, a step `commandSeconds`. An environment beyond them fails as
    InfraFailed.
    """

    @property
    def label(self) -> str:
        """Return the tag, or one derived from the id."""
        return self.tag or self.id.replace("/", "-").replace(":", ".")


class TaskBranch(ApiModel):
    """A group of rollouts that continue from one turn of a recorded rollout. Task, image and verifier are those of its
    job.
    """

    job: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    """Folder or URI of the run. If it still runs, the branch uses what is recorded so far."""
    index: Annotated[int, Field(ge=0)]
    """Index of the rollout in the run."""
    turn: Annotated[int, Field(ge=0)]
    """The last turn to copy, its tool results included; turns count from 0."""
    count: Annotated[int, Field(ge=1, le=1024)]
    """Rollouts that continue from the turn. This is the group size, equal for all entries."""
    strict: bool = False
    """Fail if a tool call that had to be run again gives another result than recorded."""


TASK_SOURCES = ("inline", "from", "stream", "environments", "branch")
_DISTINCT_TASKS = distinct("name", "two tasks are named {!r}; names must differ")
_DISTINCT_TAGS = distinct("label", "two environments have the tag {!r}; give each a different tag")


class Dockerfiles(ApiModel):
    """How the job builds the Dockerfiles of its tasks."""

    bases: Annotated[dict[ShortText, ShortText], Field(max_length=256)] = {}
    """Images that replace those named in Dockerfiles. A name such as `ubuntu:24.04`, or a prefix that ends with `/` or
    `:`, becomes an image as in `sandbox.image`.
    """
    args: Annotated[dict[str, Annotated[str, StringConstraints(max_length=32_768)]], Field(max_length=256)] = {}
    """Values of ARG."""
    secrets: Annotated[
        dict[str, Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]],
        Field(max_length=64),
    ] = {}
    """Secrets of `RUN --mount=type=secret`: for each id, the environment variable that has it, of rolloutctl or of the
    runner.
    """


class Tasks(ApiModel):
    """Source of the tasks: exactly one of the fields."""

    inline: Annotated[list[Task], Field(min_length=1, max_length=4096), _DISTINCT_TASKS] | None = None
    """Tasks in the manifest, up to 200 KiB together."""
    from_: Annotated[TaskSource | None, Field(alias="from")] = None
    """A file or folder of tasks."""
    stream: TaskStream | None = None
    """The job stays open: groups are submitted while it runs, until the stream is closed."""
    image_template: ShortText | None = None
    """Image of the tasks in `from` that name none. `{name}` is replaced by the task's name in lower case, `{digest}` by
    the digest of the inputs of its Dockerfile.
    """
    dockerfiles: Dockerfiles | None = None
    """The job builds the Dockerfiles of its tasks as layers, instead of using images. `{}` uses the base images as they are
    named.
    """
    environments: Annotated[list[EnvironmentGroups], Field(min_length=1, max_length=1024), _DISTINCT_TAGS] | None = None
    """Environments to act in: a list of kinds, each with a number of groups."""
    runner_environments: Annotated[list[EnvironmentId], Field(max_length=64)] = []
    """Environments that tasks of `from` and `stream` may run beside the engine (`runIn: Runner`), with its files and
    network. Built-in ones, and those that the manifest itself uses, need not be listed.
    """
    folder_images: Annotated[list[ShortText], Field(max_length=256)] = []
    """Folders of this machine that tasks of `from`, `stream` and `branch` may name as images, for runs on a laptop. Agents
    see all that is in them.
    """
    branch: Annotated[list[TaskBranch], Field(min_length=1, max_length=4096)] | None = None
    """Rollouts that continue from a turn of recorded rollouts."""

    @model_validator(mode="before")
    @classmethod
    def _exactly_one_source(cls, value: Any) -> Any:
        if isinstance(value, dict):
            fields = {"from": value.get("from_"), **value}
            exactly_one({name: fields.get(name) for name in TASK_SOURCES})
        return value

    def moved_to(self, **source: Any) -> Self:
        """Return these settings with another source of tasks, given by its field's name in Python."""
        # What the manifest itself uses may run beside the engine without being listed.
        listed = [*dict.fromkeys([*self.runner_environments, *sorted(self.own_environments)])]
        others = dict.fromkeys(("inline", "from_", "stream", "environments", "branch"))
        kept = {"runner_environments": listed, "image_template": self.image_template if "from_" in source else None}
        return self.model_copy(update={**others, **kept, **source})

    @property
    def own_environments(self) -> set[str]:
        """Return the ids of environments that the manifest names: data sets, which may be of others, name further ones."""
        used = [task.environment.id for task in self.inline or () if task.environment is not None]
        return {*self.runner_environments, *used, *(entry.id for entry in self.environments or ())}

    @field_validator("branch")
    @classmethod
    def _branches_fit_together(cls, branch: list[TaskBranch] | None) -> list[TaskBranch] | None:
        seen: set[tuple[str, int, int]] = set()
        for entry in branch or []:
            if (entry.job, entry.index, entry.turn) in seen:
                raise ValueError(
                    f"turn {entry.turn} of rollout {entry.index} of {entry.job} is branched twice; raise its count"
                )
            seen.add((entry.job, entry.index, entry.turn))
        if len(counts := sorted({entry.count for entry in branch or []})) > 1:
            raise ValueError(
                f"count is {' and '.join(map(str, counts))}, and all groups of a job have the same size; use separate jobs"
            )
        return branch

    @model_validator(mode="after")
    def _image_template_is_for_a_source(self) -> Self:
        if self.image_template is not None and self.from_ is None:
            raise ValueError("imageTemplate is for tasks.from; a task of the manifest names its image in sandbox.image")
        if self.image_template is not None and self.dockerfiles is not None:
            raise ValueError("imageTemplate and dockerfiles are two ways to use a Dockerfile; keep one of them")
        return self

    @field_validator("inline")
    @classmethod
    def _inline_tasks_fit(cls, tasks: list[Task] | None) -> list[Task] | None:
        size = sum(len(task.model_dump_json().encode()) for task in tasks or ())
        if size > INLINE_TASKS_BYTES:
            raise ValueError(
                f"inline tasks take {size} bytes, at most {INLINE_TASKS_BYTES} fit; put them into a file and use from"
            )
        return tasks
