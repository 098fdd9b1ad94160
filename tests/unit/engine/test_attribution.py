"""Attribution as a table, which docs/attribution.md shows too."""

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.agents.base import Stop
from agent_runtime.engine.attempt.attempt_log import NotReplayable
from agent_runtime.engine.attempt.attribution import (
    UNEXPLAINED_LIMIT,
    Action,
    AgentRaised,
    OutOfTime,
    Phase,
    Situation,
    attribute,
)
from agent_runtime.engine.attempt.snapshots import NoSuchCheckpoint
from agent_runtime.engine.scheduling.completion_rules import StalePolicy
from agent_runtime.engine.scheduling.first_ends import AgentBroken
from agent_runtime.environments.host import EnvironmentFailure, EnvironmentFault
from agent_runtime.grading.grade import VerifierUnavailable
from agent_runtime.models.answers import MAY_PASS
from agent_runtime.models.base import (
    PROCESS_STOPPED,
    STORAGE_SILENT,
    ContentFiltered,
    ContextExceeded,
    ConversationRefused,
    ModelConfigError,
    ModelError,
    RequestRefused,
)
from agent_runtime.models.refusals import final_refusal, refusal
from agent_runtime.plugins.plugins import PluginFailed
from agent_runtime.recording.artifacts import ArtifactsTooLarge
from agent_runtime.recording.epoch_log import Superseded
from agent_runtime.recording.layers import LayerTooLarge
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import SpoolFull, StorageError, StorageUnavailable
from agent_runtime.sandboxes.base import DiskFailed, Fenced, FileError, SandboxFailure, SetupFailed, WorkspaceLimit
from rollout_api.records import StopReason, Unexplained

PAGE = Path(__file__).parents[3] / "docs/attribution.md"

S = Situation
STARTING = S(Phase.STARTING)
TAKEN_OVER = S(Phase.STARTING, answered=True, exposed=True)
FIRST_CALL = S(Phase.AGENT)
FIRST_AGAIN = S(Phase.AGENT, requests_failed=1)
SHARED = S(Phase.AGENT, answered=True, exposed=True)
ALONE = S(Phase.AGENT, answered=True, exposed=True, alone=True)
AGAIN = S(Phase.AGENT, answered=True, exposed=True, alone=True, losses_alone=1)
ONCE_MORE = S(Phase.AGENT, answered=True, exposed=True, requests_failed=1, actions_failed=1)
COLLECTING = S(Phase.COLLECTING, answered=True, exposed=True)
PREPARING = S(Phase.GRADING, answered=True)
GRADING = S(Phase.GRADING, answered=True, exposed=True)
GRADING_ALONE = S(Phase.GRADING, answered=True, exposed=True, alone=True)
GRADING_AGAIN = S(Phase.GRADING, answered=True, exposed=True, alone=True, losses_alone=1)
IN_PLACE = S(Phase.GRADING_IN_PLACE, answered=True, exposed=True)
SEALING = S(Phase.SEALING, answered=True, exposed=True)

RESOURCE, ERROR = StopReason.RESOURCE_LIMIT, StopReason.AGENT_ERROR
COMPLETE, FAIL, AGAIN_ATTEMPT = Action.COMPLETE, Action.FAIL, Action.RETRY_ATTEMPT
AGAIN_GRADING, CANCEL, END = Action.RETRY_GRADING, Action.CANCEL, Action.END_RUN
FREE, ISOLATED = "uses up no attempt", "next sandbox hosts it alone, uses up no attempt"
NOTED = "noted, uses up no attempt"


def at_request(kind: type[ModelError], reason: str = "ServerError", *, after_tokens: bool = False) -> ModelError:
    """Return an error of a model that failed at this request and answered another one."""
    error = kind(reason, "m")
    error.answers_others, error.after_tokens = True, after_tokens
    return error


R = TypeVar("R", bound=ModelError | ConversationRefused)


