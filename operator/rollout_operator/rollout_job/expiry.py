"""When a finished job is deleted."""

from datetime import datetime, timedelta


def seconds_left(ended: datetime | None, ttl_seconds: int, now: datetime) -> float | None:
    """Seconds until a job is to be deleted, at least 0; None when it is kept or has not ended."""
    if ended is None or ttl_seconds < 0:
        return None
    return max(0.0, (ended + timedelta(seconds=ttl_seconds) - now).total_seconds())
