"""Open the resources of a run before its first rollout, and check whether its verifiers can start."""

import asyncio
import contextlib
import dataclasses
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent_runtime.agents.base import Agent
from agent_runtime.agents.registry import find_agent
from agent_runtime.builds.build import Builder, BuildOptions
from agent_runtime.builds.cache import BuildCache
from agent_runtime.builds.provider import BuildingProvider
from agent_runtime.dockerfiles.problems import facts_of, problems_of
from agent_runtime.engine.attempt.assignment import Rollout
from agent_runtime.engine.attempt.fitting import task_problem
from agent_runtime.engine.attempt.mcp import server_keys
from agent_runtime.engine.attempt.snapshots import SnapshotStore
from agent_runtime.engine.branching.sources import Origin, fix_origins
from agent_runtime.engine.branching.state import Branching
from agent_runtime.engine.context import RunContext, workspace_spec
from agent_runtime.engine.events import Observer, PluginFailed, StepBuilt, StorageRequested
from agent_runtime.engine.run_folder import run_folder, run_lock, start_lock
from agent_runtime.engine.scheduling.completion_rules import NewestPolicy
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.engine.scheduling.first_ends import FirstEnds
from agent_runtime.engine.scheduling.model_watch import ModelWatch
from agent_runtime.engine.scheduling.shard import WHOLE_JOB, Shard
from agent_runtime.environments.open import check_environments
from agent_runtime.environments.pool import EnvironmentPool
from agent_runtime.grading.artifacts import artifact_paths
from agent_runtime.grading.programs import missing_program
from agent_runtime.models.base import CallHealth, Model, ModelConfigError
from agent_runtime.models.factory import open_model
from agent_runtime.models.providers.scripted import no_script
from agent_runtime.plugins.plugins import Plugins
from agent_runtime.recording.build_steps import BuildEntry
from agent_runtime.recording.job_record import JobRecord, output_uri
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.seals import SealedResults
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import Fence, SandboxProvider, WorkspaceSpec
from agent_runtime.sandboxes.factory import open_provider
from agent_runtime.sandboxes.no_sandbox import NoSandboxes
from agent_runtime.tasks import TaskProblem, TaskSourceError
from agent_runtime.tasks.images import rewritten
from agent_runtime.tasks.problems import with_new_services, with_other_base
from agent_runtime.tools.base import Tool
from agent_runtime.tools.registry import open_tools
from rollout_api.base import quantity_value
from rollout_api.files import Dockerfile
from rollout_api.model import ModelSpec
from rollout_api.records import Result
from rollout_api.rollout_job import AGENTS_WITHOUT_MODEL, Mode, RolloutJob
from rollout_api.sandbox import Provider, WorkspaceMode
from rollout_api.tasks import Dockerfiles, Task, VerifierMode

STOPPED_SECONDS = 60.0
"""Time for which sandboxes of a run that ended unfinished stay on this machine. A process that resumes it within this time
finds the unfinished rollouts as they were; after it, no process of the run is left.
"""


@dataclass(frozen=True)
class RunEnvironment:
    """The environment of a job. `model` and a SandboxProvider as `provider` replace those of the manifest."""

    base_dir: Path
    """Base of the manifest's relative paths."""
    environ: Mapping[str, str] = field(repr=False)
    provider: Provider | SandboxProvider | None = None
    model: Model | ModelSpec | None = None
    shard: Shard = WHOLE_JOB
    drain: Drain = field(default_factory=Drain)
    plugins: Sequence[object] = ()
    """Called after the manifest's plugins."""
    agent: Callable[[], Agent] | None = None
    """Creates the agent of an attempt, instead of the manifest's."""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    """Tools for names in `agent.tools`, in this process only."""
    private: Sequence[Path] = ()
    """Files and folders of this machine that no workspace may see, such as the manifest, which has hidden tests."""
    command: str | None = None
    """Shell command with which a person resumes the run."""
    first_ends: FirstEnds | None = None
    """The ends of the first agents of several runs; None counts those of this run."""


def refuse_text_only(job: RolloutJob, model: Model) -> None:
    """Raise ModelConfigError if a job of mode Train would record no training data."""
    allowed = job.spec.model is not None and job.spec.model.allow_text_only
    if job.spec.mode is Mode.TRAIN and model.token_capture == "TextOnly" and not allowed:
        raise ModelConfigError(
            "TextOnly",
            f"mode: Train needs token ids with logprobs, but model {model.name} returns none. Serve it with vLLM "
            "0.10.2 "
            "or newer, set mode: Eval (the default is Train), or set model.allowTextOnly: true to train on text only",
        )


CARRIES_ROOT = (
    "sandbox.workingDir is '/', and the root cannot be carried into a grading; "
    "name files or folders in verifier.artifacts, or use another working directory"
)


