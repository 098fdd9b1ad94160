"""The agent that is a program: how it is called, and what its end means. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent_runtime.models.base import ModelError
from agent_runtime.proxy.limits import Exhausted
from agent_runtime.sandboxes.base import INTERRUPTED, CommandResult, SandboxFailure
from rollout_api.records import DeliveryRecord, IntentRecord, Record, ResponseRecord, StopReason

PROMPT_FILE = "{promptFile}"
_FIELD = re.compile(r"\{(prompt|promptFile|model)\}")

LONGEST_ARGUMENT = 131_071
"""Bytes: Linux takes no longer ones (MAX_ARG_STRLEN, 32 pages, with the zero at the end)."""
CALLS_A_TURN = 10
"""Calls for each turn of `maxTurns`. The packages of OpenAI and Anthropic try each three times, and some agents do so again
around them; a program that gives up call after call must not fill the journal for ever."""
SHOWN_OUTPUT = 2000
"""Characters of a program's output in the message of its end: the end is where the error is."""


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


def doubtful_turn(recorded: Sequence[Record]) -> int | None:
    """The latest call that earlier runners recorded, where nobody knows whether its answer has reached the program."""
    latest = max((record.turn for record in recorded if isinstance(record, IntentRecord)), default=None)
    told = {record.turn for record in recorded if isinstance(record, DeliveryRecord)}
    answered = {record.turn for record in recorded if isinstance(record, ResponseRecord)}
    return None if latest is None or (latest in told and latest in answered) else latest


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
    """The runner that had its latest call has died, and its answer may have broken off."""


def stop_of(ended: Ended) -> tuple[StopReason, str]:
    """Why the rollout has stopped, with a message. Raises what makes it infrastructure's doing."""
    result = ended.result
    output = (result.stdout + result.stderr).decode(errors="replace").strip()[-SHOWN_OUTPUT:]
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
        raise SandboxFailure(
            INTERRUPTED, f"its runner ended in the middle of its last call, and the agent gave up: {output}"
        )
    if ended.over is not None:
        return ended.over.reason, ended.over.message
    if ended.refusal is not None:
        return ended.refusal, f"the model would not answer the agent's last call: {output}"
    how = result.cause or (f"signal {result.signal}" if result.exit_code is None else f"exit code {result.exit_code}")
    return StopReason.AGENT_ERROR, f"the agent ended with {how}: {output}"
