"""How often a turn finds its group's prefix in a server's cache: the share of turns that run at their group's preferred
server.
"""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

from agent_runtime.models.pool.admission_queue import Waiting, WaitingCalls
from agent_runtime.models.pool.fleet import CHECK_SECONDS
from agent_runtime.models.pool.routing import preference
from agent_runtime.models.pool.server import INITIAL_CALLS, Pressure, next_limit
from benchmarks.report import Row, Target

GROUPS, RUNNERS, SERVERS = 512, 3, 8
MEMBERS, TURNS = 8, 30
CALL_SECONDS, TOOL_SECONDS = (
    8.0,
    2.0,
)  # means of exponential distributions: most rollouts wait for the model at any time
AWAY = 0.1  # share of the run, in its middle, in which one server is unavailable
NAMES = [f"server-{number}" for number in range(SERVERS)]
UNLIMITED = GROUPS * MEMBERS  # limit that is never reached: the servers' memory has no effect
LIMITS = (150, 137, 120, 85, 32)  # most calls of a runner at a server; the mean demand is 137
MEMORY = 300  # calls of all runners that fill a server's cache; the mean demand is 410
SAMPLE_SECONDS = 1.0
LEAST = Target("at least", 0.95)


@dataclass
class _Runner:
    """A runner, with its own view of the servers."""

    limits: dict[str, float]
    waiting: WaitingCalls
    in_flight: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(NAMES, 0)))
    rollouts: dict[Waiting, int] = field(default_factory=dict)


@dataclass
class _Run:
    """Result of a simulated run."""

    turns: int = 0
    reached: int = 0
    """Turns at the first server of their group."""
    busiest: float = 0.0
    """Most calls of a server, relative to the mean of all."""
    longest: float = 0.0
    """Longest wait of a call, in seconds."""

    @property
    def share(self) -> float:
        """Return the percentage of turns that reached their group's first server."""
        return 100 * self.reached / self.turns


def measure() -> list[Row]:
    """Return the share with and without one server unavailable for a tenth of the run, and the share when the servers'
    caches are full.
    """
    target = Target("at least", 95.0)
    disturbed = _simulate(AWAY, UNLIMITED)
    rows = [
        Row("turns at their group's first server", disturbed.share, "%", target=target),
        Row("the same with no server away", _simulate(0.0, UNLIMITED).share, "%"),
        Row("calls at the busiest server", disturbed.busiest, "×", "the mean of all"),
    ]
    for limit in (*LIMITS, None):
        name = f"memory for {MEMORY} calls a server" if limit is None else f"limit {limit}"
        ours, plain = _simulate(AWAY, limit), _simulate(AWAY, limit, in_order=True)
        throughput = ours.turns / plain.turns
        rows += [
            Row(f"{name}: turns there", ours.share, "%", f"in order of arrival {plain.share:.1f} %", target=target),
            Row(f"{name}: all turns", 100 * throughput, "%", "in order of arrival", throughput, LEAST),
            Row(f"{name}: longest wait", ours.longest, "s", f"in order of arrival {plain.longest:.1f} s"),
        ]
    return rows


def _simulate(away: float, limit: int | None, *, in_order: bool = False) -> _Run:
    """Simulate one run. `limit` is the most calls of a runner at a server; None: admission.py adapts it. `in_order`: waiting
    calls are admitted in order of arrival.
    """
    clock, run = random.Random(0), _Run()
    start = INITIAL_CALLS if limit is None else limit
    runners = [
        _Runner(dict.fromkeys(NAMES, start), WaitingCalls(0, 0) if in_order else WaitingCalls()) for _ in range(RUNNERS)
    ]
    groups = [f"group-{group * MEMBERS}" for group in range(GROUPS)]
    first = {group: preference(group, NAMES)[0] for group in groups}
    length = TURNS * (CALL_SECONDS + TOOL_SECONDS)
    gone, back, lost = length * (0.5 - away / 2), length * (0.5 + away / 2), NAMES[0]
    # (time, order, rollout, server of the call that ends; "" where one begins); without a rollout runners look, or sample
    events = [(clock.uniform(0, CALL_SECONDS), rollout, rollout, "") for rollout in range(GROUPS * MEMBERS)]
    order = len(events)

    def at(when: float, rollout: int, what: str) -> None:
        nonlocal order
        if when < length:
            order += 1
            heapq.heappush(events, (when, order, rollout, what))

    def admit(runner: _Runner, now: float) -> None:
        able = {name: runner.in_flight[name] for name in NAMES if name != lost or not gone <= now < back}
        limits = {name: int(most) for name, most in runner.limits.items()}
        while (found := runner.waiting.next(able, limits, now)) is not None:
            call, server = found
            able[server] += 1
            runner.in_flight[server] += 1
            run.turns, run.reached = run.turns + 1, run.reached + (server == first[call.group])
            run.longest = max(run.longest, now - call.since)
            total = sum(each.in_flight.total() for each in runners)
            here = sum(each.in_flight[server] for each in runners)
            run.busiest = max(run.busiest, here * SERVERS / max(total, GROUPS * MEMBERS / 2))
            at(now + clock.expovariate(1 / CALL_SECONDS), runner.rollouts.pop(call), server)

    heapq.heapify(events)
    at(CHECK_SECONDS, -1, "look")
    at(SAMPLE_SECONDS, -1, "sample")
    while events:
        now, _, rollout, what = heapq.heappop(events)
        if what == "sample":
            for name in NAMES if limit is None else ():
                usage = min(1.0, sum(each.in_flight[name] for each in runners) / MEMORY)
                for each in runners:
                    each.limits[name] = next_limit(each.limits[name], each.in_flight[name], Pressure(usage, 0))
            at(now + SAMPLE_SECONDS, -1, what)
        elif what == "look":
            for each in runners:
                admit(each, now)
            at(now + CHECK_SECONDS, -1, what)
        else:
            group = rollout // MEMBERS
            runner = runners[group % RUNNERS]
            if what:
                runner.in_flight[what] -= 1
                at(now + clock.expovariate(1 / TOOL_SECONDS), rollout, "")
            else:
                call = Waiting(groups[group], frozenset(), now)
                runner.rollouts[call] = rollout
                runner.waiting.add(call)
            admit(runner, now)
    return run