SERVICES_NEED_OVERLAY = (
    "has services, which need workspaces in Overlay, but sandbox.workspaces.mode is Plain; remove it"
)


SERVICES_NEED_SANDBOX = (
    "has services, but its environment runs in the runner, outside their network; set environment.runIn to Sandbox, or "
    "remove the services"
)


def _carries_root(job: RolloutJob, task: Task) -> bool:
    """Whether the task is graded in a new workspace that should get all files of the agent's, which always fails."""
    verifier, sandbox = job.spec.verifier_of(task), task.sandbox.apply(job.spec.sandbox)
    is_carried = (
        task.verifier is not None and verifier.mode is VerifierMode.SEPARATE and sandbox.working_dir is not None
    )
    return is_carried and not artifact_paths(task, str(sandbox.working_dir))[1]


def about_services(job: RolloutJob, tasks: Sequence[Task]) -> list[TaskProblem]:
    """Return a warning of tasks whose grading does not see the services that the agent used."""
    ungraded = [
        task.name
        for task in tasks
        if task.services and task.verifier is not None and job.spec.verifier_of(task).mode is VerifierMode.SEPARATE
    ]
    return with_new_services(ungraded)


def about_bases(job: RolloutJob, tasks: Sequence[Task]) -> list[TaskProblem]:
    """Return a warning of services that a cluster cannot run, because its providers cannot read a second image."""
    given = job.spec.tasks.dockerfiles or Dockerfiles()

    def base(dockerfile: Dockerfile | None, image: str | None) -> str | None:
        if dockerfile is None:
            return image
        found = facts_of(dockerfile.text, {**given.args, **dockerfile.args}, dockerfile.target).base
        return None if found is None else rewritten(found, {**given.bases, **dockerfile.bases})

    others = []
    for task in tasks:
        image = task.sandbox.apply(job.spec.sandbox).image if task.services else None
        for service in task.services:
            own, its = base(task.dockerfile, image), base(service.dockerfile or task.dockerfile, image)
            if own != its:
                others.append(f"{service.name} of {task.name} ({its}, not {own})")
    return with_other_base(others)


async def check_tasks(
    job: RolloutJob, tasks: Sequence[Task], environments: EnvironmentPool, *, has_own_model: bool = False
) -> None:
    """Check that the job's agent, environments and scripted model support its tasks.

    `has_own_model`: the job's own model is not used. Raises TaskSourceError with all problems.
    """
    agent, model = job.spec.agent, job.spec.model
    problems = [
        TaskProblem(f"task {task.name}", None, problem)
        for task in tasks
        if (problem := task_problem(job.spec, task)) is not None
    ]
    problems += [TaskProblem(f"task {task.name}", None, CARRIES_ROOT) for task in tasks if _carries_root(job, task)]
    with_services = [task for task in tasks if task.services]
    if job.spec.sandbox.workspaces.mode is WorkspaceMode.PLAIN:
        problems += [TaskProblem(f"task {task.name}", None, SERVICES_NEED_OVERLAY) for task in with_services]
    problems += [
        TaskProblem(f"task {task.name}", None, SERVICES_NEED_SANDBOX)
        for task in with_services
        if not task.needs_sandbox
    ]
    args = (job.spec.tasks.dockerfiles or Dockerfiles()).args
    problems += [
        TaskProblem(f"task {task.name}", None, f"dockerfile, line {problem.line}: {problem.message}")
        for task in tasks
        for dockerfile in (
            task.dockerfile,
            task.verifier and task.verifier.dockerfile,
            *(service.dockerfile for service in task.services),
        )
        if dockerfile
        for problem in problems_of(dockerfile.text, {**args, **dockerfile.args})
    ]
    if (
        model is not None
        and model.scripted is not None
        and agent.type not in AGENTS_WITHOUT_MODEL
        and not has_own_model
    ):
        scripted = {entry.task for entry in model.scripted.tasks}
        missing = filter(None, (no_script(scripted, task.name) for task in tasks))
        problems += [TaskProblem("spec.model.scripted.tasks", None, message) for message in missing]
    try:
        await check_environments(tasks, agent, environments)
    except TaskSourceError as error:
        problems += error.problems
    if problems:
        raise TaskSourceError(problems)


