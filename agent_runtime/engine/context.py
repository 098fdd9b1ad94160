"""Objects that all rollouts of one run share."""

import random
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field, replace

from agent_runtime.agents.base import Agent
from agent_runtime.agents.program import program_of
from agent_runtime.engine.attempt.assignment import Rollout
from agent_runtime.engine.attempt.snapshots import SnapshotStore
from agent_runtime.engine.branching.state import Branching
from agent_runtime.engine.events import Observer
from agent_runtime.engine.scheduling.completion_rules import NewestPolicy
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.engine.scheduling.first_ends import FirstEnds
from agent_runtime.engine.scheduling.model_watch import ModelWatch
from agent_runtime.engine.scheduling.shard import WHOLE_JOB, Shard
from agent_runtime.environments.pool import EnvironmentPool
from agent_runtime.models.base import Model
from agent_runtime.plugins.base import GroupInfo, RolloutInfo
from agent_runtime.plugins.plugins import GroupPlugins, Plugins, RolloutPlugins
from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.seals import SealedResults
from agent_runtime.sandboxes.base import SandboxProvider, Service, WorkspaceSpec
from agent_runtime.sandboxes.no_sandbox import NoSandboxes
from agent_runtime.tools.base import Tool
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import PUBLIC_ONLY, WORKING_DIR, NetworkAccess, SandboxTemplate
from rollout_api.services import TaskService
from rollout_api.tasks import Task


@dataclass
class RunContext:
    """One run of one job in this process. `model` may be replaced during the run; each call uses the current one."""

    job: RolloutJob
    record: JobRecord
    provider: SandboxProvider
    make_agent: Callable[[], Agent] | None
    """None if the agent is a program in the workspace."""
    tools: Mapping[str, Tool]
    server_keys: Mapping[str, str] = field(repr=False)
    """Keys of MCP servers, by name."""
    model: Model | None
    observer: Observer
    runner: str
    snapshots: SnapshotStore
    """Store for snapshots of workspaces."""
    results: SealedResults
    """Results of this shard's sealed rollouts, from any process."""
    begun: Set[int] = frozenset()
    """Unsealed rollouts for which earlier processes have claimed an attempt."""
    reported_groups: Set[int] = frozenset()
    """Groups whose end earlier processes have reported to plugins."""
    shard: Shard = WHOLE_JOB
    drain: Drain = field(default_factory=Drain)
    watch: ModelWatch = field(default_factory=ModelWatch)
    newest_policy: NewestPolicy = field(default_factory=NewestPolicy)
    first_ends: FirstEnds = field(default_factory=FirstEnds)
    jitter: random.Random = field(default_factory=random.Random)
    plugins: Plugins = field(default_factory=Plugins)
    batches: dict[int, str | None] = field(default_factory=dict)
    """Labels of submitted groups, by number."""
    environments: EnvironmentPool = field(default_factory=EnvironmentPool)
    origins: Mapping[int, Branching] = field(default_factory=dict)
    """Origins of the groups of `tasks.branch`, by number."""
    check_holder: Callable[[], Awaitable[None]] | None = None
    """Called before an attempt is claimed; raises Superseded if a later session has the run."""
    finished: bool = False
    """Whether the run is complete, so that sandboxes need not be kept for another process."""

    def current_model(self) -> Model | None:
        """Return the current model."""
        return self.model

    def plugins_of_group(self, number: int, task: Task) -> GroupPlugins:
        """Return the plugins' interface to a group."""
        return GroupPlugins(self.plugins, GroupInfo(number, task, self.job.spec.group_size), self.record.folder)

    def plugins_of_attempt(self, rollout: Rollout, attempt: int) -> RolloutPlugins:
        """Return the plugins' interface to an attempt."""
        info = RolloutInfo(rollout.index, rollout.group, rollout.member, attempt, rollout.seed, rollout.task)
        return RolloutPlugins(self.plugins, info, self.record.folder)

    def provider_for(self, task: Task) -> SandboxProvider:
        """Return the provider of the workspaces of that task's rollouts."""
        return self.provider if task.needs_sandbox else NoSandboxes()


def workspace_spec(job: RolloutJob, rollout: Rollout) -> WorkspaceSpec:
    """Return the specification of the rollout's workspaces, which all members of its group share."""
    task = rollout.task
    sandbox = task.sandbox.apply(job.spec.sandbox)
    working_dir = sandbox.working_dir or WORKING_DIR
    program = program_of(job.spec.agent, working_dir)
    return WorkspaceSpec(
        services=[_service(service, job, sandbox, f"g{rollout.group}", task) for service in task.services],
        volumes=task.volumes,
        group=f"g{rollout.group}",
        working_dir=working_dir,
        image=sandbox.image if task.dockerfile is None else None,
        dockerfile=task.dockerfile,
        user=sandbox.user,
        env={variable.name: variable.value for variable in sandbox.env},
        resources=sandbox.resources,
        network={phase: _access(job, access) for phase, access in sandbox.network.by_phase().items()},
        files=task.files,
        setup=[*task.setup, *(program.install if program else ())],
        setup_seconds=task.timeouts.setup_seconds,
        stores_setup=sandbox.store_setup,
        start_seconds=sandbox.start_seconds,
        snapshot_paths=sandbox.snapshot_paths,
        working_dir_of_image=sandbox.working_dir is None,
    )


def _access(job: RolloutJob, access: NetworkAccess) -> NetworkAccess:
    """Return a phase's access. What only a data set lists, which may be of others, must have a public address."""
    if isinstance(access, str) or job.spec.tasks.inline is not None:
        return access
    own = job.spec.sandbox.network.by_phase().values()
    listed = {pair for given in own if not isinstance(given, str) for pair in given}
    return [pair if pair in listed else f"{PUBLIC_ONLY}{pair}" for pair in access]


def _service(service: TaskService, job: RolloutJob, sandbox: SandboxTemplate, group: str, task: Task) -> Service:
    dockerfile = service.dockerfile or task.dockerfile
    return Service(
        name=service.name,
        workspace=WorkspaceSpec(
            group=group,
            working_dir=service.working_dir or "/",
            image=sandbox.image if dockerfile is None else None,
            dockerfile=dockerfile,
            user=service.user,
            env={variable.name: variable.value for variable in service.env},
            resources=sandbox.resources,
            # Only its Dockerfile's commands have this access.
            network={"setup": _access(job, sandbox.network.setup)},
            files=service.files,
            start_seconds=sandbox.start_seconds,
            working_dir_of_image=service.working_dir is None,
            volumes=service.volumes,
        ),
        command=service.command,
        args=service.args,
        aliases=service.aliases,
        depends_on=service.depends_on,
        health=service.health,
        completes=service.completes,
    )


def grading_spec(spec: WorkspaceSpec, task: Task) -> WorkspaceSpec:
    """Return the specification of the workspace in which a rollout is graded in mode Separate.

    With `verifier.image`, no program agent is installed, because that image may lack the tools to install it.
    """
    if task.verifier is None or (task.verifier.image is None and task.verifier.dockerfile is None):
        return spec
    return replace(spec, image=task.verifier.image, dockerfile=task.verifier.dockerfile, setup=task.setup)
