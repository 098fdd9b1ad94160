"""The work queue: nothing is lost, and nothing is done twice at once."""

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_operator.work_queue import BACKOFF_LIMIT_SECONDS, WorkQueue

KEYS = st.sampled_from("abcde")
SECONDS = st.integers(0, 20)


class Queue(RuleBasedStateMachine):
    """Random adds, delays, failures and workers, compared with a plain model of the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.queue: WorkQueue[str] = WorkQueue(lambda: self.now, jitter=lambda: 1.0)
        self.wanted: set[str] = set()  # added since it was taken last
        self.delayed: dict[str, float] = {}
        self.working: set[str] = set()
        self.failures: dict[str, int] = {}

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.queue.add(key)
        self.wanted.add(key)

    @rule(key=KEYS, seconds=SECONDS)
    def add_after(self, key: str, seconds: int) -> None:
        self.queue.add_after(key, seconds)
        self.delayed[key] = min(self.now + seconds, self.delayed.get(key, float("inf")))

    @rule(key=KEYS, at_least=SECONDS)
    def fail(self, key: str, at_least: int) -> None:
        pause = self.queue.retry(key, at_least)
        assert pause >= at_least
        assert pause <= max(at_least, BACKOFF_LIMIT_SECONDS)
        if at_least == 0 and pause < BACKOFF_LIMIT_SECONDS:
            assert pause == 0.2 * 2 ** self.failures.get(key, 0)
        self.failures[key] = self.failures.get(key, 0) + 1
        self.delayed[key] = min(self.now + pause, self.delayed.get(key, float("inf")))

    @rule(key=KEYS)
    def succeed(self, key: str) -> None:
        self.queue.forgive(key)
        self.failures.pop(key, None)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        due = {key for key, at in self.delayed.items() if at <= self.now}
        free = (self.wanted | due) - self.working
        key = self.queue.take_ready()
        assert (key in free) if free else key is None, (key, free)
        self.wanted |= due
        for moved in due:
            del self.delayed[moved]
        if key is not None:
            self.wanted.discard(key)
            self.delayed.pop(key, None)
            self.working.add(key)

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.working)))
        self.queue.done(key)
        self.working.discard(key)

    @invariant()
    def reports_what_is_under_way(self) -> None:
        assert len(self.queue.unfinished()) == len(self.working)

    def teardown(self) -> None:
        """Check that every added key is returned in the end, once."""
        for key in self.working:
            self.queue.done(key)
        self.now += 10_000
        left = []
        while (taken := self.queue.take_ready()) is not None:
            left.append(taken)
            self.queue.done(taken)
        assert sorted(left) == sorted(self.wanted | self.delayed.keys())


TestQueue = Queue.TestCase


async def test_waiting_worker_gets_added_and_due_keys() -> None:
    queue: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time)
    taken: asyncio.Queue[str] = asyncio.Queue()

    async def work() -> None:
        while True:
            key = await queue.take()
            queue.done(key)
            taken.put_nowait(key)

    workers = [asyncio.create_task(work()) for _ in range(3)]
    try:
        await asyncio.sleep(0)
        queue.add_after("later", 0.05)
        for key in ("one", "two", "three", "four"):
            queue.add(key)
        got = [await asyncio.wait_for(taken.get(), 5) for _ in range(5)]
        assert sorted(got) == sorted(["one", "two", "three", "four", "later"])
        assert got[-1] == "later"
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def test_key_that_changes_during_a_round_is_planned_again_by_one_worker() -> None:
    queue: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time)
    queue.add("key")
    assert await queue.take() == "key"
    queue.add("key")
    assert queue.take_ready() is None
    queue.done("key")
    assert await asyncio.wait_for(queue.take(), 5) == "key"


def test_key_of_another_group_is_taken_before_a_thousand_earlier_ones() -> None:
    queue: WorkQueue[str] = WorkQueue(lambda: 0.0, group_of=lambda key: key[0])
    for number in range(1000):
        queue.add(f"a{number}")
    queue.add("b")
    assert [queue.take_ready() for _ in range(3)] == ["a0", "b", "a1"]
    assert queue.depth() == 998
