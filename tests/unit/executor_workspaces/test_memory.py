"""Which workspaces pause, and which one ends, when memory is overcommitted: the pure decision."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.executor.overlay.memory import (
    Decision,
    ProgressClock,
    Situation,
    Unit,
    decide,
    node_has_pressure,
    possible_growth,
)

LIMIT = 1000
sizes = st.integers(0, 950)


@st.composite
def sandboxes(draw: st.DrawFn) -> tuple[list[Unit], Situation]:
    units = [
        Unit(
            name,
            draw(sizes) // draw(st.integers(1, 10)),
            draw(st.integers(0, 5)),
            draw(st.integers(0, 5)),
            draw(st.none() | st.integers(50, 2000)),
            draw(st.booleans()),
            draw(st.booleans()),
            unknown_bytes=draw(st.sampled_from([0, 0, 100, 900])),
        )
        for name in draw(st.sets(st.sampled_from("abcdefgh")))
    ]
    for name in draw(st.sets(st.sampled_from("xyz"))):
        limit = draw(st.none() | st.integers(50, 2000))
        units.append(Unit(name, draw(sizes) // 3, math.inf, draw(st.integers(0, 5)), limit, is_idle=True))
    used = sum(unit.memory_bytes for unit in units) + draw(st.integers(0, 100))
    situation = Situation(
        used,
        LIMIT,
        draw(st.integers(0, 200)),
        draw(st.integers(0, 100)),
        draw(st.floats(0, 100)),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    return units, situation


def running_after(units: list[Unit], decision: Decision) -> set[str]:
    running = {unit.name for unit in units if not unit.is_paused}
    return (running | set(decision.resume)) - set(decision.pause)


@given(sandboxes())
@settings(max_examples=500)
def test_decision_is_consistent_and_the_oldest_always_runs(sandbox: tuple[list[Unit], Situation]) -> None:
    units, situation = sandbox
    decision = decide(units, situation)
    by_name = {unit.name: unit for unit in units}
    assert all(not by_name[name].is_paused for name in decision.pause)
    assert all(by_name[name].is_paused for name in decision.resume)
    assert not any(by_name[name].is_steady for name in decision.pause)
    assert not any(by_name[name].is_idle for name in decision.pause)
    active = [unit for unit in units if not unit.is_idle]
    if active and (decision.end is None or decision.end[1] == "SandboxMemory"):
        oldest = min(active, key=lambda unit: (unit.started, unit.name))
        assert oldest.name in running_after(units, decision)
        assert {unit.name for unit in active if unit.is_steady} <= running_after(units, decision)


@given(sandboxes())
@settings(max_examples=500)
def test_nothing_ends_below_the_last_mark_or_before_all_large_ones_pause(sandbox: tuple[list[Unit], Situation]) -> None:
    units, situation = sandbox
    decision = decide(units, situation)
    if decision.end is None:
        return
    assert situation.used > 0.9 * LIMIT
    assert not decision.pause
    ended = next(unit for unit in units if unit.name == decision.end[0])
    assert ended.held_bytes > 0.9 * LIMIT / len(units), "ending it would not help"
    if decision.end[1] == "SandboxMemory":
        is_sure = ended.limit is not None or ended.unknown_bytes
        assert is_sure, "a workspace without a limit could provoke a retry by its growth"
        free = 1 + int(situation.stuck_seconds // 10)
        active = [unit for unit in units if not unit.is_idle]
        younger = sorted(active, key=lambda unit: (unit.started, unit.name))[free:]
        assert all(unit.is_paused or unit.is_steady or unit.memory_bytes < 0.01 * LIMIT for unit in younger)
    else:
        assert ended.memory_bytes > 0.9 * LIMIT or ended.limit is None
        assert ended.memory_bytes == max(unit.memory_bytes for unit in units)


@given(sandboxes())
@settings(max_examples=500)
def test_sandbox_without_overcommitment_neither_pauses_nor_ends_within_limits(
    sandbox: tuple[list[Unit], Situation],
) -> None:
    units, situation = sandbox
    part = LIMIT // max(1, len(units))
    units = [unit._replace(limit=part, memory_bytes=min(unit.memory_bytes, part), unknown_bytes=0) for unit in units]
    used = sum(unit.memory_bytes for unit in units)
    decision = decide(units, situation._replace(used=used))
    assert not decision.pause
    assert not decision.starts_wait
    if decision.end is not None:
        assert len(units) == 1
        assert decision.end[1] == "Memory"
    else:
        assert set(decision.resume) == {unit.name for unit in units if unit.is_paused}


def test_nothing_pauses_while_there_is_room() -> None:
    units = [Unit(name, 100, age) for age, name in enumerate("abcde")]
    assert decide(units, Situation(500, LIMIT)) == Decision([], [], False, None)


def test_larger_half_pauses_first_while_memory_only_grows_towards_the_mark() -> None:
    units = [Unit("a", 200, 0), Unit("b", 150, 1), Unit("c", 150, 2), Unit("d", 100, 3), Unit("e", 100, 4)]
    decision = decide(units, Situation(640, LIMIT, growth=10))
    assert (decision.pause, decision.starts_wait, decision.end) == (["c", "b"], True, None)
    assert set(decide(units, Situation(700, LIMIT)).pause) == set("bcde")


def test_small_ones_run_on() -> None:
    units = [Unit("a", 650, 0), Unit("b", 150, 1), Unit("ls", 5, 2)]
    assert decide(units, Situation(805, LIMIT)).pause == ["b"]


def test_paused_ones_resume_in_order_of_age_below_a_lower_mark() -> None:
    units = [Unit("a", 50, 0), Unit("b", 100, 1, is_paused=True), Unit("c", 100, 2, is_paused=True)]
    assert decide(units, Situation(600, LIMIT)).resume == []
    decision = decide(units, Situation(540, LIMIT))
    assert (decision.resume, decision.starts_wait) == (["b"], True)
    assert decide(units, Situation(540, LIMIT, growth=10)).resume == []
    assert decide(units, Situation(500, LIMIT)).resume == ["b", "c"]


def test_one_more_resumes_every_ten_seconds_in_which_memory_does_not_fall() -> None:
    units = [Unit("server", 600, 0), Unit("b", 100, 1, is_paused=True), Unit("c", 100, 2, is_paused=True)]
    assert decide(units, Situation(800, LIMIT, stuck_seconds=9.9)).resume == []
    assert decide(units, Situation(800, LIMIT, stuck_seconds=10.1)).resume == ["b"]
    assert decide(units, Situation(800, LIMIT, stuck_seconds=20.1)).resume == ["b", "c"]


def test_last_resort_ends_the_youngest_large_one_within_its_limit() -> None:
    units = [Unit("a", 450, 0, 0, 800), Unit("b", 250, 1, 1, 800, True), Unit("c", 235, 2, 2, 800, True)]
    assert decide(units, Situation(935, LIMIT)).end is None, "memory does not grow any more"
    assert decide(units, Situation(935, LIMIT, growth=10)).end == ("a", "SandboxMemory")
    units[2] = Unit("c", 310, 2, 2, 800, True)
    assert decide(units, Situation(1010, LIMIT)).end == ("c", "SandboxMemory")


def test_largest_without_a_limit_of_its_own_is_held_responsible() -> None:
    units = [Unit("a", 600, 0), Unit("b", 350, 1, 1, 800, True)]
    assert decide(units, Situation(950, LIMIT, growth=10)).end == ("a", "Memory")


def test_one_that_uses_the_whole_sandbox_alone_is_held_responsible() -> None:
    units = [Unit("a", 20, 0, 0, 200), Unit("b", 901, 1, 1, 2000)]
    assert decide(units, Situation(921, LIMIT)).end == ("b", "Memory")


def test_pressure_of_the_node_pauses_but_ends_none() -> None:
    units = [Unit("a", 150, 0), Unit("b", 150, 1)]
    assert decide(units, Situation(300, LIMIT, has_pressure=True)) == Decision(["b"], [], True, None)


@pytest.mark.parametrize(
    ("text", "has"),
    [
        (None, False),
        ("", False),
        ("some avg10=90.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=19.99 avg60=99.00 avg300=0.00 total=1\n", False),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=20.00 avg60=0.00 avg300=0.00 total=1\n", True),
    ],
)
def test_pressure_is_that_of_all_tasks_in_the_last_seconds(text: str | None, has: bool) -> None:
    assert node_has_pressure(text) is has


@pytest.mark.parametrize("seed", range(20))
def test_programs_that_free_their_memory_all_end_by_themselves(seed: int) -> None:
    """Simulate programs that grow to a peak, hold it and end. The last resort is never needed."""
    chance = random.Random(seed)
    peaks = [chance.randint(20, 250) for _ in range(40)]
    grown = [0] * len(peaks)
    held = [chance.randint(1, 20) for _ in peaks]
    paused: set[int] = set()
    used = 0
    for _ in range(10_000):
        left = [number for number in range(len(peaks)) if held[number]]
        if not left:
            break
        for number in left:
            if number in paused:
                continue
            if grown[number] < peaks[number]:
                grown[number] = min(peaks[number], grown[number] + 5)
            else:
                held[number] -= 1
                grown[number] *= bool(held[number])
        units = [Unit(str(n), grown[n], n, n, 250, n in paused) for n in left if held[n]]
        before, used = used, sum(grown)
        assert used <= LIMIT
        decision = decide(units, Situation(used, LIMIT, max(0, used - before)))
        assert decision.end is None
        paused = (paused | set(map(int, decision.pause))) - set(map(int, decision.resume))
    assert not any(held)


@pytest.mark.parametrize("swing", [0, 25])
def test_a_workspace_whose_memory_swings_keeps_none_paused(swing: int) -> None:
    """It frees and uses 25 of 600 MB in turn, and four others need 190 MB for a second each."""
    limit, clock, starts_wait, is_settled, before = 600, ProgressClock(0.0), False, True, 0
    sizes, left = dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 20)
    paused: set[str] = set()
    for step in range(1, 2400):
        now = step / 20
        swinging = Unit("oldest", 150 + swing * (step // 10 % 2), 0, limit=200)
        units = [
            swinging,
            *(Unit(name, sizes[name], number + 1, number + 1, 200, name in paused) for number, name in enumerate(left)),
        ]
        used = sum(unit.memory_bytes for unit in units)
        stuck = clock.seconds(used, limit, now, starts_wait=starts_wait)
        decision = decide(units, Situation(used, limit, max(0, used - before), 0, stuck, False, is_settled))
        clock.decided(decision, used, now)
        starts_wait, is_settled, before = decision.starts_wait, not (decision.pause or decision.resume), used
        if decision.end is not None:
            del left[decision.end[0]]  # the last resort
        paused = (paused | set(decision.pause)) - set(decision.resume)
        for name in [name for name in left if name not in paused]:
            left[name] -= sizes[name] == 190
            sizes[name] = min(190, sizes[name] + 25)
            if not left[name]:
                del left[name]
        if not left:
            return
    raise AssertionError(f"paused for two minutes: {paused}")


def test_pausing_begins_before_processors_could_use_the_rest() -> None:
    units = [Unit("a", 200, 0), Unit("b", 150, 1), Unit("c", 150, 2)]
    assert decide(units, Situation(500, LIMIT)).pause == []
    assert decide(units, Situation(500, LIMIT, possible=80)).pause == ["c"]
    assert decide(units, Situation(580, LIMIT, possible=80)).pause == ["c", "b"]


def test_a_busy_machine_and_more_processors_leave_more_free_but_never_more_than_a_tenth() -> None:
    gb = 1 << 30
    assert possible_growth(16 * gb, 2, 0.01) == pytest.approx(0.02 * gb)
    assert possible_growth(16 * gb, 16, 0.01) == pytest.approx(0.16 * gb)
    assert possible_growth(16 * gb, 16, 1.0) == pytest.approx(1.6 * gb)


def test_commands_cannot_make_their_workspace_the_last_resort() -> None:
    """A program without a deadline makes the workspace look young to those who pause first."""
    units = [Unit("old", 450, float("inf"), 0, 800, is_paused=True), Unit("new", 480, 1, 1, 800)]
    assert decide(units, Situation(980, LIMIT)).end == ("new", "SandboxMemory")


@pytest.mark.parametrize(("limit", "cause"), [(600, "SandboxMemory"), (None, "Memory")])
def test_files_in_memory_of_workspaces_without_processes_count(limit: int | None, cause: str) -> None:
    """Otherwise a single running workspace exceeds the sandbox's limit, and the kernel ends any process of the sandbox."""
    running = Unit("running", 400, 1.0, limit=limit)
    holder = Unit("holder", 550, float("inf"), limit=limit, is_idle=True)
    decision = decide([running, holder], Situation(950, LIMIT, growth=20))
    assert (list(decision.pause), decision.end) == ([], ("holder", cause))
    assert decide([holder], Situation(950, LIMIT, growth=20)) == Decision()


def test_memory_of_unknown_workspaces_ends_one_that_may_have_it_and_is_no_ones_fault() -> None:
    units = [Unit("a", 100, 0, 0, 250), Unit("may", 50, 1, 1, 250, unknown_bytes=800, is_paused=True)]
    assert decide(units, Situation(950, LIMIT, growth=20)).end == ("may", "SandboxMemory")
    assert decide(units, Situation(920, LIMIT, growth=0)).end is None
    honest = [unit._replace(unknown_bytes=0) for unit in units]
    assert decide(honest, Situation(150, LIMIT)).end is None
