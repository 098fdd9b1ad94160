"""Lets obstore's threads leave Python before the interpreter ends.

When an operation is complete, obstore's own thread calls a Python function, and must take the GIL again before it can
leave it. If the interpreter ends in between, CPython up to 3.13 ends that thread inside Rust code. The process then aborts
with SIGABRT, although its work is done (https://docs.python.org/3/c-api/init.html#c.PyGILState_Ensure).
"""

import sys
import threading
import time
from typing import Final

_PAUSE_SECONDS: Final = 0.002
"""Time in which a thread that waits for the GIL gets it."""

_LIMIT_SECONDS: Final = 2.0
"""A thread that takes longer is not obstore's: another extension may run Python code for ever."""


def leave_python() -> None:
    """Wait until only threads of the `threading` module run Python code. Looks twice, because the thread of a cancelled
    operation may enter Python after the first look.
    """
    end = time.monotonic() + _LIMIT_SECONDS
    quiet = 0
    while quiet < 2 and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        known = {thread.ident for thread in threading.enumerate()}
        quiet = 0 if sys._current_frames().keys() - known else quiet + 1
