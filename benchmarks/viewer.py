"""The viewer of a run with 100,000 rollouts on disk: time to the first answer, until all results are read, and for rows of
the table. Then, of a running one, the time from the seal of a rollout until its pages show it. `rolloutctl view` runs in a
separate process and is asked over HTTP, as by a browser.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from agent_runtime.recording.health import HEALTH, HealthReport
from agent_runtime.recording.segments import json_bytes
from benchmarks.report import Row, Target
from tests.support.made_up_runs import made_up_rollout, write_bare_run, write_rollout, write_run

ROLLOUTS = 100_000
LIVE_ROLLOUTS, SHOWN_BEFORE = 32, 8
PHASE_SECONDS = 0.37  # seals fall on all moments of the pages' own interval of a second
PAGE_SECONDS = 1.0  # LOOK_MILLISECONDS of rolloutctl/viewer/frontend/src/parts.tsx
PATIENCE_SECONDS = 600


def measure() -> list[Row]:
    """Return the times of a large run, and of a live one."""
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        return [*_large(Path(folder) / "large"), *_live(Path(folder) / "live")]


def _large(output: Path) -> list[Row]:
    run = write_bare_run(output, "large", ROLLOUTS).name
    with _viewer(output) as url:
        began = time.perf_counter()
        _read(url)
        _answer(url, f"run?run={run}")
        first = time.perf_counter() - began
        while _answer(url, f"run?run={run}")["isReading"]:
            time.sleep(0.2)
        whole = time.perf_counter() - began
        rows = f"rollouts?run={run}&sort=reward&offset={ROLLOUTS // 2}&limit=100"
        asked = time.perf_counter()
        assert _answer(url, rows)["count"] == ROLLOUTS
        table = time.perf_counter() - asked
    what = f"{ROLLOUTS:,} rollouts"
    return [
        Row(f"{what}: first page and figures", first, "s", target=Target("at most", 1)),
        Row(f"{what}: all results read", whole, "s"),
        Row(f"{what}: 100 rows from the middle, sorted", table, "s"),
    ]


def _live(output: Path) -> list[Row]:
    began = time.time()
    rollouts = [made_up_rollout(index, hostile=False, began=began) for index in range(LIVE_ROLLOUTS)]
    folder = write_run(output, "live", rollouts[:SHOWN_BEFORE], total=LIVE_ROLLOUTS + 1, finished=False, created=began)
    _report(folder)
    sealed, on_run = list[float](), list[float]()
    with (
        _viewer(output) as url,
        urllib.request.urlopen(f"{url}api/events?run={folder.name}") as events,
        ThreadPoolExecutor() as readers,
    ):
        _until(events, SHOWN_BEFORE)
        listed = readers.submit(_lists, url)
        for number, rollout in enumerate(rollouts[SHOWN_BEFORE:], SHOWN_BEFORE + 1):
            time.sleep(number * PHASE_SECONDS % 1)
            _report(folder)
            write_rollout(folder, rollout)
            sealed.append(time.perf_counter())
            _until(events, number)
            on_run.append(time.perf_counter() - sealed[-1])
    on_runs = [
        next(at for at, count in listed.result() if count >= number) - since
        for number, since in enumerate(sealed, SHOWN_BEFORE + 1)
    ]
    return [
        row
        for page, delays in (("its run's page", on_run), ("the Runs page", on_runs))
        for row in (
            Row(f"a sealed rollout is on {page}, {len(delays)} times: median", median(delays), "s"),
            Row(f"a sealed rollout is on {page}: longest", max(delays), "s", target=Target("at most", 2)),
        )
    ]


def _report(folder: Path) -> None:
    """Report that a process works on the run."""
    (folder / HEALTH).mkdir(exist_ok=True)
    (folder / HEALTH / "0.json").write_bytes(json_bytes(HealthReport(time=time.time())))


@contextmanager
def _viewer(output: Path) -> Iterator[str]:
    command = [str(Path(sys.executable).with_name("rolloutctl")), "view", str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://\S+/", line)))
        finally:
            process.terminate()


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        content: bytes = answer.read()
        return content


def _answer(url: str, path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_read(f"{url}api/{path}"))
    return found


def _until(events: Any, sealed: int) -> None:
    """Read server-sent events until one tells of so many sealed rollouts."""
    for line in events:
        if line.startswith(b"data: ") and json.loads(line[6:]).get("sealed") == sealed:
            return
    raise AssertionError("the viewer has ended the events")


def _lists(url: str) -> list[tuple[float, int]]:
    """Ask for the list of runs as its page does, until all rollouts are sealed. Return times, and how many were sealed."""
    found = list[tuple[float, int]]()
    while not found or found[-1][1] < LIVE_ROLLOUTS:
        (run,) = _answer(url, "runs")["runs"]
        found.append((time.perf_counter(), run["sealed"]))
        time.sleep(PAGE_SECONDS)
    return found
