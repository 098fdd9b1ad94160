"""A call is made once, whatever is repeated, lost or forgotten."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from agent_runtime.executor.attempts import MAX_KEYS, Attempt, Entry, Hold, Key, KeyMemory, StoredReply, read_key
from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.http.messages import Reply
from tests.support.full import examples

KEYS = st.builds(Key, st.integers(0, 4), st.sampled_from("ab"))


class KeyMachine(RuleBasedStateMachine):
    """Calls begin, end and are repeated in any order. The model is the set of keys that took effect."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[str] = []
        self.memory: KeyMemory[str] = KeyMemory(self.dropped.append)
        self.at_work: dict[Key, Entry[str]] = {}
        self.done: dict[Key, str] = {}
        self.lines: dict[Key, str] = {}
        self.watermark = 0

    @rule(key=KEYS, line=st.sampled_from(["A", "B"]))
    def call(self, key: Key, line: str) -> None:
        if key.turn < self.watermark:
            with pytest.raises(ApiError, match="were acknowledged"):
                self.memory.find(key, line)
            return
        if self.lines.get(key, line) != line:
            with pytest.raises(ApiError, match="names another call"):
                self.memory.find(key, line)
            return
        entry = self.memory.find(key, line)
        if entry is None:
            assert key not in self.at_work, "a call at work would be made a second time"
            assert key not in self.done, "a finished call would be made a second time"
            self.at_work[key] = self.memory.begin(key, line, b"")
            self.lines[key] = line
        elif entry.is_finished:
            assert entry.result == self.done[key]
        else:
            assert entry is self.at_work[key]

    @rule(key=KEYS, outcome=st.sampled_from(["result", "error", "nothing done"]))
    def end(self, key: Key, outcome: str) -> None:
        entry = self.at_work.pop(key, None)
        if entry is None:
            return
        if outcome == "result":
            self.memory.finish(key, entry, f"result of {key}", None)
            self.done[key] = f"result of {key}"
        elif outcome == "error":
            self.memory.finish(key, entry, None, ApiError("FileError", "x"))
            self.done[key] = None  # type: ignore[assignment]
        else:
            self.memory.finish(key, entry, None, ApiError("NoPlace", "x"))
            del self.lines[key]

    @rule(turn=st.integers(0, 5))
    def acknowledge(self, turn: int) -> None:
        self.memory.forget_below(turn)
        self.watermark = max(self.watermark, turn)
        for key in [key for key in self.at_work if key.turn < self.watermark]:
            self.at_work.pop(key)


TestNoCallIsMadeTwice = KeyMachine.TestCase


def request(digest: bytes = b"d") -> Any:
    async def read() -> bytes:
        return digest

    return SimpleNamespace(line="POST /x", body_complete=True, body_digest=digest, digest=read)


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30), st.sets(st.integers(0, 2)))
def test_concurrent_callers_share_one_run_for_each_key(callers: list[tuple[int, bool]], slow: set[int]) -> None:
    async def play() -> None:
        attempt, runs = Attempt("a"), [0, 0, 0]
        await attempt.raise_fence(Hold(1, "r"))

        async def call(which: int) -> bytes:
            async def work() -> StoredReply:
                runs[which] += 1
                await asyncio.sleep(0.002 if which in slow else 0)
                return StoredReply(Reply(f"run {runs[which]}".encode()), "/nonexistent")

            result = await attempt.once(Hold(1, "r"), Key(0, f"{which}"), request(), b"d", work, lambda: False)
            assert isinstance(result, StoredReply)
            return result.reply().body

        tasks = []
        for which, goes_away in callers:
            task = asyncio.create_task(call(which))
            tasks.append(task)
            await asyncio.sleep(0)
            if goes_away:
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError) or outcome == b"run 1"
        await asyncio.sleep(0.005)
        assert all(count <= 1 for count in runs)

    asyncio.run(play())


async def test_a_streamed_body_is_compared_when_its_key_is_repeated() -> None:
    attempt = Attempt("a")
    await attempt.raise_fence(Hold(1, "r"))

    async def work() -> StoredReply:
        return StoredReply(Reply(b"done"), "/nonexistent")

    for digest in (b"one", b"one"):
        await attempt.once(Hold(1, "r"), Key(0, "k"), request(digest), None, work, lambda: False)
    with pytest.raises(ApiError, match="another body"):
        await attempt.once(Hold(1, "r"), Key(0, "k"), request(b"two"), None, work, lambda: False)


def test_memory_is_bounded_by_refusing_new_calls_and_not_by_dropping_old_ones() -> None:
    memory: KeyMemory[str] = KeyMemory()
    for number in range(MAX_KEYS):
        memory.begin(Key(1, str(number)), "A", b"")
    with pytest.raises(ApiError, match="watermark") as refused:
        memory.begin(Key(1, "one more"), "A", b"")
    assert refused.value.code == "TooLarge"
    assert memory.find(Key(1, "0"), "A") is not None
    memory.forget_below(2)
    memory.begin(Key(2, "one more"), "A", b"")


@given(
    st.integers(0, 10**6), st.text(min_size=1, max_size=200), st.integers(0, 10**6), st.text(min_size=1, max_size=200)
)
def test_two_keys_never_name_one_process(turn: int, name: str, other_turn: int, other_name: str) -> None:
    one, other = Key(turn, name).process_id(), Key(other_turn, other_name).process_id()
    assert re.fullmatch(r"[A-Za-z0-9._~-]{1,100}", one)
    assert (one == other) == ((turn, name) == (other_turn, other_name))


@pytest.mark.parametrize("header", ["", "1", ":a", "1:", "-1:a", "x:a", "1:" + "n" * 201, "1" * 16 + ":a"])
def test_a_malformed_key_is_refused(header: str) -> None:
    with pytest.raises(ApiError, match="Idempotency-Key"):
        read_key(header)
