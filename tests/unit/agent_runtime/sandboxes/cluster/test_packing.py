"""Properties of packing, for any requests and sandboxes."""

import math
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.sandboxes.cluster.packing import Bounds, PackingPlan, Request, Room, plan_packing

GROUPS = st.sampled_from("abcdef")


@st.composite
def rooms(draw: st.DrawFn) -> list[Room]:
    found = []
    for number in range(draw(st.integers(0, 5))):
        places = draw(st.integers(1, 5))
        is_ready = draw(st.booleans())
        taken = draw(st.integers(0, places)) if is_ready else 0
        to_come = draw(st.dictionaries(GROUPS, st.integers(0, 4), max_size=3)) if is_ready else {}
        empty = draw(st.floats(0, 60)) if is_ready and not taken else 0.0
        found.append(Room(f"room-{number}", places, taken, is_ready, to_come, empty))
    return found


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    numbers = draw(st.lists(st.integers(0, 100), unique=True, max_size=12))
    return [Request(number, draw(GROUPS), draw(st.integers(0, 4))) for number in numbers]


bounds = st.builds(
    Bounds,
    places=st.integers(1, 5),
    may_come=st.integers(0, 3),
    keep_seconds=st.just(30.0),
    is_reusable=st.booleans(),
    is_shared=st.booleans(),
)


def free_after(plan: PackingPlan, there: list[Room]) -> dict[str, int]:
    taken = Counter(plan.placed.values())
    return {room.name: room.free - taken[room.name] for room in there}


@given(requests(), rooms(), bounds)
def test_no_place_is_assigned_twice(asked: list[Request], there: list[Room], within: Bounds) -> None:
    plan = plan_packing(asked, there, within)
    assert plan.placed.keys() <= {request.number for request in asked}
    assert all(left >= 0 for left in free_after(plan, there).values())


@given(requests(), rooms(), bounds)
def test_no_attempt_waits_while_a_place_is_free(asked: list[Request], there: list[Room], within: Bounds) -> None:
    plan = plan_packing(asked, there, within)
    assert len(plan.placed) == len(asked) or not any(free_after(plan, there).values())


@given(requests(), rooms(), bounds)
def test_a_member_leaves_its_group_only_when_its_home_is_full(
    asked: list[Request], there: list[Room], within: Bounds
) -> None:
    plan = plan_packing(asked, there, within)
    left = free_after(plan, there)
    for request in asked:
        homes = [room for room in there if request.group in room.to_come and room.is_ready]
        if homes and plan.placed.get(request.number) not in {room.name for room in homes}:
            assert not any(left[room.name] for room in homes)


@given(st.integers(1, 8), st.integers(1, 6), st.randoms(use_true_random=False))
def test_groups_that_wait_together_are_not_split_where_each_fits_a_sandbox(
    size: int, count: int, order: random.Random
) -> None:
    asked = [Request(0, f"g{group}", 0) for group in range(count) for _ in range(size)]
    order.shuffle(asked)
    asked = [replace(request, number=number) for number, request in enumerate(asked)]
    plan = plan_packing(asked, [Room(f"room-{n}", size) for n in range(count)], Bounds(size, 0, 30))
    assert len({(request.group, plan.placed[request.number]) for request in asked}) == count


@given(st.integers(2, 8), st.integers(2, 6), st.randoms(use_true_random=False))
def test_groups_whose_members_arrive_one_by_one_are_not_split_either(
    size: int, count: int, order: random.Random
) -> None:
    members = [f"g{group}" for group in range(count) for _ in range(size)]
    order.shuffle(members)
    to_come = Counter(members)
    there = {f"room-{n}": Room(f"room-{n}", size) for n in range(count)}
    homes: dict[str, set[str]] = {}
    for number, group in enumerate(members):
        to_come[group] -= 1
        now = [replace(room, to_come={g: to_come[g] for g in room.to_come}) for room in there.values()]
        name = plan_packing([Request(number, group, to_come[group])], now, Bounds(size, 0, 30)).placed[number]
        room = there[name]
        there[name] = replace(room, taken=room.taken + 1, to_come={**room.to_come, group: 0})
        homes.setdefault(group, set()).add(name)
    assert all(len(names) == 1 for names in homes.values())


@given(requests(), rooms(), bounds)
def test_at_most_one_sandbox_more_than_the_queue_needs_is_opened(
    asked: list[Request], there: list[Room], within: Bounds
) -> None:
    plan = plan_packing(asked, there, within)
    coming = sum(room.places for room in there if not room.is_ready)
    needed = max(0, math.ceil((len(asked) - len(plan.placed) - coming) / within.places))
    assert needed <= plan.opened <= needed + 1
    if not asked:
        assert plan.opened == 0


@given(requests(), rooms(), bounds)
def test_only_empty_sandboxes_are_returned_and_finally_all(
    asked: list[Request], there: list[Room], within: Bounds
) -> None:
    plan = plan_packing(asked, there, within)
    by_name = {room.name: room for room in there}
    for name in plan.given_back:
        assert (by_name[name].is_ready, by_name[name].taken) == (True, 0)
        assert name not in plan.placed.values()
    later = [replace(room, taken=0, is_ready=True, empty_seconds=within.keep_seconds) for room in there]
    last = plan_packing([], later, within)
    assert set(last.given_back) == by_name.keys()


def test_the_next_sandbox_is_opened_when_a_new_group_takes_the_last_place() -> None:
    asked = [Request(number, "a") for number in range(4)]
    assert plan_packing(asked, [Room("one", 4)], Bounds(4, may_come=4, keep_seconds=30)).opened == 1
    assert plan_packing(asked, [Room("one", 4)], Bounds(4, may_come=0, keep_seconds=30)).opened == 0
    alone = Bounds(4, may_come=4, keep_seconds=30, is_shared=False)
    assert plan_packing(asked, [Room("one", 4)], alone).opened == 0


def test_gradings_at_the_end_of_a_job_open_no_unused_sandboxes() -> None:
    full = Room("one", 4, taken=3, to_come={"a": 0})
    plan = plan_packing([Request(9, "a")], [full], Bounds(4, may_come=60, keep_seconds=30))
    assert (plan.placed, plan.opened) == ({9: "one"}, 0)


def test_a_plain_sandbox_waits_ready_for_the_workspace_that_follows() -> None:
    plain = Bounds(1, may_come=0, keep_seconds=30, is_reusable=False)
    assert plan_packing([Request(1, "a")], [Room("one", 1)], plain) == PackingPlan({1: "one"}, 1, [])
    at_work = [Room("one", 1, taken=1), Room("ahead", 1, empty_seconds=600)]
    assert plan_packing([], at_work, plain) == PackingPlan({}, 0, [])
    assert plan_packing([], at_work[1:], plain).given_back == ["ahead"]
