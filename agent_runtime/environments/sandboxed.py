"""An untrusted environment in the rollout's own workspace: one command for each step."""

import io
import json
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agent_runtime.environments import hosted
from agent_runtime.environments.host import (
    Action,
    Beginning,
    EnvironmentFailure,
    EnvironmentFault,
    Move,
    beginning,
    checked_reply,
    described,
    moves,
)
from agent_runtime.sandboxes.base import CommandResult, FileError, SandboxFailure, Workspace
from agent_runtime.tools.base import ToolWorkspace
from rollout_api.environments import TaskEnvironment
from rollout_api.tasks import Timeouts

FOLDER = ".agent-rollouts"
PROGRAM = f"{FOLDER}/environment.zip"
REPLY_BYTES = 1 << 20  # the executor's limit for one output
LONGEST_SECONDS = 604_800
"""A week: the limit of every time in a manifest."""
START_TURN = 500_000
"""Turn in the keys of an episode's start. It is above all agent turns, so these keys are never acknowledged. Each epoch
has its own turn.
"""
_MAIN = "from agent_runtime.environments.hosted.sandboxed import main\nmain()\n"


@cache
def program() -> bytes:
    """Return the program that runs in the sandbox: the folder `hosted` as a zip that Python runs."""
    folder = Path(hosted.__path__[0])
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", _MAIN)
        for package in ("agent_runtime", "agent_runtime/environments"):
            archive.writestr(f"{package}/__init__.py", "")
        for path in sorted(folder.glob("*.py")):
            archive.writestr(f"agent_runtime/environments/hosted/{path.name}", path.read_text(encoding="utf-8"))
    return data.getvalue()


class SandboxedEpisode:
    """One episode in a workspace. Implements EnvironmentHost. With `trial`, a step is tried in another episode first."""

    def __init__(
        self, environment: TaskEnvironment, timeouts: Timeouts, workspace: Workspace, epoch: int, *, trial: bool
    ) -> None:
        self._environment, self._timeouts, self._workspace = environment, timeouts, workspace
        self._trial = trial
        self._key = f"{START_TURN + epoch}:environment"

    async def start(self, past: Sequence[Action]) -> tuple[Beginning, list[Move]]:
        try:
            # Do not replace an existing program, whose modules the episode's process may be reading.
            if await self._workspace.stat(PROGRAM) is None:
                await self._workspace.write(PROGRAM, program(), key=f"{self._key}-program")
        except FileError as error:
            raise EnvironmentFailure(
                EnvironmentFault.FAILED, f"{PROGRAM} cannot be written: {error.message}"
            ) from error
        seconds = min(self._timeouts.setup_seconds + self._timeouts.command_seconds * len(past), LONGEST_SECONDS)
        result = await self._workspace.run(
            ["python3", PROGRAM],
            key=f"{self._key}-start",
            deadline_seconds=seconds,
            stdin=self._request(past, trial=self._trial),
            head_bytes=REPLY_BYTES,
        )
        reply = self._reply(result, seconds)
        return beginning(reply, self._environment), moves(reply, at_most=len(past)) if past else []

    async def take(self, past: Sequence[Action], action: Action, workspace: ToolWorkspace) -> list[Move]:
        result = await workspace.run(["python3", PROGRAM], stdin=self._request([*past, action]), head_bytes=REPLY_BYTES)
        if result.start_error:  # an earlier command started, so the environment is not the cause
            raise SandboxFailure(
                "ExecutorFailed", f"a step of {self._environment.id} cannot be started: {result.start_error}"
            )
        return moves(self._reply(result, self._timeouts.command_seconds), at_most=len(past) + 1)

    def close(self) -> None:
        """Do nothing: the episode ends with its workspace."""

    def _request(self, actions: Sequence[Action], *, trial: bool = False) -> bytes:
        return json.dumps({"start": described(self._environment), "actions": list(actions), "try": trial}).encode()

    def _reply(self, result: CommandResult, seconds: float) -> dict[str, Any]:
        name = self._environment.id
        if result.cause == "Deadline":
            raise EnvironmentFailure(
                EnvironmentFault.HUNG, f"{name} did not answer within {seconds:g} s; see its timeouts"
            )
        if not result.ok:
            said = (result.stderr or result.stdout).decode(errors="replace").strip()[-500:]
            raise EnvironmentFailure(
                EnvironmentFault.DIED,
                f"{name}: python3 {PROGRAM} in the sandbox ended with {result.cause or result.exit_code}: {said}; the "
                "image needs Python 3.10 or newer and the environment's dependencies",
            )
        return checked_reply(result.stdout, name)
