"""A workspace on a running sandbox: time from a runner's request for it to the result of its first tool call."""

from benchmarks.measuring import quantile
from benchmarks.on_cluster import AuditLog, any_cluster, runner_process
from benchmarks.report import Row, Target, percentile_rows

TIMES = 300  # sequential requests
BURSTS, BURST = 20, 10


def measure() -> list[Row]:
    """Return p50 and p99 of sequential requests and p50 of bursts, each for a prepared group and for new groups; and the
    API writes during the measurement.
    """
    cluster = any_cluster()
    with runner_process(cluster) as (runner, job):
        runner.ask(call="workspaces", times=BURST, at_once=BURST, new_group=False)  # creates and warms up the sandbox
        audit = AuditLog(cluster) if cluster.details else None
        single, burst = {}, {}
        for new_group in (False, True):
            single[new_group] = runner.ask(call="workspaces", times=TIMES, at_once=1, new_group=new_group)["seconds"]
            burst[new_group] = runner.ask(call="workspaces", times=BURSTS * BURST, at_once=BURST, new_group=new_group)[
                "seconds"
            ]
        writes = None if audit is None else audit.writes(job.namespace).total()
    fork, new = "member of a prepared group", "first member of a group, which prepares it"
    rows = [
        Row(f"{fork}, p50", quantile(single[False], 0.5) * 1e3, "ms", target=Target("at most", 15)),
        Row(f"{fork}, p99", quantile(single[False], 0.99) * 1e3, "ms", target=Target("at most", 60)),
        Row(f"{fork}, burst of {BURST}, p50", quantile(burst[False], 0.5) * 1e3, "ms", target=Target("at most", 50)),
        *percentile_rows(new, single[True]),
        *percentile_rows(f"{new}, burst of {BURST}", burst[True], [50]),
    ]
    if writes is not None:
        what = f"API writes of runner and operator for these {2 * (TIMES + BURSTS * BURST)} workspaces"
        rows.append(Row(what, writes, "writes", target=Target("at most", 0)))
    return rows
