"""Decide what an error means for its rollout. Only this module decides, for every error. docs/attribution.md shows the
decisions as a table. They follow two rules. An infrastructure failure never becomes a reward. And the policy (the model
under training) can cause neither its own masking nor endless retries.
"""

from dataclasses import dataclass
from enum import StrEnum

from agent_runtime.agents.base import Stop
from agent_runtime.engine.attempt.attempt_log import NotReplayable
from agent_runtime.engine.attempt.snapshots import NoSuchCheckpoint
from agent_runtime.engine.scheduling.completion_rules import StalePolicy
from agent_runtime.engine.scheduling.first_ends import AgentBroken
from agent_runtime.environments.host import NO_DATA, EnvironmentFailure, EnvironmentFault
from agent_runtime.extensions import described, traceback_of
from agent_runtime.grading.grade import REACHED_AGAIN, STOOD_STILL, VerifierUnavailable
from agent_runtime.models.base import (
    PROCESS_STOPPED,
    REQUESTS_OWN_FAULTS,
    ContextExceeded,
    ConversationRefused,
    ModelConfigError,
    ModelError,
    RequestRefused,
)
from agent_runtime.plugins.plugins import PluginFailed
from agent_runtime.recording.artifacts import ArtifactsTooLarge
from agent_runtime.recording.epoch_log import Superseded
from agent_runtime.recording.layers import LayerTooLarge
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import SpoolFull, StorageError
from agent_runtime.sandboxes.base import (
    ACCESS_DENIED,
    INTERRUPTED,
    SANDBOX_MEMORY,
    DiskFailed,
    Evidence,
    Fenced,
    FileError,
    ProgramFailed,
    SandboxFailure,
    SetupFailed,
    WorkspaceLimit,
)
from rollout_api.records import StopReason, Unexplained

UNEXPLAINED_LIMIT = 2
"""After this many unexplained failures of one kind, the policy is held responsible. The kinds are: losses of a sandbox
that hosted only this rollout, failures of the model at its requests, and failures of the environment at its actions. A
single failure may be chance.
"""
UNCOUNTED = frozenset({INTERRUPTED, "Preempted", REACHED_AGAIN, STOOD_STILL})
"""Reasons of a SandboxFailure that do not count towards `attempts.limit`: a cluster may reclaim its nodes at any time, and
the verdict of a grading that is repeated for the last two always counts. Code under test can cause them.
"""
REFUSES_ALL = "the model refused a short test request too"
REQUEST_TOO_LARGE = "TooLarge"
"""The executor's error for a request beyond its limits, or for more calls than it can remember."""
AGENTS_TO_HANDLE = (FileError, NoSuchCheckpoint, LayerTooLarge)
"""Errors that concern a single context call. The agent may catch them and continue."""


class Phase(StrEnum):
    """Phase of an attempt."""

    STARTING = "starting"
    """Acquiring, or reattaching to, its workspace and preparing it."""
    AGENT = "agent"
    COLLECTING = "collecting"
    """Storing the artifacts."""
    GRADING = "grading"
    """Grading in a new workspace (`Separate`)."""
    GRADING_IN_PLACE = "grading in place"
    """Grading in the agent's own workspace (`Shared`)."""
    SEALING = "sealing"


class Action(StrEnum):
    """Consequence for the rollout."""

    COMPLETE = "Completed, graded"
    FAIL = "Completed, failed verdict"
    RETRY_ATTEMPT = "new attempt"
    RETRY_GRADING = "graded again"
    CANCEL = "Cancelled"
    END_RUN = "the run ends"


@dataclass(frozen=True)
class Situation:
    """Circumstances in which an error was raised."""

    phase: Phase
    answered: bool = False
    """The policy has answered at least one model call."""
    exposed: bool = False
    """The sandbox has contained work of the policy: a tool call, a program, a process left behind, artifacts."""
    alone: bool = False
    """The sandbox hosted no other attempt."""
    losses_alone: int = 0
    """Earlier unexplained losses of exposed sandboxes that hosted only this rollout."""
    requests_failed: int = 0
    """Earlier attempts that ended with a request at which the model failed while it answered others."""
    actions_failed: int = 0
    """Earlier attempts that ended with an action of the policy at which the environment failed."""


@dataclass(frozen=True)
class Decision:
    """Decision about an error. `reason` is one CamelCase word."""

    action: Action
    reason: str
    message: str
    stop_reason: StopReason | None = None
    """For COMPLETE and FAIL; None keeps the agent's stop reason."""
    counted: bool = True
    """Whether the retry counts towards `attempts.limit`."""
    unexplained: Unexplained | None = None
    """What failed for an unknown cause. The next failure of that kind can be attributed."""
    traceback: str | None = None
    """Traceback of the agent's own exception."""


class AgentRaised(Exception):
    """The agent's own code raised `error`, outside its context's calls."""

    def __init__(self, error: Exception) -> None:
        super().__init__(described(error))  # its own `__str__` may raise an error
        self.error = error