def refusing_all(refusal: R) -> R:
    """Return a refusal after which the model refused a test request too."""
    refusal.refuses_others = True
    return refusal


def away(reason: str) -> EnvironmentFailure:
    """Return a failure at an action after which a trial step failed too."""
    failure = EnvironmentFailure(reason, "m")
    failure.failed_trial = True
    return failure


def stopped() -> ModelError:
    return ModelError(PROCESS_STOPPED, "m")


def bad_request() -> RequestRefused:
    return RequestRefused("BadRequest", "m")


IN_ANSWER = at_request(ModelError, "Timeout", after_tokens=True)


def lost(reason: str, *, was_unheld: bool = False) -> SandboxFailure:
    failure = SandboxFailure(reason, "injected")
    failure.was_unheld = was_unheld
    return failure


def room(size: int) -> SpoolFull:
    """Return an error for artifacts of this many MB without room on a disk of 60 MB."""
    return SpoolFull(size, 60, "m")


# Event, error, situation, action, and the stop reason or a note.
TABLE: list[tuple[str, BaseException, Situation, Action, StopReason | str | None]] = [
    # The sandbox
    ("No sandbox could be acquired: no node, no image, no place", lost("NoPlace"), STARTING, AGAIN_ATTEMPT, None),
    ("The cluster does not let the runner create sandboxes", lost("AccessDenied"), STARTING, END, None),
    ("A setup command of the task failed", SetupFailed("exit code 1"), STARTING, AGAIN_ATTEMPT, None),
    ("The setup used up the workspace", WorkspaceLimit("Memory", "m"), STARTING, AGAIN_ATTEMPT, None),
    ("The sandbox was lost before the policy acted", lost("SandboxLost"), FIRST_CALL, AGAIN_ATTEMPT, None),
    ("The pod was evicted because its node ran low on memory", lost("Evicted"), AGAIN, AGAIN_ATTEMPT, None),
    ("The pod was deleted", lost("PodDeleted"), AGAIN, AGAIN_ATTEMPT, None),
    ("The node was lost", lost("NodeLost"), AGAIN, AGAIN_ATTEMPT, None),
    ("The network between runner and sandbox was away for minutes", lost("NetworkLost"), AGAIN, AGAIN_ATTEMPT, None),
    ("The pod was preempted", lost("Preempted"), AGAIN, AGAIN_ATTEMPT, FREE),
    ("No runner held the workspace for too long", lost("Interrupted"), AGAIN, AGAIN_ATTEMPT, FREE),
    ("Lost after its runner itself stood still for too long", lost("Idle", was_unheld=True), AGAIN, AGAIN_ATTEMPT, FREE),
    ("Lost, unexplained, with other attempts in it", lost("SandboxLost"), SHARED, AGAIN_ATTEMPT, ISOLATED),
    ("Lost, unexplained, alone in it, once", lost("SandboxLost"), ALONE, AGAIN_ATTEMPT, ISOLATED),
    ("Lost, unexplained, alone in it, twice", lost("SandboxLost"), AGAIN, FAIL, RESOURCE),
    ("The executor crashed, alone in it, twice", lost("Crashed"), AGAIN, FAIL, RESOURCE),
    ("The executor fails at a call, alone in it, twice", lost("InternalError"), AGAIN, FAIL, RESOURCE),
    ("The executor ended as if idle although a runner held it", lost("Idle"), ALONE, AGAIN_ATTEMPT, ISOLATED),
    ("The pod was killed for memory, alone in it, once", lost("OOMKilled"), ALONE, AGAIN_ATTEMPT, ISOLATED),
    ("The pod was killed for memory, alone in it, twice", lost("OOMKilled"), AGAIN, FAIL, RESOURCE),
    ("The sandbox's lifetime was over, alone in it, twice", lost("DeadlineExceeded"), AGAIN, FAIL, RESOURCE),
    ("The node ran out of disk, alone in it, once", lost("DiskExhausted"), ALONE, AGAIN_ATTEMPT, ISOLATED),
    ("The node ran out of disk, alone in it, twice", lost("DiskExhausted"), AGAIN, FAIL, RESOURCE),
    ("The node ran out of inodes, alone in it, twice", lost("InodesExhausted"), AGAIN, FAIL, RESOURCE),
    ("The node ran out of process ids, alone in it, twice", lost("ProcessesExhausted"), AGAIN, FAIL, RESOURCE),
    ("The pod exceeded its own disk, alone in it", lost("StorageExceeded"), ALONE, FAIL, RESOURCE),
    ("The pod exceeded its own disk, with other attempts", lost("StorageExceeded"), SHARED, AGAIN_ATTEMPT, ISOLATED),
    ("The workspace used up its memory, disk or processes", WorkspaceLimit("Memory", "m"), SHARED, COMPLETE, RESOURCE),
    ("The same, found when a runner takes over", WorkspaceLimit("Attacked", "m"), TAKEN_OVER, FAIL, RESOURCE),
    ("The executor has to remember too many calls, or gets too large a one", lost("TooLarge"), SHARED, COMPLETE, RESOURCE),
    ("Others have filled the disk under the sandbox", lost("DiskFull"), AGAIN, AGAIN_ATTEMPT, None),
    ("The sandbox's memory was used up, not its own", lost("SandboxMemory"), SHARED, AGAIN_ATTEMPT, ISOLATED),
    ("The same, alone in it", lost("SandboxMemory"), AGAIN, AGAIN_ATTEMPT, None),
    ("The same, during the task's setup", lost("SandboxMemory"), STARTING, AGAIN_ATTEMPT, ISOLATED),
    ("A checkpoint found no place", lost("NoPlace"), AGAIN, AGAIN_ATTEMPT, None),
    # The model
    ("The model server does not answer", ModelError("Unreachable", "m"), SHARED, AGAIN_ATTEMPT, None),
    ("A program gave up a call because its runner stood still", stopped(), SHARED, AGAIN_ATTEMPT, FREE),
    ("The same, because storage did not answer", ModelError(STORAGE_SILENT, "m"), SHARED, AGAIN_ATTEMPT, None),
    ("The model's code raised", ModelError("ModelFailed", "m"), SHARED, AGAIN_ATTEMPT, None),
    ("It fails at a request, and answers another one, once", at_request(ModelError), SHARED, AGAIN_ATTEMPT, NOTED),
    ("It fails at a request, and answers another one, twice", at_request(ModelError), ONCE_MORE, COMPLETE, ERROR),
    ("It fails at the first request, and answers another one", at_request(ModelError), FIRST_CALL, AGAIN_ATTEMPT, None),
    ("It fails in the middle of the first answer, and answers another one", IN_ANSWER, FIRST_CALL, AGAIN_ATTEMPT, NOTED),
    ("The same, twice", IN_ANSWER, FIRST_AGAIN, COMPLETE, ERROR),
    ("The model server refuses the key, or has no such model", ModelConfigError("KeyRefused", "m"), SHARED, END, None),
    ("The same at one request, and it answers another one", at_request(ModelConfigError), SHARED, AGAIN_ATTEMPT, NOTED),
    ("The same at the first request", at_request(ModelConfigError), FIRST_CALL, AGAIN_ATTEMPT, None),
    ("The server refuses the first request", RequestRefused("BadRequest", "m"), FIRST_CALL, AGAIN_ATTEMPT, None),
    ("It refuses a request with the policy's answers in it", bad_request(), SHARED, COMPLETE, ERROR),
    ("The prompt is longer than the context", ContextExceeded("m"), SHARED, COMPLETE, StopReason.CONTEXT_EXCEEDED),
    ("The server filtered the conversation", ContentFiltered("m"), SHARED, COMPLETE, StopReason.CONTENT_FILTER),
    ("It refuses a short test request as well", refusing_all(bad_request()), SHARED, AGAIN_ATTEMPT, None),
    ("The rollout lags behind `model.maxPolicyLag`", StalePolicy("m"), SHARED, CANCEL, None),
    # The agent and its environment
    ("A budget is used up, or a tool ended the rollout", Stop(StopReason.MAX_TURNS), SHARED, COMPLETE, StopReason.MAX_TURNS),
    ("The agent's time is used up", OutOfTime("m"), SHARED, COMPLETE, StopReason.AGENT_TIMEOUT),
    ("The agent's own code raised", AgentRaised(KeyError("x")), FIRST_CALL, COMPLETE, ERROR),
    ("It raised the same in each of the first 8 rollouts", AgentBroken("t"), FIRST_CALL, END, None),
    ("It raised an error of the sandbox or of storage itself", AgentRaised(StorageError("x")), SHARED, COMPLETE, ERROR),
    ("A file could not be written, and the agent did not handle it", FileError("x", "m"), SHARED, COMPLETE, ERROR),
    ("An unknown checkpoint, not handled", AgentRaised(NoSuchCheckpoint("x")), SHARED, COMPLETE, ERROR),
    ("The setup of a later step failed", SetupFailed("exit code 1"), SHARED, COMPLETE, ERROR),
    ("A resumed agent did not repeat its calls", NotReplayable("m"), SHARED, AGAIN_ATTEMPT, None),
    ("The environment has no episode for the seed", EnvironmentFailure("NoData", "m"), STARTING, CANCEL, None),
    ("A plugin failed to change the task", PluginFailed("m"), STARTING, AGAIN_ATTEMPT, None),
    # The environment
    ("The environment cannot be reset", EnvironmentFailure("EnvironmentFailed", "m"), STARTING, AGAIN_ATTEMPT, None),
    ("It failed at an action, once", EnvironmentFailure("EnvironmentHung", "m"), AGAIN, AGAIN_ATTEMPT, NOTED),
    ("It failed at an action, twice", EnvironmentFailure("EnvironmentDied", "m"), ONCE_MORE, COMPLETE, RESOURCE),
    ("The same, and a trial step fails as well", away("EnvironmentFailed"), ONCE_MORE, AGAIN_ATTEMPT, None),
    ("The same actions led to other steps", EnvironmentFailure("EnvironmentDiverged", "m"), ONCE_MORE, AGAIN_ATTEMPT, None),
    # Artifacts and grading
    ("The artifacts are too large", ArtifactsTooLarge("m"), COLLECTING, COMPLETE, RESOURCE),
    ("They would take more than half of the runner's disk, and find no room", room(50), COLLECTING, COMPLETE, RESOURCE),
    ("The runner's disk has no room for them, mostly because of others", room(5), COLLECTING, AGAIN_ATTEMPT, None),
    ("The working directory cannot be packed", FileError("x", "m"), COLLECTING, COMPLETE, None),
    ("It cannot be packed because the disk of the machine is broken", DiskFailed("p", "m"), COLLECTING, AGAIN_ATTEMPT, None),
    ("The sandbox was evicted while artifacts were stored", lost("Evicted"), COLLECTING, AGAIN_ATTEMPT, None),
    ("The verifier's program is missing in the prepared state", VerifierUnavailable("m"), PREPARING, AGAIN_GRADING, None),
    ("A destination listed for the verifier is away", lost("Unreachable"), GRADING_AGAIN, AGAIN_GRADING, None),
    ("The grading sandbox could not be acquired", lost("NoPlace"), PREPARING, AGAIN_GRADING, None),
    ("It was lost from outside", lost("NodeLost"), GRADING_AGAIN, AGAIN_GRADING, None),
    ("Others have filled the disk under the sandbox", lost("DiskFull"), GRADING_AGAIN, AGAIN_GRADING, None),
    ("The sandbox's memory was used up, not its own", lost("SandboxMemory"), GRADING, AGAIN_GRADING, ISOLATED),
    ("The same, alone in it", lost("SandboxMemory"), GRADING_AGAIN, AGAIN_GRADING, None),
    ("Its runner stood still for too long", lost("SandboxLost", was_unheld=True), GRADING_AGAIN, AGAIN_GRADING, FREE),
    (
        "The verifier failed, and its sandbox stood still, or a listed destination was away for a while; once",
        lost("StoodStill"),
        GRADING_AGAIN,
        AGAIN_GRADING,
        FREE,
    ),
    ("The artifacts cannot be unpacked", FileError("p", "m"), GRADING, FAIL, None),
    ("They cannot be unpacked because the disk of the machine is full", DiskFailed("p", "m"), GRADING, AGAIN_GRADING, None),
    ("The code under test used up the workspace", WorkspaceLimit("Disk", "m"), GRADING, FAIL, None),
    ("Lost, unexplained, with other attempts in it", lost("SandboxLost"), GRADING, AGAIN_GRADING, ISOLATED),
    ("Lost, unexplained, alone in it, once", lost("SandboxLost"), GRADING_ALONE, AGAIN_GRADING, ISOLATED),
    ("Lost, unexplained, alone in it, twice", lost("SandboxLost"), GRADING_AGAIN, FAIL, None),
    ("`Shared`: the agent's sandbox was lost, once", lost("SandboxLost"), IN_PLACE, AGAIN_ATTEMPT, ISOLATED),
    ("`Shared`: a destination listed for the verifier is away", lost("Unreachable"), IN_PLACE, AGAIN_ATTEMPT, None),
    ("`Shared`: the workspace was used up", WorkspaceLimit("Disk", "m"), IN_PLACE, FAIL, None),
    # The run
    ("Storage refuses, or stays away", StorageUnavailable("m"), SEALING, END, None),
    ("Another runner has taken over", Fenced("m"), SHARED, END, None),
    ("Another runner has taken the attempt's records over", Superseded("m"), SEALING, END, None),
    ("A recorded object is damaged", RecordCorrupt("k", "m"), STARTING, END, None),
    ("The run is stopped", asyncio.CancelledError(), SHARED, END, None),
    ("Anything else, while the agent works", KeyError("x"), SHARED, AGAIN_ATTEMPT, None),
    ("Anything else, while it is graded", KeyError("x"), GRADING, AGAIN_GRADING, None),
]  # fmt: skip


