"""Times of records."""

import time

# CLOCK_BOOTTIME includes time in which the machine was suspended, and exists on Linux only.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEHIND = time.time() - time.clock_gettime(_CLOCK)


def unix_time() -> float:
    """Return Unix seconds. Setting the system's clock does not change them while this process lives, so that their
    differences are durations.
    """
    return time.clock_gettime(_CLOCK) + _BEHIND