class OutOfTime(Exception):
    """The agent's time is over."""


def attribute(error: BaseException, situation: Situation) -> Decision:
    """Decide the consequence of an error. An unknown error fails this attempt, or this grading, never the run."""
    match error:
        case AgentRaised():
            return _of_agent(error.error)
        case Stop(reason=StopReason()):
            return _complete(error.reason, error.message)
        case ConversationRefused() if error.refuses_others:
            return _retry(type(error).__name__, f"{error}; {REFUSES_ALL}", situation)
        case ConversationRefused():
            return _of_conversation(error)
        case OutOfTime():
            return _complete(StopReason.AGENT_TIMEOUT, str(error))
        case StalePolicy():
            return Decision(Action.CANCEL, "StalePolicy", str(error))
        case SpoolFull(is_own=True) if situation.exposed:
            return _used_up(str(error), situation, is_gone=False)
        case SpoolFull():
            return _retry("RunnerDiskFull", str(error), situation)
        case AgentBroken() | Fenced() | Superseded() | StorageError() | RecordCorrupt():
            return Decision(Action.END_RUN, type(error).__name__, str(error))
        case ModelError():
            return _of_model(error, situation)
        case WorkspaceLimit() if situation.exposed:
            return _used_up(str(error), situation, is_gone=False)
        case ArtifactsTooLarge() if situation.phase is Phase.COLLECTING:
            return _used_up(str(error), situation, is_gone=False)
        case DiskFailed() if situation.phase in (Phase.COLLECTING, Phase.GRADING):
            return _retry("DiskFailed", str(error), situation)
        case FileError() | LayerTooLarge() if situation.exposed:
            return _of_files(error, situation)
        case VerifierUnavailable() if situation.phase is Phase.GRADING_IN_PLACE:
            return _fail(str(error), situation)
        case EnvironmentFailure(reason=reason) if reason == NO_DATA and not situation.exposed:
            # No attempt would find an episode, and nothing was lost.
            return Decision(Action.CANCEL, reason, error.message)
        case EnvironmentFailure():
            return _of_environment(error, situation)
        case SandboxFailure(reason=reason) if reason == ACCESS_DENIED:
            # Every rollout would fail like this until an administrator restores the runner's permissions.
            return Decision(Action.END_RUN, reason, error.message)
        case ProgramFailed(hung_up=True) if situation.answered:
            return _of_call(error.reason, error.message, situation)
        case SandboxFailure():
            return _of_sandbox(error, situation)
        case WorkspaceLimit():
            return _retry(error.cause, error.message, situation)
        case NotReplayable():
            return _retry("AgentNotReplayable", str(error), situation)
        case PluginFailed():
            return _retry(error.reason, error.message, situation)
        case VerifierUnavailable():
            return _retry("VerifierUnavailable", str(error), situation)
        case Exception():
            return _retry("InternalError", f"{described(error)}\n{traceback_of(error, is_of_user=False)}", situation)
    return Decision(Action.END_RUN, type(error).__name__, described(error))


def _of_agent(error: Exception) -> Decision:
    """The agent's code belongs to the job, but the policy's answers can make it raise. Therefore the rollout is graded."""
    if isinstance(error, ConversationRefused):
        return _of_conversation(error)
    if isinstance(error, Stop):
        meant = attribute(error, Situation(Phase.AGENT))
        if meant.action is Action.COMPLETE:
            return meant
    message = described(error)
    return Decision(Action.COMPLETE, "AgentError", message, StopReason.AGENT_ERROR, traceback=traceback_of(error))


def _of_conversation(error: ConversationRefused) -> Decision:
    is_long = isinstance(error, ContextExceeded)
    return _complete(StopReason.CONTEXT_EXCEEDED if is_long else StopReason.CONTENT_FILTER, str(error))


def _of_model(error: ModelError, situation: Situation) -> Decision:
    if error.reason == PROCESS_STOPPED:
        return _retry(INTERRUPTED, error.message, situation, counted=False)
    of_request = isinstance(error, RequestRefused) or error.reason in REQUESTS_OWN_FAULTS
    answered = situation.answered or error.after_tokens
    if of_request and answered and situation.phase is Phase.AGENT:
        if error.refuses_others:
            # An empty account, a broken gateway.
            return _retry(error.reason, f"{error.message}; {REFUSES_ALL}", situation)
        # The request contains the policy's answers, so a refused request must not mask the rollout.
        return _complete(StopReason.AGENT_ERROR, str(error))
    if error.answers_others:
        # The model answered other calls, so the key and the server work: the cause is the request, or chance.
        message = f"{error.message}; the model answered another request right afterwards"
        if not answered or situation.phase is not Phase.AGENT:
            return _retry(error.reason, message, situation)
        return _of_call(error.reason, message, situation)
    if isinstance(error, ModelConfigError) and not of_request:
        return Decision(Action.END_RUN, error.reason, error.message)
    return _retry(error.reason, error.message, situation)


