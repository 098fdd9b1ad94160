"""A run stops if its agent's code raises the same exception in all of the first rollouts, and only then."""

import asyncio
from collections.abc import Iterable

import pytest

from agent_runtime.engine.scheduling import first_ends
from agent_runtime.engine.scheduling.first_ends import FIRST, AgentBroken, FirstEnds
from rollout_api.records import Outcome, Result
from tests.support.records import completed

pytestmark = pytest.mark.usefixtures("virtual_clock")


def raised(line: int, words: str = "'str' object has no attribute 'uper'") -> str:
    return f'Traceback (most recent call last):\n  File "own.py", line {line}, in run\n    x\nAttributeError: {words}\n'


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_ends, "LOOK_SECONDS", 0.01)


async def play(*tracebacks: str | None, seen: FirstEnds | None = None) -> list[BaseException | None]:
    """Run all rollouts at once, each ending a moment after the one before. Returns the outcome of each."""
    seen = seen or FirstEnds()
    started = asyncio.Event()

    async def rollout(number: int, traceback: str | None) -> None:
        with seen.running():
            await started.wait()
            await asyncio.sleep(number / 1000)
            await seen.ended(traceback)

    tasks = [asyncio.create_task(rollout(number, traceback)) for number, traceback in enumerate(tracebacks)]
    await asyncio.sleep(0)
    started.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_same_exception_in_all_of_the_first_rollouts_stops_them_all() -> None:
    # The messages differ, because an answer of the policy may be part of them.
    outcomes = await play(*(raised(3, f"message {number}") for number in range(FIRST)))
    assert all(isinstance(outcome, AgentBroken) for outcome in outcomes)
    assert 'File "own.py", line 3' in str(outcomes[0])


async def test_lines_of_a_message_are_not_taken_for_the_place_or_type() -> None:
    message = 'the tests failed:\n  File "solution.py", line {0}, in test\nassert {0} == 1\nError{0}: no'
    outcomes = await play(*(raised(3, message.format(number)) for number in range(FIRST)))
    assert all(isinstance(outcome, AgentBroken) for outcome in outcomes)


async def test_type_of_an_exception_counts_when_the_last_lines_of_messages_are_equal() -> None:
    tracebacks = [raised(3, "failed\nsee above"), raised(3, "failed\nsee above").replace("AttributeError", "KeyError")]
    assert await play(*tracebacks * FIRST) == [None] * 2 * FIRST


async def test_place_is_that_of_the_exception_and_not_of_its_cause() -> None:
    cause = f"{raised(1)}\nThe above exception was the direct cause of the following exception:\n\n"
    outcomes = await play(*(cause.replace("line 1", f"line {number}") + raised(3) for number in range(FIRST)))
    assert all(isinstance(outcome, AgentBroken) for outcome in outcomes)


@pytest.mark.parametrize("other", [None, raised(4)], ids=["ends well", "raises elsewhere"])
@pytest.mark.parametrize("position", [0, 3, FIRST - 1])
async def test_one_rollout_that_ends_otherwise_lets_the_run_continue(other: str | None, position: int) -> None:
    ends: list[str | None] = [raised(3)] * FIRST
    ends[position] = other
    assert await play(*ends, raised(3), raised(3)) == [None] * (FIRST + 2)


async def test_few_rollouts_that_raise_are_graded_when_no_other_is_running() -> None:
    seen = FirstEnds()
    assert await play(*[raised(3)] * (FIRST - 1), seen=seen) == [None] * (FIRST - 1)
    [outcome] = await play(raised(3), seen=seen)
    assert isinstance(outcome, AgentBroken), "those before it raised the same"


async def test_rollout_waits_only_for_a_while_for_one_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_ends, "HOLD_SECONDS", 0.05)
    seen = FirstEnds()
    with seen.running():
        assert await play(raised(3), seen=seen) == [None]


def sealed(*tracebacks: str | None) -> list[Result]:
    """Return the sealed results of rollouts whose agents ended like this, and one that has no end of an agent."""
    ends = [completed(index, traceback=traceback) for index, traceback in enumerate(tracebacks)]
    return [*ends, completed(99, outcome=Outcome.INFRA_FAILED)]


class OtherShards:
    """Results of other shards, which are read from storage."""

    def __init__(self, *reads: list[Result]) -> None:
        self._reads, self.count = reads, 0

    async def __call__(self) -> Iterable[Result]:
        self.count += 1
        return self._reads[min(self.count, len(self._reads)) - 1]


async def test_run_with_a_successful_end_is_never_stopped() -> None:
    seen = FirstEnds(sealed(raised(3), None))
    assert await play(*[raised(3)] * (FIRST + 1), seen=seen) == [None] * (FIRST + 1)


async def test_sealed_rollouts_of_earlier_processes_count() -> None:
    outcomes = await play(raised(3), seen=FirstEnds(sealed(*[raised(3)] * (FIRST - 1))))
    assert isinstance(outcomes[0], AgentBroken)
    assert await play(raised(3), seen=FirstEnds(sealed(*[raised(3)] * (FIRST - 2)))) == [None]
    assert await play(raised(3), seen=FirstEnds(sealed(*[raised(4)] * FIRST))) == [None]


async def test_corrected_agent_that_raises_elsewhere_stops_the_resumed_run() -> None:
    outcomes = await play(*[raised(4)] * FIRST, seen=FirstEnds(sealed(*[raised(3)] * FIRST)))
    assert all(isinstance(outcome, AgentBroken) for outcome in outcomes)


async def test_rollouts_of_other_shards_count() -> None:
    others = OtherShards(sealed(*[raised(3)] * (FIRST - 2)))
    outcomes = await play(raised(3), raised(3), seen=FirstEnds(shards=4, read_others=others))
    assert all(isinstance(outcome, AgentBroken) for outcome in outcomes)


async def test_shards_that_start_together_stop_after_one_sealed_rollout_each() -> None:
    others = OtherShards([], sealed(*[raised(3)] * 3))
    outcomes = await play(*[raised(3)] * 7, seen=FirstEnds(shards=4, read_others=others))
    assert sum(outcome is None for outcome in outcomes) == 1


@pytest.mark.parametrize("other", [None, raised(4)], ids=["ended well", "raised elsewhere"])
async def test_another_shards_rollout_that_ended_otherwise_lets_the_run_continue(other: str | None) -> None:
    others = OtherShards(sealed(*[raised(3)] * FIRST, other))
    assert await play(*[raised(3)] * 2, seen=FirstEnds(shards=4, read_others=others)) == [None] * 2


@pytest.mark.parametrize("ends", [[raised(3)], [raised(3), None], [None] * 9], ids=["too few", "mixed", "well"])
async def test_other_shards_are_read_only_when_all_of_enough_rollouts_raise(ends: list[str | None]) -> None:
    others = OtherShards([])
    assert await play(*ends, seen=FirstEnds(shards=4, read_others=others)) == [None] * len(ends)
    assert others.count == 0
