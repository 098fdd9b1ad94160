"""The inputs of an attempt's agent: its assignment, budgets and observers."""

from dataclasses import dataclass, field, replace

from agent_runtime.engine.attempt.attribution import Phase, Situation
from agent_runtime.engine.events import Observer
from agent_runtime.engine.scheduling.completion_rules import PolicyLag
from agent_runtime.engine.scheduling.drain import Drain
from agent_runtime.engine.scheduling.model_watch import ModelWatch
from agent_runtime.engine.scheduling.shard import rollout_seed
from agent_runtime.plugins.plugins import RolloutPlugins
from rollout_api.model import Sampling
from rollout_api.records import StopReason
from rollout_api.rollout_job import Agent as AgentSpec
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task


@dataclass(frozen=True)
class Rollout:
    """A rollout to run: one member of a task's group."""

    index: int
    group: int
    member: int
    task: Task
    seed: int
    batch: str | None = None
    """Label with which its group was submitted."""

    @classmethod
    def of(
        cls, job: RolloutJob, group: int, member: int, task: Task, batch: str | None = None, *, origin: str = ""
    ) -> "Rollout":
        """Return the rollout of that member, with a seed derived from the job's and, for a branch, its origin's name."""
        index = group * job.spec.group_size + member
        seed = rollout_seed(job.spec.seed, index, origin)
        return cls(index=index, group=group, member=member, task=task, seed=seed, batch=batch)


@dataclass(frozen=True)
class Assignment:
    """A rollout to run, its agent, and the sampling of its answers."""

    rollout: Rollout
    agent: AgentSpec
    sampling: Sampling
    watch: ModelWatch = field(default_factory=ModelWatch)
    """Watches all model calls of the run."""
    run: str = ""
    """`job_tag` of the run: routers keep a session on one server, and not the sessions of all runs on the same one."""

    @property
    def session(self) -> str:
        """Return the name of the rollout at model servers (`ModelRequest.session`)."""
        return f"{self.run}rollout-{self.rollout.index}"

    @property
    def model_group(self) -> str:
        """Return the key that all calls of the rollout's group share (`ModelRequest.group`)."""
        return f"{self.run}group-{self.rollout.index - self.rollout.member}"


@dataclass(frozen=True)
class Oversight:
    """Components that are consulted or notified while an attempt's agent works."""

    drain: Drain = field(default_factory=Drain)
    policy_lag: PolicyLag = field(default_factory=PolicyLag)
    plugins: RolloutPlugins | None = None
    observer: Observer = lambda event: None
    situation: Situation = Situation(Phase.AGENT)
    """Circumstances of the attempt, its sandbox and earlier failures, that affect the attribution of an error."""


@dataclass(frozen=True)
class Budget:
    """Remaining budgets. `tokens` None: unlimited."""

    turns: int
    tokens: int | None
    seconds: float

    def exhausted(self) -> StopReason | None:
        """Return the first budget that is used up."""
        if self.turns <= 0:
            return StopReason.MAX_TURNS
        if self.tokens is not None and self.tokens <= 0:
            return StopReason.TOKEN_BUDGET
        if self.seconds <= 0:
            return StopReason.AGENT_TIMEOUT
        return None

    def after(self, *, turns: int = 0, tokens: int = 0, seconds: float = 0.0) -> "Budget":
        """Return the rest after some was used."""
        return replace(
            self,
            turns=self.turns - turns,
            tokens=None if self.tokens is None else self.tokens - tokens,
            seconds=self.seconds - seconds,
        )

    def child(self, *, turns: int | None = None, tokens: int | None = None, seconds: float | None = None) -> "Budget":
        """Return the budget of a sub-agent: its request, limited to the rest."""
        asked_tokens = self.tokens if tokens is None else tokens
        return Budget(
            turns=self.turns if turns is None else min(turns, self.turns),
            tokens=asked_tokens if self.tokens is None or asked_tokens is None else min(asked_tokens, self.tokens),
            seconds=self.seconds if seconds is None else min(seconds, self.seconds),
        )
