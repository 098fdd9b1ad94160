"""Times of records."""

import time

# It goes on while the machine is suspended; only Linux has it.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEHIND = time.time() - time.clock_gettime(_CLOCK)


def unix_time() -> float:
    """Return Unix seconds. Setting the system's clock does not change them while this process lives, so that their
    differences are durations.
    """
    return time.clock_gettime(_CLOCK) + _BEHIND