def rendered() -> str:
    """Return the table as in docs/attribution.md."""
    lines = ["| while | what happened | what follows |", "| --- | --- | --- |"]
    for what, _, situation, action, note in TABLE:
        more = f" ({note})" if note else ""
        lines.append(f"| {situation.phase} | {what} | {action}{more} |")
    return "\n".join(lines)


@pytest.mark.parametrize("row", TABLE, ids=[f"{row[2].phase}: {row[0]}" for row in TABLE])
def test_attribution_follows_the_table(
    row: tuple[str, BaseException, Situation, Action, StopReason | str | None],
) -> None:
    _, error, situation, action, note = row
    decision = attribute(error, situation)
    assert decision.action is action
    assert decision.stop_reason == (note if isinstance(note, StopReason) else None)
    assert (decision.unexplained is Unexplained.SANDBOX) == (note == ISOLATED)
    assert (decision.unexplained in (Unexplained.REQUEST, Unexplained.ACTION)) == (note == NOTED)
    if action in (AGAIN_ATTEMPT, AGAIN_GRADING):
        assert decision.counted == (note not in (FREE, ISOLATED, NOTED))


def test_docs_show_the_same_table() -> None:
    assert rendered() in PAGE.read_text(), f"docs/attribution.md lacks this table:\n\n{rendered()}\n"


