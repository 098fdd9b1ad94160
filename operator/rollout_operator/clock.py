"""The API server's clock. Deadlines count from times in objects, which use this clock and not the local one."""

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

_ahead = timedelta()
"""Lower bound of how far the local clock is ahead of the API server's."""


def now() -> datetime:
    return datetime.now(UTC) - _ahead


def learn_from(date: str | None, asked: datetime) -> None:
    """Update the offset from the `Date` header (whole seconds) of a response to a request sent at local time `asked`."""
    global _ahead
    try:
        earliest = parsedate_to_datetime(date or "").replace(tzinfo=UTC)
        latest = earliest + timedelta(seconds=1)
    except (ValueError, OverflowError):
        return
    _ahead = max(asked - latest, min(datetime.now(UTC) - earliest, timedelta()))
