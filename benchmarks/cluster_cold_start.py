"""A new sandbox, from its request to the first tool result, compared with a bare pod of the same image."""

from benchmarks.measuring import quantile
from benchmarks.on_cluster import any_cluster, runner_process
from benchmarks.report import Row, Target, comparison
from tests.support.cluster import QUICKSTART_IMAGE

TIMES = 30


def measure() -> list[Row]:
    ours, bare = [], []
    with runner_process(any_cluster()) as (runner, _):
        for number in range(TIMES + 1):
            taken = runner.ask(call="cold")["seconds"], runner.ask(call="pod", image=QUICKSTART_IMAGE)["seconds"]
            if number:  # the first round only loads the images into the page cache
                ours += taken[0]
                bare += taken[1]
    sandbox, pod = quantile(ours, 0.5), quantile(bare, 0.5)
    return [
        Row("sandbox, created to first tool result, p90", quantile(ours, 0.9), "s"),
        Row("bare pod, created to Ready, p90", quantile(bare, 0.9), "s"),
        comparison("sandbox, p50", sandbox, "s", "bare pod", pod, Target("at most", 1.3)),
    ]
