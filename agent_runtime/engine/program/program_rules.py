"""The agent that is a program: how it is called, and what its end means. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent_runtime.models.base import ModelError
from agent_runtime.proxy.limits import Exhausted
from agent_runtime.sandboxes.base import INTERRUPTED, CommandResult, SandboxFailure
from rollout_api.records import DeliveryRecord, IntentRecord, Record, StopReason

PROMPT_FILE = "{promptFile}"
_FIELD = re.compile(r"\{(prompt|promptFile|model)\}")

LONGEST_ARGUMENT = 131_071
"""Bytes: Linux takes no longer ones (MAX_ARG_STRLEN, 32 pages, with the zero at the end)."""
CALLS_A_TURN = 10
"""Calls for each turn of `maxTurns`. The packages of OpenAI and Anthropic try each three times, and some agents do so again
around them; a program that gives up call after call must not fill the journal for ever."""


def filled(command: Sequence[str], *, prompt: str, prompt_file: str, model: str) -> list[str]:
    """The command with its fields filled in, each once: what a prompt has in braces stays. Raises SandboxFailure."""
    values = {"prompt": prompt, "promptFile": prompt_file, "model": model}
    arguments = [_FIELD.sub(lambda found: values[found[1]], argument) for argument in command]
    for position, argument in enumerate(arguments):
        if (size := len(argument.encode(errors="replace"))) > LONGEST_ARGUMENT:
            raise SandboxFailure(
                "AgentNotStarted",
                f"agent.command[{position}] has {size} bytes with its fields filled in, and an argument can have "
                f"{LONGEST_ARGUMENT}; give the prompt as {PROMPT_FILE}",
            )
    return arguments


def is_cut(recorded: Sequence[Record], now: Sequence[Record]) -> bool:
    """Whether a call of an earlier runner may have broken off with it, and nothing shows that the program got over that.

    `recorded` is what earlier runners left, `now` all of the attempt. Calls of other workers of the program show nothing.
    """
    told = {record.turn for record in recorded if isinstance(record, DeliveryRecord)}
    open_calls = [record for record in recorded if isinstance(record, IntentRecord) and record.turn not in told]
    intents = [record for record in now if isinstance(record, IntentRecord)]
    return any(not any(_follows(later, call) for later in intents) for call in open_calls)


def _follows(later: IntentRecord, call: IntentRecord) -> bool:
    """Whether a later call shows that the caller of an earlier one continued.

    It repeats that request, continues its conversation, or continues what that one continued.
    """
    if later.turn <= call.turn:
        return False
    return (
        later.parent == call.turn
        or (later.parent is not None and later.parent == call.parent)
        or (later.request_digest is not None and later.request_digest == call.request_digest)
    )


@dataclass(frozen=True)
class Ended:
    """A program that has ended, and how its calls fared."""

    result: CommandResult
    over: Exhausted | None = None
    """The limit that it has reached."""
    failure: ModelError | None = None
    """Why the model did not answer its latest call."""
    refusal: StopReason | None = None
    """Why the model would not answer its latest call."""
    cut: bool = False
    """A runner has died that had a call of its, and the answer may have broken off."""


def stop_of(ended: Ended) -> tuple[StopReason, str]:
    """Why the rollout has stopped, with a message. Raises what makes it infrastructure's doing."""
    result = ended.result
    output = result.end_of_output
    if result.ok:
        return StopReason.FINISHED, output
    if result.cause == "NotStarted":
        raise SandboxFailure("AgentNotStarted", f"agent.command cannot be started: {output}")
    if result.cause == "Signal":
        # Only runners kill with that cause, at a limit; this one has not, so one before it did, and died before it said why.
        over = ended.over or Exhausted(
            StopReason.AGENT_TIMEOUT, "an earlier runner ended the agent: its time had run out"
        )
        return over.reason, over.message
    if ended.failure is not None:
        raise ended.failure
    if ended.cut:
        raise SandboxFailure(INTERRUPTED, f"its runner ended in the middle of a call, and the agent gave up: {output}")
    if ended.over is not None:
        return ended.over.reason, ended.over.message
    if ended.refusal is not None:
        return ended.refusal, f"the model would not answer the agent's last call: {output}"
    return StopReason.AGENT_ERROR, f"the agent ended with {result.ending}: {output}"
