"""Loading 10,000 validated instances in SWE-bench's format from Parquet, compared with reading the same file with
pyarrow.
"""

import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.conversation import Subject
from benchmarks.report import Row, Target, comparison

SUBJECT = "benchmarks.subjects.task_loading"
INSTANCES = 10_000
WARM_UP = 10
TRIES = 5
SEED = 6
PATCH_LINES = 45
MB = 1e6


def measure() -> list[Row]:
    """Return the seconds and the memory of all three ways to read the file."""
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        file, small = Path(folder) / "instances.parquet", Path(folder) / "small.parquet"
        write_instances(file, INSTANCES)
        write_instances(small, WARM_UP)
        tries = [{reader: _ask(reader, file, small) for reader in ("values", "table", "tasks")} for _ in range(TRIES)]
        size = file.stat().st_size
    best = {
        reader: {figure: min(found[reader][figure] for found in tries) for figure in ("seconds", "bytes")}
        for reader in tries[0]
    }
    what = f"{INSTANCES:,} instances, {size / MB:.0f} MB"
    return [
        *_comparison_rows(what, best["tasks"], best["values"], Target("at most", 3), Target("at most", 2)),
        *_comparison_rows("the same, pyarrow's table alone", best["tasks"], best["table"]),
    ]


def _comparison_rows(
    what: str,
    ours: Mapping[str, float],
    theirs: Mapping[str, float],
    time: Target | None = None,
    memory: Target | None = None,
) -> list[Row]:
    peak = f"{what}: peak of memory over the start"
    return [
        comparison(what, ours["seconds"], "s", "pyarrow", theirs["seconds"], time),
        comparison(peak, ours["bytes"] / MB, "MB", "pyarrow", theirs["bytes"] / MB, memory),
    ]


def _ask(reader: str, file: Path, small: Path) -> dict[str, float]:
    with Subject(SUBJECT) as subject:
        subject.ask(reader=reader, file=str(small))
        found: dict[str, float] = subject.ask(reader=reader, file=str(file))
        return found


def write_instances(file: Path, count: int) -> None:
    """Write a file of instances with distinct texts, the same in every call."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chance = random.Random(SEED)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz_", k=chance.randint(3, 12))) for _ in range(5000)]

    def text(characters: int) -> str:
        return " ".join(chance.choices(words, k=characters // 8))

    def patch(path: str) -> str:
        head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1,3 +1,48 @@\n"
        return head + "".join(f"+    {text(60)}\n" for _ in range(PATCH_LINES))

    def instance(number: int) -> dict[str, Any]:
        path = f"{chance.choice(words)}/{chance.choice(words)}"
        names = [
            f"tests/{path}.py::Test{number}::test_{text(24).replace(' ', '_')}" for _ in range(chance.randint(5, 200))
        ]
        return {
            "repo": f"owner/{chance.choice(words)}",
            "instance_id": f"owner__name-{number}",
            "base_commit": f"{number:040x}",
            "patch": patch(f"src/{path}.py"),
            "test_patch": patch(f"tests/{path}.py"),
            "problem_statement": text(2000),
            "hints_text": text(1000),
            "created_at": "2026-01-01T00:00:00Z",
            "version": "1.0",
            "FAIL_TO_PASS": json.dumps(names[:2]),
            "PASS_TO_PASS": json.dumps(names[2:]),
            "environment_setup_commit": f"{number:040x}",
        }

    pq.write_table(pa.Table.from_pylist([instance(number) for number in range(count)]), file)
