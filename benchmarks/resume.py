"""Resuming a large job: time until a restarted runner starts its first rollout, by the number of sealed rollouts."""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conversation import Subject
from benchmarks.jobs import SAYS_DONE, rollout_job, tasks_in
from benchmarks.report import Row, Target, comparison

SEALED = (2_500, 5_000, 10_000)
CONCURRENCY = 64
LEFT = 1_000  # tasks beyond the last size, so that some rollouts are left to run
TRIES = 3  # the fastest one counts, because only other load of the machine makes a try slower
LINEAR = (
    1.5  # largest allowed ratio of the time of a seal in the second half to one in the first; 3 if it were quadratic
)
ENGINE = "benchmarks.subjects.engine"


def measure() -> list[Row]:
    """Return seconds to the first rollout at each size, and the growth from the smallest to the largest."""
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        tasks = tasks_in(Path(folder) / "tasks.jsonl", SEALED[-1] + LEFT)
        job = rollout_job(f"{folder}/output", tasks=tasks, model=SAYS_DONE, concurrency=CONCURRENCY).wire()
        nothing = _resume(job)
        resumed = []
        for more in (size - before for before, size in zip((0, *SEALED), SEALED, strict=False)):
            with Subject(ENGINE) as runner:
                runner.ask(job=job, stop_after=more)
            resumed.append(_resume(job))
    (none, at_none), _, (half, at_half), (full, at_full) = nothing, *resumed
    early, late = (at_half - at_none) / (half - none), (at_full - at_half) / (full - half)
    return [
        *(Row(f"{sealed:,} sealed, to the first rollout", seconds, "s") for sealed, seconds in (nothing, *resumed)),
        comparison(
            "a seal of the second half", late * 1e3, "ms", "of the first", early * 1e3, Target("at most", LINEAR)
        ),
    ]


def _resume(job: dict[str, Any]) -> tuple[int, float]:
    """Resume the job in a new process; return its number of seals and the seconds until the first rollout starts."""
    tries = []
    for _ in range(TRIES):
        with Subject(ENGINE) as runner:
            found = runner.ask(job=job, stop_after=1)
        tries.append((found["first_rollout_seconds"], found["sealed_before"]))
    seconds, sealed = min(tries)
    return sealed, seconds