REASONS = [
    "SandboxLost",
    "WorkspaceLost",
    "Crashed",
    "ExecutorFailed",
    "InternalError",
    "OOMKilled",
    "StorageExceeded",
    "Idle",
    "DeadlineExceeded",
    "DiskExhausted",
    "InodesExhausted",
    "ProcessesExhausted",
]
OUTSIDE = ["Evicted", "Preempted", "NodeLost", "PodDeleted", "SandboxDeleted", "Interrupted", "NoPlace", "DiskFull"]
situations = st.builds(
    Situation,
    phase=st.sampled_from(Phase),
    answered=st.booleans(),
    exposed=st.booleans(),
    alone=st.booleans(),
    losses_alone=st.integers(0, 5),
    requests_failed=st.integers(0, 5),
    actions_failed=st.integers(0, 5),
)
EXPOSED = [Phase.AGENT, Phase.COLLECTING, Phase.GRADING, Phase.GRADING_IN_PLACE]
TEXT = st.text(max_size=8)
policys = st.one_of(
    st.builds(WorkspaceLimit, TEXT, TEXT),
    st.builds(FileError, TEXT, TEXT),
    st.builds(LayerTooLarge, TEXT),
    st.builds(SetupFailed, TEXT),
    st.builds(lambda reason: SandboxFailure(reason, ""), st.sampled_from(REASONS)),
)
infrastructures = st.one_of(
    st.builds(lambda reason: lost(reason, was_unheld=True), st.sampled_from(REASONS + OUTSIDE)),
    st.builds(lambda reason: SandboxFailure(reason, ""), st.sampled_from(OUTSIDE)),
    st.builds(ModelError, st.sampled_from(["Unreachable", "ModelFailed"]), TEXT),
    st.builds(PluginFailed, TEXT),
    st.builds(NotReplayable, TEXT),
    st.builds(StorageError, TEXT),
    st.builds(ValueError, TEXT),
)


