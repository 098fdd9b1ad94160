"""Commands on this machine, with results like those of a workspace."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_runtime.sandboxes.base import CommandResult


async def run_here(
    command: str | Sequence[str],
    *,
    cwd: Path,
    deadline_seconds: float | None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    head_bytes: int = 65_536,
    tail_bytes: int = 65_536,
) -> CommandResult:
    """Run the command to its end, or kill it with all its processes at the deadline."""
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(["sh", "-c", command] if isinstance(command, str) else command),
        cwd=cwd,
        env=env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    reading = asyncio.ensure_future(process.communicate(stdin))
    done, _ = await asyncio.wait([reading], timeout=deadline_seconds)
    if not done:
        os.killpg(process.pid, signal.SIGKILL)
    out, err = await reading
    code = process.returncode
    assert code is not None
    omitted = max(0, len(out) - head_bytes - tail_bytes)
    return CommandResult(
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        cause=None if done else "Deadline",
        seconds=time.monotonic() - started,
        stdout=out[:head_bytes] + out[len(out) - tail_bytes :] if omitted else out,
        stderr=err,
        stdout_bytes=len(out),
        stderr_bytes=len(err),
        stdout_omitted=omitted,
        stdout_head=head_bytes if omitted else 0,
    )
