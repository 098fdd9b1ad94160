"""When a failed model call is tried again, and after how long. Pure."""

from email.utils import parsedate_to_datetime

# What the openai package retries as well (408, 409, 429, 5xx), and 425, which asks for just that.
RETRIED_STATUSES = frozenset({408, 409, 425, 429})
FIRST_DELAY_SECONDS = 0.5  # the openai package's own first delay
LONGEST_DELAY_SECONDS = 30.0  # a server that restarts for minutes is asked twice a minute, not less


def is_transient(status: int) -> bool:
    """The same request may well succeed a little later."""
    return status in RETRIED_STATUSES or status >= 500


def retry_after_seconds(header: str | None, now: float) -> float | None:
    """Seconds that a Retry-After header asks for, by a number or an HTTP date; None otherwise. `now` is Unix seconds."""
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
    """Seconds before the next try after `failures` ≥ 1, at least what the server asked for; `jitter` in [0, 1) spreads."""
    backoff = min(FIRST_DELAY_SECONDS * 2.0 ** min(failures - 1, 10), LONGEST_DELAY_SECONDS) * (0.5 + jitter / 2)
    asked = retry_after_seconds(retry_after, now)
    return backoff if asked is None else max(asked + jitter * FIRST_DELAY_SECONDS, backoff)