@contextlib.asynccontextmanager
async def open_run(
    job: RolloutJob,
    tasks: Sequence[Task],
    run_environment: RunEnvironment,
    *,
    new: bool,
    observer: Observer,
    origins: Sequence[Origin] = (),
) -> AsyncIterator[RunContext]:
    """Open a run that is ready to start and closed at the end. `origins` are those of the groups of a job with
    `tasks.branch`.

    Raises the errors of all parts.
    """
    is_program = job.spec.agent.is_program
    make_agent = None if is_program else run_environment.agent or find_agent(job.spec.agent.type)
    keys = server_keys(job.spec.agent, run_environment.environ)
    tools = open_tools([] if is_program else job.spec.agent.tools, run_environment.tools)
    plugins = Plugins.open(
        job.spec.plugins,
        run_environment.plugins,
        lambda call, key: observer(PluginFailed(call.plugin, call.hook, key, call.message, call.traceback)),
        is_program=is_program,
    )
    uri = output_uri(job, run_environment.base_dir)
    store = replace(
        Store.open(uri, run_environment.environ), on_request=lambda *request: observer(StorageRequested(*request))
    )
    await store.probe()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(plugins.close)
        starting = stack.enter_context(contextlib.ExitStack())
        if not new and job.metadata.uid is None:
            # Two concurrent first starts would both find no run, and each would create one.
            starting.enter_context(start_lock(uri, job.metadata.name, run_environment.shard.index))
        record = await JobRecord.find(store, job, tasks, new=new, command=run_environment.command)
        stack.enter_context(run_lock(record.uid, run_environment.shard.index, record.folder))
        if record.resumed:
            # Do this before the checks, which may take minutes, so that `gc` does not delete the run meanwhile.
            await record.begin()
        environments = EnvironmentPool(job.spec.tasks.own_environments)
        stack.push_async_callback(environments.close)
        await check_tasks(job, tasks, environments, has_own_model=run_environment.model is not None)
        place = _place_of_model(job, run_environment)
        # A separate check: a server that answers the short check may still hang at a rollout's prompt.
        model = await _checked_model(job, run_environment, stack, ModelWatch(place, observer))
        context: RunContext | None = None

        async def close_provider() -> None:
            await provider.close(keep=context is None or not context.finished, at_most=STOPPED_SECONDS)

        layers, build_label = Layers(store, record.store), f"build{run_environment.shard.index}"
        opened = await _open_provider(job, tasks, run_environment, uri, record, origins)
        options = _build_options(job, run_environment, build_label, observer)
        provider = BuildingProvider(opened, Builder(opened, BuildCache(store, record.store, layers), options))
        stack.push_async_callback(close_provider)
        await record.begin()
        starting.close()
        shard, group_size = run_environment.shard, job.spec.group_size
        results = SealedResults(record.store, lambda index: shard.has(index // group_size))
        stack.callback(results.close)
        others = SealedResults(record.store, lambda index: not shard.has(index // group_size))
        stack.callback(others.close)

        async def read_others() -> Iterable[Result]:
            await others.load()
            return others.values()

        begun, reported_groups = set[int](), set[int]()
        if record.resumed:
            _, claimed = await asyncio.gather(results.load(), record.begun())
            begun = {index for index in claimed if index not in results}
            reported_groups = await record.reported_groups() if plugins.have("after_group") else reported_groups

            def is_unwanted(attempt: str, name: str) -> bool:
                """Unfinished gradings and builds of an earlier process run again; its sealed rollouts need no workspace."""
                if not attempt[0].isdigit():
                    return attempt.startswith(f"{build_label}-")
                index = int(attempt.split("-")[0])
                # Runners of other shards may use the same executor.
                return shard.has(index // group_size) and (name.split(".")[0] != "agent" or index in results)

            await provider.sweep(is_unwanted)
        fixed = await fix_origins(record, origins, run_environment.environ)
        context = RunContext(
            job=job,
            record=record,
            provider=provider,
            make_agent=make_agent,
            tools=tools,
            server_keys=keys,
            model=model,
            observer=observer,
            watch=ModelWatch(place, observer),
            runner=socket.gethostname(),
            results=results,
            first_ends=run_environment.first_ends
            or FirstEnds(results.values(), shards=shard.count, read_others=read_others),
            newest_policy=NewestPolicy(results.newest_policy),
            begun=begun,
            reported_groups=reported_groups,
            shard=run_environment.shard,
            drain=run_environment.drain,
            plugins=plugins,
            environments=environments,
            snapshots=SnapshotStore(layers, int(quantity_value(job.spec.sandbox.snapshot_limit))),
            origins={group: Branching(origin, job, make_agent, tools, layers) for group, origin in fixed.items()}
            if make_agent is not None
            else {},
        )
        yield context


def _build_options(job: RolloutJob, run_environment: RunEnvironment, label: str, observer: Observer) -> BuildOptions:
    def report(entry: BuildEntry, was_stored: bool) -> None:
        observer(StepBuilt(entry.step, entry.seconds, entry.layer.bytes, was_stored))

    given = job.spec.tasks.dockerfiles or Dockerfiles()
    values = {name: run_environment.environ.get(variable) for name, variable in given.secrets.items()}
    return BuildOptions(
        bases=given.bases,
        arguments=given.args,
        secrets={name: value.encode() for name, value in values.items() if value is not None},
        label=label,
        on_step=report,
    )


def _place_of_model(job: RolloutJob, run_environment: RunEnvironment) -> str:
    """Return the model's location for messages: where to look if it does not answer."""
    model = job.spec.model
    if run_environment.model is None and model is not None and model.endpoint is not None:
        return model.endpoint.base_url
    return "the model"


async def _checked_model(
    job: RolloutJob, run_environment: RunEnvironment, stack: contextlib.AsyncExitStack, watch: ModelWatch
) -> Model | None:
    """Return a model that has answered a test call; the stack closes it. None if the agent does not use a model."""
    given, model = run_environment.model, None
    if given is None and job.spec.agent.type not in AGENTS_WITHOUT_MODEL:
        given = job.spec.model
    if isinstance(given, ModelSpec):
        model = open_model(given, run_environment.environ)
        stack.push_async_callback(model.close)
    else:
        model = given
    if model is not None:
        with watch.call(CallHealth()):
            await model.check()
        refuse_text_only(job, model)
    return model


async def _open_provider(
    job: RolloutJob,
    tasks: Sequence[Task],
    run_environment: RunEnvironment,
    uri: str,
    record: JobRecord,
    origins: Sequence[Origin],
) -> SandboxProvider:
    provider = run_environment.provider
    if tasks and not any(task.needs_sandbox for task in tasks):
        provider = NoSandboxes()
    if provider is None or isinstance(provider, Provider):
        placed = job.spec.model_copy(update={"output": job.spec.output.model_copy(update={"uri": uri})})
        private = (*run_environment.private, *(path for origin in origins for path in origin.private))
        provider = open_provider(
            placed, run_folder(record.uid), provider, base_dir=run_environment.base_dir, private=private
        )
    await provider.open()
    return provider


PREFLIGHT = Fence(epoch=1, holder="preflight")
SANDBOXES_LOOKED_UP = 16
"""Limit of sandboxes that are tested, because a dataset may have thousands of images."""


@dataclass(frozen=True)
class MissingProgram:
    """A task whose verifier starts with a program that its sandbox lacks."""

    task: str
    missing: str
    """`program cargo`, `module pytest`."""
    has_setup: bool
    """The task's setup, which was not run for this check, may install it."""

    def __str__(self) -> str:
        where = f"task {self.task}: verifier.commands[0] needs {self.missing}, which the sandbox does not have"
        return f"{where} before the task's setup" if self.has_setup else f"{where}; install it, or change the command"


async def missing_programs(
    job: RolloutJob, tasks: Sequence[Task], run_environment: RunEnvironment
) -> list[MissingProgram]:
    """Return the tasks whose verifier could not start, among those of the first sandboxes and commands.

    Raises SandboxFailure if no sandbox starts at all.
    """
    if not any(task.verifier for task in tasks):
        return []
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-preflight-") as folder:
        provider = run_environment.provider
        if provider is None or isinstance(provider, Provider):
            provider = open_provider(job.spec, Path(folder), provider, base_dir=run_environment.base_dir)
        await provider.open()
        try:
            return await _look_up(job, tasks, provider)
        finally:
            await provider.close()


async def _look_up(job: RolloutJob, tasks: Sequence[Task], provider: SandboxProvider) -> list[MissingProgram]:
    answers: list[tuple[WorkspaceSpec, str, str | None]] = []
    """Each sandbox and command is checked once, because a dataset shares a few of them."""
    found = []
    for number, task in enumerate(tasks):
        # A Dockerfile is built by the run itself.
        if task.verifier is None or task.dockerfile is not None:
            continue
        command = task.verifier.commands[0]
        spec = workspace_spec(job, Rollout.of(job, number, 0, task))
        bare = dataclasses.replace(spec, group="preflight", files=(), setup=(), services=(), volumes={})
        known = next((answer for answer in answers if answer[:2] == (bare, command)), None)
        if known is None and len(answers) == SANDBOXES_LOOKED_UP:
            continue
        if known is None:
            known = bare, command, await _look_up_one(bare, command, provider, f"{number}-0")
            answers.append(known)
        if known[2] is not None:
            found.append(MissingProgram(task.name, known[2], bool(task.setup)))
    return found


async def _look_up_one(spec: WorkspaceSpec, command: str, provider: SandboxProvider, attempt: str) -> str | None:
    workspace = await provider.acquire(spec, attempt=attempt, fence=PREFLIGHT, name="preflight")
    try:
        return await missing_program(workspace, [command], key="1:look-up")
    finally:
        await workspace.release()
