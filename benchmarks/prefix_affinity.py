"""How often a turn finds its group's prefix: the share of turns that reach the first server of their group's full order.

A simulation in simulated time of what runners do (agent_runtime/models/served/routing.py): the same figures on any machine.
"""

import heapq
import random
from collections import Counter

from agent_runtime.models.served.routing import choose, preference
from benchmarks.report import Row, Target

GROUPS, RUNNERS, SERVERS = 512, 3, 8
MEMBERS, TURNS = 8, 30
CALL_SECONDS, TOOL_SECONDS = 8.0, 2.0  # means of exponential times: most rollouts are at the model at any moment
AWAY = 0.1  # of the run, in its middle
NAMES = [f"server-{number}" for number in range(SERVERS)]
LIMITS = dict.fromkeys(NAMES, GROUPS * MEMBERS)  # the bound alone is measured, not the servers' memory


def measure() -> list[Row]:
    """The share with all groups at once, with one server away for a tenth of the run and without."""
    reached, busiest = _simulate(AWAY)
    undisturbed, _ = _simulate(0.0)
    return [
        Row("turns at their group's first server", reached, "%", target=Target("at least", 95.0)),
        Row("the same with no server away", undisturbed, "%"),
        Row("calls at the busiest server", busiest, "×", "the mean of all"),
    ]


def _simulate(away: float) -> tuple[float, float]:
    """Per cent of turns that reached the first server of their group; most calls of a server, in means of all."""
    clock = random.Random(0)
    in_flight = [Counter(dict.fromkeys(NAMES, 0)) for _ in range(RUNNERS)]
    first = [preference(f"group-{group * MEMBERS}", NAMES)[0] for group in range(GROUPS)]
    length = TURNS * (CALL_SECONDS + TOOL_SECONDS)
    gone, back, lost = length * (0.5 - away / 2), length * (0.5 + away / 2), NAMES[0]
    turns, reached, busiest = 0, 0, 0.0
    # (time, order, rollout, server of the call that ends; None where one begins)
    events = [(clock.uniform(0, CALL_SECONDS), rollout, rollout, "") for rollout in range(GROUPS * MEMBERS)]
    heapq.heapify(events)
    order = len(events)
    while events:
        now, _, rollout, ending = heapq.heappop(events)
        group = rollout // MEMBERS
        calls = in_flight[group % RUNNERS]
        if ending:
            calls[ending] -= 1
            begins, server = now + clock.expovariate(1 / TOOL_SECONDS), ""
        else:
            can_be_asked = {name: calls[name] for name in NAMES if name != lost or not gone <= now < back}
            server = choose(f"group-{group * MEMBERS}", can_be_asked, LIMITS) or ""
            calls[server] += 1
            turns, reached = turns + 1, reached + (server == first[group])
            total = sum(map(Counter.total, in_flight))
            busiest = max(busiest, sum(each[server] for each in in_flight) * SERVERS / max(total, GROUPS * MEMBERS / 2))
            begins = now + clock.expovariate(1 / CALL_SECONDS)
        if begins < length:
            order += 1
            heapq.heappush(events, (begins, order, rollout, server))
    return 100 * reached / turns, busiest
