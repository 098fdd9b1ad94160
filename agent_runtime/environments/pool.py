"""Processes for environments, separate from the engine, so that an environment cannot block the engine's event loop. A
process serves many episodes, one call after another. If a call exceeds its time limit, the process is ended. Its other
episodes are restarted in another process, and their actions are repeated.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.environments.host import (
    NOT_LISTED,
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
from agent_runtime.tools.base import ToolWorkspace
from rollout_api.environments import BUILT_IN, TaskEnvironment
from rollout_api.tasks import Timeouts

MOST_PROCESSES = 4
"""A step takes microseconds, so one core serves thousands of rollouts. More processes only isolate slow resets."""
ANSWER_BYTES = 64 * 1024 * 1024
"""Longest answer: all moves of an episode, after a process was lost."""
# The variables that a process needs to find its modules and libraries. Others, such as credentials, are not passed.
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "VIRTUAL_ENV")


class _ProcessLost(Exception):
    """The process ended before it handled this call."""


class _Hung(Exception):
    """The call's own time limit was exceeded."""


@dataclass
class _Call:
    seconds: float
    answered: asyncio.Future[bytes]


@dataclass
class _Process:
    """One process and its unanswered calls, oldest first. The time limit of the first one is running."""

    process: asyncio.subprocess.Process
    calls: deque[_Call] = field(default_factory=deque)
    episodes: set[int] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    reading: asyncio.Task[None] | None = None
    alive: bool = True

    @classmethod
    async def start(cls) -> "_Process":
        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        started = cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agent_runtime.environments.hosted.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**variables, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                limit=ANSWER_BYTES,
                # Ctrl-C must only reach the engine, which ends these processes.
                start_new_session=True,
            )
        )
        started.reading = asyncio.create_task(started._read())
        return started

    async def ask(self, request: dict[str, Any], seconds: float) -> bytes:
        """Return the answer line. Raises _Hung and _ProcessLost."""
        if not self.alive:
            raise _ProcessLost
        call = _Call(seconds, asyncio.get_running_loop().create_future())
        self.calls.append(call)
        if len(self.calls) == 1:
            self._watch()
        self.tell(request)
        return await call.answered

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message without an answer."""
        assert self.process.stdin is not None
        if self.alive:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def end(self, first: Exception) -> None:
        """Kill the process. Its current call raises `first`, and calls that wait for it raise _ProcessLost."""
        self.alive = False
        if self.timer is not None:
            self.timer.cancel()
        if self.process.returncode is None:
            self.process.kill()
        for call in self.calls:
            if not call.answered.done():
                call.answered.set_exception(first)
            first = _ProcessLost()
        self.calls.clear()

    async def wait(self) -> None:
        await self.process.wait()
        if self.reading is not None:
            await self.reading

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if not self.calls:
                break
            call = self.calls.popleft()
            if self.timer is not None:
                self.timer.cancel()
            if self.calls:
                self._watch()
            if not call.answered.done():
                call.answered.set_result(line)
        if self.alive:
            code = await self.process.wait()
            how = f"signal {-code}" if code < 0 else f"code {code}"
            self.end(EnvironmentFailure(EnvironmentFault.DIED, f"the environment's process ended with {how}"))

    def _watch(self) -> None:
        self.timer = asyncio.get_running_loop().call_later(self.calls[0].seconds, lambda: self.end(_Hung()))


class EnvironmentPool:
    """The processes of one run, started when the first episodes need them. `named` are the ids of environments that the
    job's author names. Their code runs with the runner's files and network, so a data set of others may name built-in ones
    only.
    """

    def __init__(self, named: Collection[str] = (), most: int | None = None) -> None:
        self._named = {*BUILT_IN, *named}
        self._most = most or min(MOST_PROCESSES, os.cpu_count() or 1)
        self._processes: list[_Process] = []
        self._starting = asyncio.Lock()
        self._places_alone = asyncio.Semaphore(self._most)
        self.tried: set[str] = set()
        """Kinds of environments (`kind_of`) for which a step has succeeded in a trial, here or in a sandbox."""
        self._episodes = 0

    def episode(self, environment: TaskEnvironment, timeouts: Timeouts) -> "PoolEpisode":
        """Return a new episode. Raises EnvironmentFailure for an environment that only a data set names."""
        if environment.id not in self._named:
            raise EnvironmentFailure(
                NOT_LISTED,
                f"environment {environment.id} would run beside the engine, with its files and network, and the manifest "
                "does not name it; list it in tasks.runnerEnvironments if you trust it, or set its runIn to Sandbox",
            )
        self._episodes += 1
        return PoolEpisode(self, self._episodes, environment, timeouts)

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[_Process]:
        """Yield a process for a single episode. The process is ended after the block."""
        async with self._places_alone:
            process = await _Process.start()
            try:
                yield process
            finally:
                process.end(_ProcessLost())
                await process.wait()

    async def place(self, number: int) -> _Process:
        """Return the process for an episode: a new one if allowed, else the one with the fewest episodes."""
        async with self._starting:
            self._processes = [process for process in self._processes if process.alive]
            if len(self._processes) < self._most and all(process.episodes for process in self._processes):
                self._processes.append(await _Process.start())
            chosen = min(self._processes, key=lambda process: len(process.episodes))
            chosen.episodes.add(number)
            return chosen

    async def close(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.end(_ProcessLost())
        await asyncio.gather(*(process.wait() for process in processes))


class PoolEpisode:
    """One episode in a process of the pool. Implements EnvironmentHost.

    If a call fails, other episodes of the process may be the cause, such as by the memory that they hold. So the episode is
    repeated in a process without others. Only a failure there counts. If it also fails at a trial step without the policy's
    actions, such as when a service that it calls is away, the failure has `failed_trial`.
    """

    def __init__(self, pool: EnvironmentPool, number: int, environment: TaskEnvironment, timeouts: Timeouts) -> None:
        self._pool, self._number, self._environment, self._timeouts = pool, number, environment, timeouts
        self._process: _Process | None = None

    async def start(self, past: Sequence[Action]) -> tuple[Beginning, list[Move]]:
        try:
            return await self._start_among_others(past)
        except EnvironmentFailure as failure:
            if failure.reason not in frozenset(EnvironmentFault):
                raise
            return await self._start_alone(past)

    async def try_step(self) -> None:
        """Start an episode in a new process, and take any action. Raises EnvironmentFailure if either fails."""
        request = {"start": described(self._environment), "actions": [], "try": True}
        seconds = self._timeouts.setup_seconds + self._timeouts.command_seconds
        async with self._alone():
            beginning(await self._ask(request, seconds), self._environment)

    async def take(self, past: Sequence[Action], action: Action, workspace: ToolWorkspace) -> list[Move]:
        try:
            with contextlib.suppress(_ProcessLost):
                return [await self._step(action)]
            _, repeated = await self._start_among_others([*past, action])
        except EnvironmentFailure:
            try:
                _, repeated = await self._start_alone([*past, action])
            except EnvironmentFailure as failure:
                await self._require_trial(failure)
                raise
        return repeated

    def close(self) -> None:
        if self._process is not None:
            self._process.episodes.discard(self._number)
            self._process.tell({"episode": self._number})

    async def _start_among_others(self, past: Sequence[Action]) -> tuple[Beginning, list[Move]]:
        while True:
            self._process = await self._pool.place(self._number)
            with contextlib.suppress(_ProcessLost):  # by another episode's call
                return await self._begin(past)

    async def _start_alone(self, past: Sequence[Action]) -> tuple[Beginning, list[Move]]:
        """Return the same. The next action begins the episode again, among others."""
        self.close()
        async with self._alone():
            return await self._begin(past)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        async with self._pool.alone() as self._process:
            try:
                yield
            except _ProcessLost:  # it ended between two calls
                raise EnvironmentFailure(EnvironmentFault.DIED, "the environment's process was ended") from None

    async def _require_trial(self, failure: EnvironmentFailure) -> None:
        """Raise the failure with `failed_trial` if a step fails without the policy's actions too."""
        try:
            await self.try_step()
        except EnvironmentFailure as trial:
            message = f"{failure.message}; a trial step without the policy's actions failed too: {trial.message}"
            failed = EnvironmentFailure(failure.reason, message)
            failed.failed_trial = True
            raise failed from trial

    async def _begin(self, past: Sequence[Action]) -> tuple[Beginning, list[Move]]:
        request = {"start": described(self._environment), "actions": []}
        reply = await self._ask(request, self._timeouts.setup_seconds)
        return beginning(reply, self._environment), [await self._step(action) for action in past]

    async def _step(self, action: Action) -> Move:
        [move] = moves(await self._ask({"actions": [action]}, self._timeouts.command_seconds), at_most=1)
        return move

    async def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._process is None:
            raise _ProcessLost
        name = self._environment.id
        try:
            line = await self._process.ask({"episode": self._number, **request}, seconds)
        except _Hung:
            raise EnvironmentFailure(
                EnvironmentFault.HUNG, f"{name} did not answer within {seconds:g} s; see timeouts.commandSeconds"
            ) from None
        except EnvironmentFailure as died:
            raise EnvironmentFailure(died.reason, f"{name}: {died.message}") from None
        return checked_reply(line, name)
