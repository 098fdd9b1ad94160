"""What an attempt's agent is given, whichever kind it is: its assignment, and those who watch over its work."""

from dataclasses import dataclass, field

from agent_runtime.engine.attribution import Phase, Situation
from agent_runtime.engine.drain import Drain
from agent_runtime.engine.events import Observer
from agent_runtime.engine.model_watch import ModelWatch
from agent_runtime.engine.seeds import rollout_seed
from agent_runtime.engine.staleness_policy import PolicyLag
from agent_runtime.plugins.of_rollout import RolloutPlugins
from rollout_api.model import Sampling
from rollout_api.rollout_job import Agent as AgentSpec
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task


@dataclass(frozen=True)
class Rollout:
    """One trajectory to be made: a member of a task's group."""

    index: int
    group: int
    member: int
    task: Task
    seed: int
    batch: str | None = None
    """Label that its group was submitted with."""

    @classmethod
    def of(cls, job: RolloutJob, group: int, member: int, task: Task, batch: str | None = None) -> "Rollout":
        """The rollout of that member; its seed follows from the job's."""
        index = group * job.spec.group_size + member
        seed = rollout_seed(job.spec.seed, index)
        return cls(index=index, group=group, member=member, task=task, seed=seed, batch=batch)


@dataclass(frozen=True)
class Assignment:
    """A rollout to be made, by which agent, and how its answers are sampled."""

    rollout: Rollout
    agent: AgentSpec
    sampling: Sampling
    watch: ModelWatch = field(default_factory=ModelWatch)
    """Of all model calls of the run."""

    @property
    def model_group(self) -> str:
        """What the calls of the rollout's whole group have in common (`ModelRequest.group`)."""
        return f"group-{self.rollout.index - self.rollout.member}"


@dataclass(frozen=True)
class Oversight:
    """Who is asked and told while an attempt's agent works."""

    drain: Drain = field(default_factory=Drain)
    policy_lag: PolicyLag = field(default_factory=PolicyLag)
    plugins: RolloutPlugins | None = None
    observer: Observer = lambda event: None
    situation: Situation = Situation(Phase.AGENT)
    """What the attempt's sandbox and its earlier failures add to the attribution of an error."""