@given(st.lists(st.sampled_from(REASONS), min_size=8, max_size=8), st.sampled_from(EXPOSED), st.booleans())
def test_policy_that_keeps_destroying_its_sandbox_gets_a_failed_verdict(
    reasons: list[str], phase: Phase, begins_alone: bool
) -> None:
    """Whatever ends its sandboxes, no attempt is used up, and after a few losses there is a verdict."""
    alone, losses = begins_alone, 0
    for tries in itertools.count(1):
        decision = attribute(SandboxFailure(reasons[tries - 1], ""), Situation(phase, True, True, alone, losses))
        if decision.action is Action.FAIL:
            break
        assert decision.unexplained
        assert not decision.counted, "it would be masked once attempts.limit is used up"
        losses += alone
        alone = True
    assert tries <= UNEXPLAINED_LIMIT + (not begins_alone)


BY_WORDS = ["ServerError", "RateLimited", "Timeout", "Unreachable", "BadResponse", "Interrupted", "ModelFailed"]
failing = st.one_of(
    st.builds(lambda reason: at_request(ModelError, reason), st.sampled_from(BY_WORDS)),
    st.builds(lambda reason: at_request(ModelConfigError, reason), st.sampled_from(["KeyRefused", "ModelNotFound"])),
    st.builds(lambda reason: EnvironmentFailure(reason, ""), st.sampled_from(list(EnvironmentFault))),
)


