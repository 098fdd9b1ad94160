import random

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.scheduling.retry_rules import LARGEST_BACKOFF_SECONDS, retry_delay
from rollout_api.records import FailedRecord
from rollout_api.rollout_job import Attempts

failures = st.lists(
    st.builds(FailedRecord, time=st.just(0.0), reason=st.just("SandboxLost"), counted=st.booleans()), max_size=12
)
policies = st.builds(Attempts, limit=st.integers(1, 10), backoff_seconds=st.floats(0, 60))


@given(failures, policies, st.integers())
def test_a_rollout_is_never_tried_more_often_than_its_limit_nor_given_up_before(
    failed: list[FailedRecord], attempts: Attempts, seed: int
) -> None:
    delay = retry_delay(failed, attempts, random.Random(seed))
    if sum(f.counted for f in failed) >= attempts.limit:
        assert delay is None
    else:
        assert delay is not None
        assert 0 <= delay <= LARGEST_BACKOFF_SECONDS


@given(st.integers(1, 6), st.integers())
def test_backoff_grows_so_that_a_broken_cluster_is_not_hammered(count: int, seed: int) -> None:
    attempts = Attempts(limit=100, backoff_seconds=1)
    failed = [FailedRecord(time=0, reason="ImagePull")] * count
    delay = retry_delay(failed, attempts, random.Random(seed))
    assert delay is not None
    assert 2.0 ** (count - 1) / 2 <= delay <= 2.0 ** (count - 1)


def test_interrupted_runner_uses_up_no_attempt_and_is_retried_immediately() -> None:
    interrupted = FailedRecord(time=0, reason="Interrupted", counted=False)
    assert retry_delay([interrupted] * 50, Attempts(limit=1), random.Random(0)) == 0.0