def _of_call(reason: str, message: str, situation: Situation) -> Decision:
    """Decide about a call that may have failed by the policy's words, or by chance."""
    if situation.requests_failed + 1 >= UNEXPLAINED_LIMIT:
        return _complete(StopReason.AGENT_ERROR, f"{UNEXPLAINED_LIMIT} attempts ended like this: {message}")
    return _retry(reason, message, situation, unexplained=Unexplained.REQUEST)


def _of_environment(failure: EnvironmentFailure, situation: Situation) -> Decision:
    """An environment should accept every action, and did so in a trial. The cause of a failure is unknown."""
    is_at_action = situation.exposed and situation.phase is Phase.AGENT
    if failure.failed_trial or failure.reason not in frozenset(EnvironmentFault) or not is_at_action:
        return _retry(failure.reason, failure.message, situation)
    if situation.actions_failed + 1 >= UNEXPLAINED_LIMIT:
        message = f"the environment failed at the policy's actions in {UNEXPLAINED_LIMIT} attempts: {failure.message}"
        return _complete(StopReason.RESOURCE_LIMIT, message)
    return _retry(failure.reason, failure.message, situation, unexplained=Unexplained.ACTION)


def _of_files(error: Exception, situation: Situation) -> Decision:
    """Files that the policy left cannot be read, packed or unpacked."""
    match situation.phase:
        case Phase.GRADING | Phase.GRADING_IN_PLACE:
            return _fail(f"the artifacts cannot be copied into the grading workspace: {error}", situation)
        case Phase.COLLECTING:
            return Decision(Action.COMPLETE, "FileError", f"the working directory cannot be packed: {error}")
    return _complete(StopReason.AGENT_ERROR, described(error))


def _of_sandbox(failure: SandboxFailure, situation: Situation) -> Decision:
    evidence = failure.evidence
    if isinstance(failure, SetupFailed) and situation.exposed and situation.phase is Phase.AGENT:
        # The setup of a later step runs in the state that the policy left.
        return _complete(StopReason.AGENT_ERROR, failure.message)
    if failure.was_unheld:
        message = f"this runner was stopped for longer than sandbox.idleSeconds: {failure.message}"
        return _retry(INTERRUPTED, message, situation, counted=False)
    if failure.reason == "Idle" and situation.exposed and situation.phase is not Phase.STARTING:
        # The runner holds the workspace and keeps it alive, so it was not idle.
        evidence = Evidence.UNEXPLAINED
    if failure.reason == REQUEST_TOO_LARGE and situation.exposed and situation.phase in (Phase.AGENT, Phase.COLLECTING):
        return _used_up(failure.message, situation, is_gone=False)
    if failure.reason == SANDBOX_MEMORY and not situation.alone:
        # Alone it has the memory for itself, so the policy cannot cause this again. A setup or service that is ended
        # like this would otherwise meet the same neighbours until no attempt is left.
        return _retry(failure.reason, failure.message, situation, unexplained=Unexplained.SANDBOX)
    if not situation.exposed or evidence in (Evidence.NOT_LOST, Evidence.OUTSIDE):
        return _retry(failure.reason, failure.message, situation, counted=failure.reason not in UNCOUNTED)
    if situation.alone and evidence is Evidence.OWN_LIMIT:
        return _used_up(f"{failure.reason}: {failure.message}", situation, is_gone=True)
    if situation.alone and situation.losses_alone + 1 >= UNEXPLAINED_LIMIT:
        losses = (
            f"it lost its sandbox {UNEXPLAINED_LIMIT} times without another known cause, while no other rollout "
            "was in it"
        )
        return _used_up(f"{losses}: {failure.message}", situation, is_gone=True)
    # This retry does not count, but retries are still bounded: the next sandbox hosts only this rollout, and losses
    # there are counted.
    return _retry(failure.reason, failure.message, situation, unexplained=Unexplained.SANDBOX)


def _used_up(message: str, situation: Situation, *, is_gone: bool) -> Decision:
    """The policy used up its workspace's resources, or destroyed it."""
    if is_gone or situation.phase not in (Phase.AGENT, Phase.COLLECTING):
        return _fail(message, situation)
    return _complete(StopReason.RESOURCE_LIMIT, message)


def _complete(reason: StopReason, message: str) -> Decision:
    return Decision(Action.COMPLETE, reason.value, message, reason)


def _fail(message: str, situation: Situation) -> Decision:
    is_graded_now = situation.phase in (Phase.GRADING, Phase.GRADING_IN_PLACE)
    stop_reason = None if is_graded_now else StopReason.RESOURCE_LIMIT
    return Decision(Action.FAIL, StopReason.RESOURCE_LIMIT.value, message, stop_reason)


def _retry(
    reason: str, message: str, situation: Situation, *, counted: bool = True, unexplained: Unexplained | None = None
) -> Decision:
    action = Action.RETRY_GRADING if situation.phase is Phase.GRADING else Action.RETRY_ATTEMPT
    return Decision(action, reason, message, counted=counted and unexplained is None, unexplained=unexplained)