@given(st.lists(failing, min_size=8, max_size=8))
def test_policy_whose_words_make_the_model_or_the_environment_fail_is_graded(errors: list[Exception]) -> None:
    """However they fail, no attempt is used up, and after a few failures the rollout is graded."""
    noted: list[Unexplained] = []
    for error in errors:
        situation = Situation(
            Phase.AGENT, True, True, False, 0, noted.count(Unexplained.REQUEST), noted.count(Unexplained.ACTION)
        )
        decision = attribute(error, situation)
        if decision.action is Action.COMPLETE:
            break
        assert decision.unexplained is not None
        assert not decision.counted, "it would be masked once attempts.limit is used up"
        noted.append(decision.unexplained)
    assert len(noted) <= 2 * (UNEXPLAINED_LIMIT - 1)


@given(policys, situations.filter(lambda s: s.exposed and s.phase in EXPOSED))
def test_policy_cannot_choose_to_be_masked_or_end_the_run(error: Exception, situation: Situation) -> None:
    decision = attribute(error, situation)
    if isinstance(error, SetupFailed) and situation.phase is not Phase.AGENT:
        return  # the setup of a grading workspace runs without anything of the policy
    assert decision.action in (Action.COMPLETE, Action.FAIL) or decision.unexplained


@given(infrastructures, situations)
def test_infrastructure_is_never_a_reward(error: Exception, situation: Situation) -> None:
    assert attribute(error, situation).action not in (Action.COMPLETE, Action.FAIL)


