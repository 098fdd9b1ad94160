"""Which waiting call gets a free place: near its prefix, and none waits forever."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.pool.admission_queue import IDLE_SECONDS, PASSED_SECONDS, Waiting, WaitingCalls
from agent_runtime.models.pool.routing import preference

SERVERS = ("a", "b", "c")
steps = st.lists(
    st.tuples(
        st.sampled_from(["comes", "comes", "comes", "ends", "ends", "comes again", "goes", "joins or leaves", "limit"]),
        st.integers(0, 30),
        st.sampled_from([0.0, 0.125, 0.75, 3.0, 20.0]),
    ),
    min_size=30,  # fewer calls never wait
    max_size=80,
)


def at_home(server: str) -> str:
    """Return a group that prefers that server."""
    groups = (f"group-{number}" for number in range(100))
    return next(group for group in groups if preference(group, SERVERS)[0] == server)


def a_call(server: str, since: float, avoided: frozenset[str] = frozenset()) -> Waiting:
    return Waiting(at_home(server), avoided, since)


def full(**calls: int) -> dict[str, int]:
    """Return the calls at each server: two, which is the limit, except at the named ones."""
    return dict.fromkeys(SERVERS, 2) | calls


LIMITS = dict.fromkeys(SERVERS, 2)


@given(steps)
def test_every_call_starts_finally_and_no_usable_place_remains_free(happenings: list[tuple[str, int, float]]) -> None:
    waiting, names = WaitingCalls(), list(SERVERS)
    in_flight, limits = Counter(dict.fromkeys(names, 0)), dict.fromkeys(names, 2)
    calls: list[Waiting] = []
    now = 0.0
    for what, number, seconds in happenings:
        now += seconds
        name = names[number % len(names)]
        if what.startswith("comes"):
            avoided = frozenset([name]) if what == "comes again" else frozenset()
            calls.append(Waiting(f"group-{number}", avoided, now))
            waiting.add(calls[-1])
        elif what == "ends":
            in_flight[name] = max(0, in_flight[name] - 1)
        elif what == "goes" and calls:
            waiting.remove(calls.pop(number % len(calls)))
        elif what == "joins or leaves":
            names = [other for other in SERVERS if (other in names) != (other == name)] or names
        elif what == "limit":
            limits[name] = 1 + number % 3
        able = {name: in_flight[name] for name in names}
        while (found := waiting.next(able, limits, now)) is not None:
            call, server = found
            calls.remove(call)
            assert able[server] < limits[server]
            assert server not in call.avoided or call.avoided >= set(names)
            for other in calls:
                may = [name for name in names if name not in other.avoided] or names
                if server in may and not (other.avoided or call.avoided):
                    assert call.since - other.since < PASSED_SECONDS or call.since == other.since
            in_flight[server] += 1
            able[server] += 1
        free = {name for name in names if able[name] < limits[name]}
        for call in calls:
            if not any(other.avoided for other in calls):
                assert not free or now - call.since < IDLE_SECONDS
                assert preference(call.group, names)[0] not in free
        assert len(waiting) == len(calls)


@given(st.lists(st.tuples(st.sampled_from(["comes", "ends"]), st.integers(0, 30)), min_size=30, max_size=80))
def test_calls_without_patience_start_in_order_of_arrival(happenings: list[tuple[str, int]]) -> None:
    waiting, in_flight, came, started = WaitingCalls(0, 0), Counter(dict.fromkeys(SERVERS, 0)), [], []
    for now, (what, number) in enumerate(happenings):
        if what == "comes":
            came.append(Waiting(f"group-{number}", frozenset(), now))
            waiting.add(came[-1])
        elif in_flight[name := SERVERS[number % 3]]:
            in_flight[name] -= 1
        while (found := waiting.next(in_flight, LIMITS, now)) is not None:
            started.append(found[0])
            in_flight[found[1]] += 1
    assert started == came[: len(started)]


def test_free_place_goes_first_to_a_call_of_its_own_groups() -> None:
    waiting = WaitingCalls()
    older, own = a_call("a", 0.0), a_call("b", PASSED_SECONDS - 1)
    waiting.add(older)
    waiting.add(own)
    assert waiting.next(full(b=1), LIMITS, PASSED_SECONDS) == (own, "b")
    assert waiting.next(full(), LIMITS, PASSED_SECONDS) is None


def test_call_that_waited_much_longer_gets_the_place_first() -> None:
    waiting = WaitingCalls()
    older, own = a_call("a", 0.0), a_call("b", PASSED_SECONDS)
    waiting.add(older)
    waiting.add(own)
    assert waiting.next(full(b=1), LIMITS, PASSED_SECONDS + 1) == (older, "b")


def test_call_waits_briefly_for_its_own_server_and_then_goes_elsewhere() -> None:
    waiting, call = WaitingCalls(), a_call("a", 0.0)
    waiting.add(call)
    assert waiting.next(full(b=0), LIMITS, IDLE_SECONDS / 2) is None
    assert waiting.next(full(a=1, b=0), LIMITS, IDLE_SECONDS / 2) == (call, "a")
    waiting.add(call)
    assert waiting.next(full(b=0), LIMITS, IDLE_SECONDS) == (call, "b")


def test_call_does_not_wait_for_a_removed_server() -> None:
    waiting, call = WaitingCalls(), a_call("a", 0.0)
    waiting.add(call)
    assert waiting.next(full(b=1), LIMITS, 0.0) is None
    found = waiting.next({"b": 0, "c": 0}, LIMITS, 0.0)
    assert found == (call, preference(call.group, ["b", "c"])[0])


def test_call_that_failed_at_the_only_free_server_blocks_no_other() -> None:
    waiting = WaitingCalls()
    failed, other, own = a_call("a", 0.0, frozenset("b")), a_call("a", 1.0), a_call("b", 20.0)
    for call in (failed, other, own):
        waiting.add(call)
    assert waiting.next(full(b=1), LIMITS, 20.0) == (other, "b")


@pytest.mark.parametrize("others_wait", [False, True])
def test_call_that_failed_at_the_only_free_server_delays_no_other(others_wait: bool) -> None:
    waiting = WaitingCalls()
    failed, own, other = a_call("a", 0.0, frozenset("b")), a_call("b", 50.0), a_call("c", 1.0)
    waiting.add(failed)
    if others_wait:
        waiting.add(other)
    waiting.add(own)
    assert waiting.next(full(b=1), LIMITS, 50.0) == (other if others_wait else own, "b")
