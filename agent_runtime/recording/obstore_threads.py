"""Lets obstore's threads leave Python before the interpreter ends.

obstore completes an operation on a thread of its own, which calls into Python and needs the GIL once more to return. If
the interpreter ends first, CPython up to 3.13 ends that thread inside Rust code, and the process aborts with SIGABRT
after all its work was done (https://docs.python.org/3/c-api/init.html#c.PyGILState_Ensure).
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
    """Wait until only threads of the `threading` module run Python code, two times in a row: the thread of a cancelled
    operation may enter Python after the first."""
    end = time.monotonic() + _LIMIT_SECONDS
    quiet = 0
    while quiet < 2 and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        known = {thread.ident for thread in threading.enumerate()}
        quiet = 0 if sys._current_frames().keys() - known else quiet + 1
