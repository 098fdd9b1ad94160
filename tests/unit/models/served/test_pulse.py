from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.models.pool.server import STALL_SECONDS, StallDetector
from tests.support.full import examples

STEP = 0.2


class Watched:
    """A server whose metrics are read five times a second."""

    def __init__(self) -> None:
        self.pulse, self.now = StallDetector(), 0.0

    def stalls_within(
        self,
        seconds: float,
        *,
        in_flight: int = 1,
        can_be_judged: bool = True,
        counter: Callable[[float], float] = lambda now: 7,
    ) -> bool:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            self.pulse.counted(counter(self.now))
            if self.pulse.is_stalled(self.now, in_flight=in_flight, can_be_judged=can_be_judged):
                return True
        return False


def test_hung_server_is_left_within_a_bounded_time() -> None:
    watched = Watched()
    assert not watched.stalls_within(STALL_SECONDS - 1)
    assert watched.stalls_within(2)


def test_server_that_is_busy_for_others_does_not_count_as_hung() -> None:
    assert not Watched().stalls_within(5 * STALL_SECONDS, counter=lambda now: now // 30)


def test_paused_server_is_not_hung_and_gets_its_time_afterwards() -> None:
    watched = Watched()
    assert not watched.stalls_within(5 * STALL_SECONDS, can_be_judged=False)
    assert not watched.stalls_within(STALL_SECONDS - 1)


def test_idle_server_is_not_hung() -> None:
    watched = Watched()
    assert not watched.stalls_within(5 * STALL_SECONDS, in_flight=0)
    assert not watched.stalls_within(STALL_SECONDS - 1)


def test_a_runner_that_stood_still_does_not_blame_the_server() -> None:
    pulse = StallDetector()
    assert not pulse.is_stalled(0, in_flight=1, can_be_judged=True)
    assert not pulse.is_stalled(10 * STALL_SECONDS, in_flight=1, can_be_judged=True)


@settings(max_examples=examples(20))
@given(st.lists(st.floats(0.1, STALL_SECONDS - 2), min_size=1, max_size=5))
def test_a_server_that_makes_a_token_now_and_then_is_kept(pauses: list[float]) -> None:
    watched = Watched()
    for pause in pauses:
        assert not watched.stalls_within(pause)
        watched.pulse.beat()
