"""A single death costs no wait. A job that makes progress is never given up, and one whose engine only dies is."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.runner.supervisor import DEATHS_IN_A_ROW, LONGEST_PAUSE_SECONDS, Deaths

LIVES = st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=40)


def test_one_kill_is_repaired_at_once() -> None:
    assert Deaths().another(lived_seconds=0.1, progress=False).pause_seconds == 0


@given(LIVES)
def test_pauses_grow_only_over_quick_deaths_and_stay_bounded(lives: list[tuple[float, bool]]) -> None:
    deaths = Deaths()
    for lived, progress in lives:
        before, deaths = deaths, deaths.another(lived_seconds=lived, progress=progress)
        assert 0 <= deaths.pause_seconds <= LONGEST_PAUSE_SECONDS
        if lived >= 10 or progress:
            assert deaths.pause_seconds == 0
        else:
            assert deaths.pause_seconds >= before.pause_seconds


@given(LIVES)
def test_runner_gives_up_exactly_after_ten_deaths_without_a_seal(lives: list[tuple[float, bool]]) -> None:
    deaths, in_a_row = Deaths(), 0
    for lived, progress in lives:
        deaths = deaths.another(lived_seconds=lived, progress=progress)
        in_a_row = 1 if progress else in_a_row + 1
        assert deaths.too_many == (in_a_row >= DEATHS_IN_A_ROW)