@given(policys, situations.filter(lambda s: not s.exposed and s.phase is not Phase.COLLECTING))
def test_failures_before_the_first_action_are_retried(error: Exception, situation: Situation) -> None:
    assert attribute(error, situation).action in (Action.RETRY_ATTEMPT, Action.RETRY_GRADING)


@pytest.mark.parametrize("status", [204, 402, 404, 410, 451])
def test_status_that_refuses_no_request_never_grades_what_was_begun(status: int) -> None:
    refused = final_refusal("http://model", status, "no credit left")
    assert attribute(refused, SHARED).action is Action.RETRY_ATTEMPT
    assert refused.reason in MAY_PASS
    assert attribute(final_refusal("http://model", 400, "logit_bias"), SHARED).action is Action.COMPLETE


@pytest.mark.parametrize(
    "words", ["Budget has been exceeded", "Your credit balance is too low", "maximum context length is 9"]
)
def test_server_that_refuses_everything_is_not_the_policys_fault(words: str) -> None:
    error = refusing_all(refusal(400, {"error": {"message": words}}) or final_refusal("http://model", 400, words))
    for situation in (SHARED, ALONE, AGAIN, ONCE_MORE):
        assert attribute(error, situation).action is Action.RETRY_ATTEMPT


def every_subclass(of: type[BaseException]) -> list[type[BaseException]]:
    return [of, *(found for direct in of.__subclasses__() for found in every_subclass(direct))]


KINDS = [k for k in every_subclass(BaseException) if k.__module__.startswith(("builtins", "asyncio", "agent_runtime"))]


@given(st.sampled_from(KINDS), situations)
def test_every_error_gets_a_ruling(kind: type[BaseException], situation: Situation) -> None:
    error = kind("m", [ValueError("x")]) if issubclass(kind, BaseExceptionGroup) else kind.__new__(kind)
    for name, value in {"reason": "Word", "message": "m", "cause": "Memory", "error": ValueError("x")}.items():
        with contextlib.suppress(Exception):
            setattr(error, name, value)
    decision = attribute(error, situation)
    if not isinstance(error, Exception):
        assert decision.action is Action.END_RUN


class Wordless(Exception):
    """As jsonschema's errors of deeply nested answers."""

    def __str__(self) -> str:
        raise RecursionError


def test_agents_own_error_without_words_is_graded() -> None:
    decision = attribute(AgentRaised(Wordless()), Situation(Phase.AGENT))
    assert (decision.action, decision.stop_reason) == (Action.COMPLETE, ERROR)
    assert "Wordless" in decision.message


@given(st.builds(AgentRaised, st.one_of(policys, infrastructures)), situations)
def test_agents_own_errors_are_graded_and_have_a_traceback(error: AgentRaised, situation: Situation) -> None:
    decision = attribute(error, situation)
    assert (decision.action, decision.stop_reason) == (Action.COMPLETE, ERROR)
    assert decision.traceback
