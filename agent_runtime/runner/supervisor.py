"""PID 1 of a runner pod: restarts the engine when it dies, reaps orphans, forwards SIGTERM.

A Job's back-off, 10 s doubling to 10 min, would be longer than the sandboxes' idle time. The supervisor starts the next
engine immediately, which continues in the same sandboxes. It uses only the standard library, so that it is small and
independent of the engine's dependencies.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from agent_runtime.runner.log import configure, log, write_termination_log


class Exit(IntEnum):
    """Only `REPORTED` completes the pod's index of the Job. After every other exit code Kubernetes starts another pod."""

    REPORTED = 0
    """The shard has its verdict, Completed or Aborted, which is in its RolloutShard."""
    CRASHED = 1
    """An unexpected error, or a death by signal: the supervisor restarts the engine."""
    BAD_START = 2
    """The pod lacks input from the operator: job, key, index."""
    BAD_JOB = 3
    """The job's spec cannot run; a shard that never worked reports Aborted."""
    STORAGE = 4
    """Object storage refuses, or was unavailable beyond the time limit; or the tasks cannot be read."""
    MODEL = 5
    """The model endpoint refuses, or is unreachable."""
    SANDBOXES = 6
    """No sandbox is available at all."""
    SUPERSEDED = 7
    """Another runner works on this shard."""
    UNREPORTED = 8
    """The shard has its verdict, but the API server refuses the report."""
    AGENT = 9
    """The agent's own code raises in every rollout."""
    CANCELLED = 10
    """The RolloutJob was deleted."""
    DRAINED = 11
    """Asked to stop: running work is journaled, and the next pod resumes it."""


DECISIONS = frozenset(Exit) - {Exit.CRASHED}
"""Exit codes that the engine chose. An immediate restart would have the same result."""


DEATHS_IN_A_ROW = 10
"""Consecutive deaths without a new seal after which the pod fails, so that people and alerts notice."""
QUICK_SECONDS = 10.0
"""An engine that dies sooner than this died during its start: opening storage, sandboxes and journals takes a few
seconds.
"""
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0
"""Longest pause before a restart. Ten deaths then take half a minute, enough for transient problems such as an
unresolved name.
"""


@dataclass(frozen=True)
class Deaths:
    """Deaths of the engine since its last progress, and how many of the latest were quick."""

    in_a_row: int = 0
    quick: int = 0

    def another(self, *, lived_seconds: float, progress: bool) -> "Deaths":
        """Return the state after one more death. `progress`: that engine sealed something before it died."""
        before = Deaths() if progress else self
        quick = before.quick + 1 if lived_seconds < QUICK_SECONDS else 0
        return Deaths(before.in_a_row + 1, quick)

    @property
    def too_many(self) -> bool:
        """Whether to give up, because restarts do not help."""
        return self.in_a_row >= DEATHS_IN_A_ROW

    @property
    def pause_seconds(self) -> float:
        """Return the pause before the next start. A single death needs none."""
        if self.quick < 2:
            return 0.0
        return float(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (self.quick - 2)))


PROGRESS_FD = "ROLLOUT_PROGRESS_FD"
"""Variable with the number of a pipe into which the engine writes one byte for each seal."""
RESTARTS = "ROLLOUT_RESTARTS"
"""Variable with the number of engines that died in this container so far."""
SINCE = "ROLLOUT_SINCE"
"""Variable with the time of the first engine's start in this container, in seconds of time.monotonic()."""

_STOP = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_STOP, signal.SIGCHLD)


def supervise(command: Sequence[str]) -> int:
    """Run the engine until it ends by its own decision, is asked to stop, or dies too often; return this process's exit
    code.
    """
    configure(os.environ)
    # Block the signals and take them with sigtimedwait, which avoids races with handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    return _Supervisor(command).run()


class _Supervisor:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._progress, self._progress_end = os.pipe()
        for end in (self._progress, self._progress_end):
            os.set_blocking(end, False)
        os.set_inheritable(self._progress_end, True)
        self._stopping = False
        self._since = time.monotonic()
        self._restarts = 0

    def run(self) -> int:
        deaths = Deaths()
        while True:
            started = time.monotonic()
            code = self._run_engine()
            if code in DECISIONS:
                return code
            if self._stopping:
                return Exit.DRAINED
            deaths = deaths.another(lived_seconds=time.monotonic() - started, progress=self._has_sealed())
            if deaths.too_many:
                write_termination_log(
                    f"the engine {_how(code)}; it died {deaths.in_a_row} times in a row without sealing a rollout. "
                    "Its own messages precede this line in the log"
                )
                return Exit.CRASHED
            log.warning(
                f"the engine {_how(code)}; it is restarted and resumes",
                extra={"fields": {"deathsInARow": deaths.in_a_row, "pauseSeconds": deaths.pause_seconds}},
            )
            self._restarts += 1
            if self._stopped_within(deaths.pause_seconds):
                return Exit.DRAINED

    def _run_engine(self) -> int:
        environ = {
            **os.environ,
            PROGRESS_FD: str(self._progress_end),
            RESTARTS: str(self._restarts),
            SINCE: str(self._since),
        }
        engine = os.posix_spawn(
            self._command[0], self._command, environ, setpgroup=0, setsigmask=(), setsigdef=(signal.SIGPIPE,)
        )
        code = None
        while code is None:
            if signal.sigwait(_SIGNALS) in _STOP:
                self._stopping = True
                os.kill(engine, signal.SIGTERM)
            else:
                code = _reap(engine)
        # End the processes that its tools left, before the next engine starts.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine, signal.SIGKILL)
        return code

    def _has_sealed(self) -> bool:
        try:
            return bool(os.read(self._progress, 65_536))
        except BlockingIOError:
            return False

    def _stopped_within(self, seconds: float) -> bool:
        """Wait; return True if this process gets a stop signal during the wait."""
        end = time.monotonic() + seconds
        while True:
            # Python's stubs omit the None of an expired time-out.
            taken: signal.struct_siginfo | None = signal.sigtimedwait(_SIGNALS, max(0.0, end - time.monotonic()))
            if taken is None:
                return False
            if taken.si_signo in _STOP:
                return True
            _reap(None)


def _reap(engine: int | None) -> int | None:
    """Collect the exit codes of all ended children; return the engine's, negative for a signal, or None."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == engine:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _how(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL, probably out of memory)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"crashed with exit code {code}"
