"""How long calls to the API server are retried."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.kube.api import LONGEST_PAUSE_SECONDS, retry_pause

luck = st.floats(0, 1, exclude_max=True)


@given(st.integers(0, 10_000), luck)
def test_pauses_between_retries_stay_within_their_bounds(tries: int, luck: float) -> None:
    assert 0.05 <= retry_pause(tries, luck) <= LONGEST_PAUSE_SECONDS


@given(luck)
def test_an_outage_costs_few_requests(luck: float) -> None:
    assert sum(retry_pause(tries, luck) for tries in range(30)) > 60
