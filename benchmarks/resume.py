"""Resuming a large job: time of a restarted runner until its first rollout runs, by the number of sealed rollouts."""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conversation import Subject
from benchmarks.jobs import PROMPT, SAYS_DONE, rollout_job
from benchmarks.report import Row, Target, beside

SEALED = (2_500, 5_000, 10_000)
CONCURRENCY = 64
LEFT = 1_000  # tasks beyond the last size, so that there is something to go on with
TRIES = 3  # the quickest counts: what slows a try down is the machine's other work
LINEAR = 1.5  # what a seal of the second half costs, times one of the first: quadratic growth would show as 3
ENGINE = "benchmarks.subjects.engine"


def measure() -> list[Row]:
    """Return seconds to the first rollout at each size, and the growth from the smallest to the largest."""
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        tasks = Path(folder) / "tasks.jsonl"
        lines = (json.dumps({"name": f"task-{n:06}", "prompt": PROMPT}) + "\n" for n in range(SEALED[-1] + LEFT))
        tasks.write_text("".join(lines))
        source = {"from": {"uri": str(tasks)}}
        job = rollout_job(f"{folder}/output", tasks=source, model=SAYS_DONE, concurrency=CONCURRENCY).wire()
        nothing = _taken_up(job)
        resumed = []
        for more in (size - before for before, size in zip((0, *SEALED), SEALED, strict=False)):
            with Subject(ENGINE) as runner:
                runner.ask(job=job, stop_after=more)
            resumed.append(_taken_up(job))
    (none, at_none), _, (half, at_half), (full, at_full) = nothing, *resumed
    early, late = (at_half - at_none) / (half - none), (at_full - at_half) / (full - half)
    return [
        *(Row(f"{sealed:,} sealed, to the first rollout", seconds, "s") for sealed, seconds in (nothing, *resumed)),
        beside("a seal of the second half", late * 1e3, "ms", "of the first", early * 1e3, Target("at most", LINEAR)),
    ]


def _taken_up(job: dict[str, Any]) -> tuple[int, float]:
    """Return the job's seals, and a new process's seconds from its call to its first rollout."""
    tries = []
    for _ in range(TRIES):
        with Subject(ENGINE) as runner:
            found = runner.ask(job=job, stop_after=1)
        tries.append((found["first_rollout_seconds"], found["sealed_before"]))
    seconds, sealed = min(tries)
    return sealed, seconds
