import time

import pytest

from agent_runtime.extensions import described
from agent_runtime.wall_clock import unix_time


def test_record_times_follow_the_clock_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = unix_time()
    assert abs(before - time.time()) < 3600, "only a set clock parts them"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= unix_time() < before + 3600


def test_group_with_one_error_is_described_by_it() -> None:
    inner = ExceptionGroup("of tasks", [ConnectionRefusedError("port 1")])
    assert described(ExceptionGroup("of groups", [inner])) == "ConnectionRefusedError: port 1"
    assert "2 sub-exceptions" in described(ExceptionGroup("two", [ValueError("a"), ValueError("b")]))
