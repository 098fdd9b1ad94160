"""Rules for program agents: how their command is formed, and how their end is interpreted."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent_runtime.agents.program import PROMPT_FILE
from agent_runtime.models.base import PROCESS_STOPPED, STORAGE_SILENT, ContextExceeded, ConversationRefused, ModelError
from agent_runtime.proxy.history import failed_calls, given_up
from agent_runtime.proxy.limits import Exhausted
from agent_runtime.sandboxes.base import INTERRUPTED, CommandResult, ProgramFailed, SandboxFailure
from rollout_api.records import DeliveryRecord, IntentRecord, Record, StopReason

LONGEST_ARGUMENT = 131_071
"""Bytes of the longest argument in Linux (MAX_ARG_STRLEN, 32 pages, with the terminating zero)."""
CALLS_A_TURN = 10
"""Calls for each turn of `maxTurns`. The packages of OpenAI and Anthropic make up to three attempts, and some agents
retry these. The limit keeps a program that retries forever from filling the journal.
"""


def refuse_long_arguments(arguments: Sequence[str]) -> None:
    """Raise SandboxFailure for an argument that Linux does not accept."""
    for position, argument in enumerate(arguments):
        if (size := len(argument.encode(errors="replace"))) > LONGEST_ARGUMENT:
            raise SandboxFailure(
                "AgentNotStarted",
                f"agent.command[{position}] has {size} bytes with its fields replaced; the longest argument has "
                f"{LONGEST_ARGUMENT}; give the prompt as {PROMPT_FILE}",
            )


def is_cut(recorded: Sequence[Record], now: Sequence[Record]) -> bool:
    """Whether an earlier runner's death may have cut off a call, and no record shows that the program retried it.
    `recorded` are the records of earlier runners, `now` all records of the attempt. Calls of the program's other
    workers do not count as retries.
    """
    told = {record.turn for record in recorded if isinstance(record, DeliveryRecord)}
    open_calls = {call.turn for call in calls_in(recorded)} - told
    return bool(given_up(open_calls, calls_in(now)))


def delayed_calls(records: Sequence[Record]) -> dict[int, ModelError]:
    """Return the calls that the program gave up because a runner kept them waiting, by turn."""
    reasons = (PROCESS_STOPPED, STORAGE_SILENT)
    return {turn: error for turn, error in failed_calls(records).items() if error.reason in reasons}


def calls_in(records: Sequence[Record]) -> list[IntentRecord]:
    return [record for record in records if isinstance(record, IntentRecord)]


@dataclass(frozen=True)
class Ended:
    """A program that has ended, and the results of its calls."""

    result: CommandResult
    over: Exhausted | None = None
    """The limit that it reached."""
    failure: ModelError | ConversationRefused | None = None
    """Why the model did not answer its latest call; or another call that it gave up, if the program failed."""
    refusal: ModelError | ConversationRefused | None = None
    """Why the model refused its latest call."""
    failed: ProgramFailed | None = None
    """Its failure in another system, which only calls that it closed itself explain."""
    cut: bool = False
    """A runner died during a call, so that the answer may be incomplete; or a call arrived while there was no runner."""


def stop_of(ended: Ended) -> tuple[StopReason, str]:
    """Return why the rollout has stopped, with a message. Raises an error if infrastructure is the cause."""
    result = ended.result
    output = result.end_of_output
    if result.ok and ended.failure is None:  # some agents exit with 0 after their last call failed
        return StopReason.FINISHED, output
    if result.cause == "NotStarted":
        raise SandboxFailure("AgentNotStarted", f"agent.command cannot be started: {output}")
    if result.cause == "Signal":
        # Only runners kill with that cause, at a limit. An earlier runner did it, and died before it recorded the
        # reason.
        over = ended.over or Exhausted(
            StopReason.AGENT_TIMEOUT, "an earlier runner ended the agent: its time had run out"
        )
        return over.reason, over.message
    if ended.failure is not None:
        raise ended.failure
    if ended.cut:
        raise SandboxFailure(
            INTERRUPTED, f"the runner ended, and the agent gave up a call that had no runner: {output}"
        )
    if ended.over is not None:
        return ended.over.reason, ended.over.message
    if isinstance(ended.refusal, ConversationRefused):
        is_long = isinstance(ended.refusal, ContextExceeded)
        reason = StopReason.CONTEXT_EXCEEDED if is_long else StopReason.CONTENT_FILTER
        return reason, f"the model refused the agent's last call: {output}"
    return StopReason.AGENT_ERROR, f"the agent ended with {result.ending}: {output}"
