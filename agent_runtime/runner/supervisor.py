"""PID 1 of a runner pod: starts the engine again when it dies, reaps what is orphaned, passes SIGTERM on.

A Job's own back-off, 10 s doubling to 10 min, would outlast the sandboxes; here the next engine starts at once and goes on
in the same ones. Standard library only, so that it is small and nothing in it can fail with the engine.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from agent_runtime.runner.exits import DECISIONS, Exit
from agent_runtime.runner.log import configure, leave_behind, log
from agent_runtime.runner.restart_policy import Deaths

PROGRESS_FD = "ROLLOUT_PROGRESS_FD"
"""Variable with the number of a pipe into which the engine writes one byte for each seal."""
RESTARTS = "ROLLOUT_RESTARTS"
"""Variable with the number of engines that died in this container so far."""
SINCE = "ROLLOUT_SINCE"
"""Variable with the time of the first engine's start in this container, in seconds of time.monotonic()."""

_STOP = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_STOP, signal.SIGCHLD)


def supervise(command: Sequence[str]) -> int:
    """Run the engine until it ends by its own decision, is asked to stop, or dies too often: this process's exit code."""
    configure(os.environ)
    # Blocked, and taken one by one from here on: no handler, so no race.
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
                leave_behind(
                    f"the engine {_how(code)}; it died {deaths.in_a_row} times in a row without sealing a rollout. "
                    "Its own messages stand above this line of the log"
                )
                return Exit.CRASHED
            log.warning(
                f"the engine {_how(code)}; it is started again and goes on where it was",
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
        # What its tools left running would go on beside those of the next engine.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine, signal.SIGKILL)
        return code

    def _has_sealed(self) -> bool:
        try:
            return bool(os.read(self._progress, 65_536))
        except BlockingIOError:
            return False

    def _stopped_within(self, seconds: float) -> bool:
        """Wait; True when this process is asked to stop meanwhile."""
        end = time.monotonic() + seconds
        while True:
            # Python's stubs lack the None of a time-out that is over.
            taken: signal.struct_siginfo | None = signal.sigtimedwait(_SIGNALS, max(0.0, end - time.monotonic()))
            if taken is None:
                return False
            if taken.si_signo in _STOP:
                return True
            _reap(None)


def _reap(engine: int | None) -> int | None:
    """Take the exit codes of all children that have ended; the engine's, negative for a signal, or None."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == engine:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _how(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL: out of memory, if nobody did it)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"crashed with exit code {code}"
