"""When a failed model call is retried, and after how long. Pure."""

from email.utils import parsedate_to_datetime

# The statuses that the openai package retries (408, 409, 429, 5xx), and 425, which asks for a retry.
RETRIED_STATUSES = frozenset({408, 409, 425, 429})
FIRST_DELAY_SECONDS = 0.5  # the openai package's own first delay
LONGEST_DELAY_SECONDS = 30.0  # a server that restarts for minutes gets at least two requests a minute


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in RETRIED_STATUSES or status >= 500


def retry_after_seconds(header: str | None, now: float) -> float | None:
    """Return the seconds in a Retry-After header, a number or an HTTP date; None otherwise. `now` is Unix seconds."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None


def retry_delay(failures: int, retry_after: str | None, *, now: float, jitter: float) -> float:
    """Return the seconds before the next attempt after `failures` ≥ 1, at least the server's value; `jitter` in [0, 1)
    spreads it.
    """
    backoff = min(FIRST_DELAY_SECONDS * 2.0 ** min(failures - 1, 10), LONGEST_DELAY_SECONDS) * (0.5 + jitter / 2)
    asked = retry_after_seconds(retry_after, now)
    return backoff if asked is None else max(asked + jitter * FIRST_DELAY_SECONDS, backoff)
