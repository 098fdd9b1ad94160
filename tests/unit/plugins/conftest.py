"""Results and plugins for the tests."""

from collections.abc import Callable
from typing import Any

import pytest

from rollout_api.records import Outcome, Result

MakeResult = Callable[..., Result]


@pytest.fixture(scope="session")
def make_result() -> MakeResult:
    """Return a result of a member of group 0 with this reward; masked without one."""

    def make(member: int, reward: float | None, **fields: Any) -> Result:
        outcome = Outcome.INFRA_FAILED if reward is None else Outcome.COMPLETED
        return Result(
            index=member, group=0, member=member, task="t", mode="Eval", seed=0, outcome=outcome, reward=reward, attempt=0,
            **fields,
        )  # fmt: skip

    return make
