"""A tool call in a pod: `true` through the executor, compared with `pods/exec` of the same pod, both from a runner's
pod.
"""

from benchmarks.conversation import Process
from benchmarks.measuring import quantile
from benchmarks.on_cluster import any_cluster, runner_process
from benchmarks.report import Row, Target, comparison, percentile_rows

ROUNDS = 5  # alternating, so that other load of the machine affects both
CALLS = 400  # per round, through the executor
EXECS = 40  # per round, through pods/exec: each takes 20 to 50 times as long
OURS, EXEC = "our executor", "pods/exec"


def measure() -> list[Row]:
    """Return p50 and p99 one at a time, p50 with 8 at once, and the ratio to pods/exec."""
    with runner_process(any_cluster()) as (runner, _):
        seconds = {at_once: _rounds(runner, at_once) for at_once in (1, 8)}
    rows: list[Row] = []
    for at_once, factor in ((1, 20), (8, 50)):
        for who, found in seconds[at_once].items():
            rows += percentile_rows(f"{who}, {at_once} at once", found)
        ours, peer = (quantile(seconds[at_once][who], 0.5) * 1e3 for who in (OURS, EXEC))
        what, target = f"times faster, {at_once} at once", Target("at least", factor)
        rows.append(comparison(what, ours, "ms", EXEC, peer, target, inverse=True))
    return rows


def _rounds(runner: Process, at_once: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {OURS: [], EXEC: []}
    for number in range(ROUNDS + 1):
        taken = {
            OURS: runner.ask(call="tool", times=CALLS, at_once=at_once)["seconds"],
            EXEC: runner.ask(call="exec", times=EXECS, at_once=at_once)["seconds"],
        }
        if number:  # the first round is a warm-up
            for who, found in taken.items():
                seconds[who] += found
    return seconds
