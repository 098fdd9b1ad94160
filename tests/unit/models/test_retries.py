"""When a failed call is retried."""

from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.retries import LONGEST_DELAY_SECONDS, is_transient, retry_after_seconds, retry_delay

NOW = 1_750_000_000.0
jitters = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120),
        ("0.5", 0.5),
        (formatdate(NOW + 90, usegmt=True), 90),
        (formatdate(NOW - 90, usegmt=True), 0),
        ("-5", 0),
        ("soon", None),
        ("", None),
        (None, None),
        ("nan", None),
        ("inf", None),
        ("Wed, 99 Jan 2026 00:00:00 GMT", None),
    ],
)
def test_both_forms_of_retry_after_are_read_and_nonsense_is_ignored(header: Any, seconds: Any) -> None:
    assert retry_after_seconds(header, NOW) == seconds


@given(failures=st.integers(1, 10_000), asked=st.integers(0, 10_000), jitter=jitters)
def test_delay_is_never_shorter_than_the_server_asks_for(failures: Any, asked: Any, jitter: Any) -> None:
    assert retry_delay(failures, str(asked), now=NOW, jitter=jitter) >= asked


@given(failures=st.integers(1, 10_000), jitter=jitters, header=st.none() | st.text())
def test_delays_are_positive_and_bounded_for_any_header(failures: Any, jitter: Any, header: Any) -> None:
    delay = retry_delay(failures, header, now=NOW, jitter=jitter)
    asked = retry_after_seconds(header, NOW) or 0
    assert 0 < delay <= max(asked + 1, LONGEST_DELAY_SECONDS)


def test_delays_grow_and_spread() -> None:
    assert retry_delay(4, None, now=NOW, jitter=0) > retry_delay(1, None, now=NOW, jitter=0.99)
    assert retry_delay(1, None, now=NOW, jitter=0) != retry_delay(1, None, now=NOW, jitter=0.5)


@pytest.mark.parametrize(("status", "transient"), [(400, False), (401, False), (404, False), (409, True), (500, True)])
def test_only_transient_statuses_are_retried(status: Any, transient: Any) -> None:
    assert is_transient(status) is transient
