"""A terminal that stays open between calls, like tmux: keys go in, the screen comes out.

It is a shell on a pseudo-terminal in the workspace. The executor keeps it, so it outlives the runner.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

try:
    import pyte
except ImportError:
    raise ImportError("the terminal tool needs pyte: pip install 'agent-rollouts[terminal]'") from None

from agent_runtime.sandboxes.base import FileError
from agent_runtime.tools.base import FunctionTool, ToolContext, ToolError, ToolProcesses, ToolResult, live_processes

ROWS, COLUMNS = 40, 120
LABEL = "terminal"
REPLAYED_BYTES = 64 << 10
"""Bytes of output from which the screen is restored for each call: some twenty full screens."""
START_SECONDS = 5.0
"""Time limit for the shell's first prompt, before anything is typed."""
INPUT_SECONDS = 10.0
"""Time limit for typed input to be accepted. A program of the policy may not read its input, which must not count as a
lost sandbox.
"""
SETTLE_SECONDS = 0.05
"""Time after a prompt for further output."""
END_SECONDS = 2.0
"""Time limit for the end of a shell whose last output was read."""
PROMPT = "\x1b]133;A\x07"
"""Invisible marker that a shell prints before its prompt (FinalTerm's semantic prompts, OSC 133)."""
ENVIRONMENT = {
    "TERM": "xterm-256color",
    # PROMPT_COMMAND is for bash, PS1 for other POSIX shells.
    "PROMPT_COMMAND": r"printf '\033]133;A\007'",
    "PS1": f"{PROMPT}$ ",
}
SHELL = "if command -v bash >/dev/null; then exec bash -i; else exec sh -i; fi"

_KEYS = {
    "Enter": "\r", "Tab": "\t", "Escape": "\x1b", "Space": " ", "BSpace": "\x7f", "Delete": "\x1b[3~",
    "Up": "\x1b[A", "Down": "\x1b[B", "Right": "\x1b[C", "Left": "\x1b[D", "Home": "\x1b[H", "End": "\x1b[F",
    "PageUp": "\x1b[5~", "PageDown": "\x1b[6~",
}  # fmt: skip
"""tmux's names of keys, and the bytes that a terminal sends for each."""
_CONTROL = re.compile(r"C-([a-z@\[\\\]^_])", re.IGNORECASE)
_ESCAPES = re.compile(r"\x1b(\][^\x07\x1b]*(\x07|\x1b\\)?|\[[0-?]*[ -/]*[@-~]?|[()#][0-9A-Za-z]|.)", re.DOTALL)


def typed(text: str, keys: Sequence[str]) -> str:
    """Return the bytes that a terminal sends for a text and the keys after it. Raises ToolError for an unknown key."""
    return text.replace("\n", "\r") + "".join(map(_sent, keys))


def _sent(key: str) -> str:
    if (control := _CONTROL.fullmatch(key)) is not None:
        return chr(ord(control[1].upper()) & 0x1F)
    if key.startswith("M-") and len(key) > 2:
        return "\x1b" + _sent(key[2:])
    if key in _KEYS:
        return _KEYS[key]
    if len(key) == 1:
        return key
    raise ToolError(
        f"There is no key named {key!r}. Keys are {', '.join(_KEYS)}, C-c (Control), M-x (Alt), or one letter."
    )


def screen_of(output: bytes) -> str:
    """Return the screen of a terminal after this output, without empty lines at its end."""
    text = output.decode(errors="replace")
    screen = pyte.Screen(COLUMNS, ROWS)
    try:
        pyte.Stream(screen).feed(text)
        lines = [line.rstrip() for line in screen.display]
    except Exception:  # noqa: BLE001 - the emulator may fail for sequences of a program
        lines = _ESCAPES.sub("", text).replace("\r", "").split("\n")[-ROWS:]
    return "\n".join(lines).rstrip("\n")


@FunctionTool
async def terminal(
    context: ToolContext,
    text: Annotated[str, "Typed as it stands; a line break is Enter."] = "",
    keys: Annotated[
        list[str],
        Field(max_length=100, description="Pressed after it, by tmux's names: Enter, C-c, Escape, Up, Tab, …"),
    ] = [],  # noqa: B006 - the schema's default; never changed
    wait: Annotated[
        float, Field(ge=0, description="Seconds to wait for the shell's next prompt before the screen is shown.")
    ] = 5.0,
) -> ToolResult:
    """Type into a terminal and see its screen. It stays open: the working directory, variables and running programs are as
    you left them. With neither text nor keys it only shows the screen."""
    processes = live_processes(context.workspace)
    terminal = await _find(processes)
    status = await processes.process(terminal)
    if status is None:
        raise ToolError("The terminal has ended. Call it again for a new one.")
    keystrokes = typed(text, keys).encode(errors="replace")
    if keystrokes:
        try:
            async with asyncio.timeout(INPUT_SECONDS):
                await processes.write_input(terminal, status.input_bytes, keystrokes)
        except TimeoutError:
            raise ToolError("The program in the terminal does not read its input; only a part was accepted.") from None
        except FileError:
            raise ToolError("The shell of this terminal has ended. Call it again for a new one.") from None
    seconds = min(wait, context.task.timeouts.command_seconds, context.seconds_left)
    is_over = await _until_prompt(processes, terminal, status.output_bytes, seconds if keystrokes else 0.0)
    now = await processes.process_now(terminal)
    until = time.monotonic() + END_SECONDS
    while is_over and now is not None and now.running and time.monotonic() < until:
        await asyncio.sleep(SETTLE_SECONDS)
        now = await processes.process_now(terminal)
    said = now.output_bytes if now else status.output_bytes
    seen = await processes.read_output(terminal, max(0, said - REPLAYED_BYTES), wait_seconds=0)
    screen = await asyncio.to_thread(screen_of, seen.data)
    ended = now is None or not now.running
    note = "\n[the shell has ended; the next call opens a new terminal]" if ended else ""
    return ToolResult(f"{screen or '[the screen is empty]'}{note}", data={"ended": ended})


async def _find(processes: ToolProcesses) -> str:
    found = [process for process, running in await processes.processes() if running and process.endswith(f"-{LABEL}")]
    if found:
        return found[-1]
    try:
        terminal = await processes.start_process(SHELL, label=LABEL, env=ENVIRONMENT, terminal=(ROWS, COLUMNS))
    except FileError as error:
        raise ToolError(f"A shell could not be started: {error.message}") from None
    await _until_prompt(processes, terminal, 0, START_SECONDS)
    return terminal


async def _until_prompt(processes: ToolProcesses, terminal: str, cursor: int, seconds: float) -> bool:
    """Wait until the shell shows a prompt after the cursor, closes its output (then return True), or the time is over."""
    until, tail = time.monotonic() + seconds, b""
    while (left := until - time.monotonic()) > 0:
        piece = await processes.read_output(terminal, cursor, wait_seconds=left)
        cursor = piece.next
        if PROMPT.encode() in tail + piece.data:
            await asyncio.sleep(SETTLE_SECONDS)
            return False
        tail = piece.data[-len(PROMPT) :]
        if piece.ended:
            return True
    return False
