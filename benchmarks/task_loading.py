"""Loading 10,000 instances in SWE-bench's form from Parquet, each validated, beside reading the same file with pyarrow.

Both in a process of their own, warmed up with a file of ten, in turns; the quickest try of each counts. What pyarrow reads
are all columns, as `pyarrow.parquet.read_table` does. Sizes are about those of SWE-bench Verified: 2 KB of issue, 3 KB of
patch and of tests, some hundred test names.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conversation import Subject
from benchmarks.report import Row, Target

SUBJECT = "benchmarks.subjects.task_loading"
INSTANCES = 10_000
WARM_UP = 10
TRIES = 3
SEED = 6
PATCH_LINES = 45
MB = 1e6


def measure() -> list[Row]:
    """Seconds and memory of both."""
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        file, small = Path(folder) / "instances.parquet", Path(folder) / "small.parquet"
        write_instances(file, INSTANCES)
        write_instances(small, WARM_UP)
        pairs = [(_ask("pyarrow", file, small), _ask("load_tasks", file, small)) for _ in range(TRIES)]
        size = file.stat().st_size
    theirs, ours = (
        {figure: min(pair[side][figure] for pair in pairs) for figure in ("seconds", "bytes")} for side in (0, 1)
    )
    return [
        Row(
            f"{INSTANCES:,} instances, {size / MB:.0f} MB",
            ours["seconds"],
            "s",
            f"pyarrow {theirs['seconds']:.3g} s",
            ours["seconds"] / theirs["seconds"],
            Target("at most", 3),
        ),
        Row(
            "peak of memory over the start",
            ours["bytes"] / MB,
            "MB",
            f"pyarrow {theirs['bytes'] / MB:.0f} MB",
            ours["bytes"] / theirs["bytes"],
            Target("at most", 2),
        ),
    ]


def _ask(reader: str, file: Path, small: Path) -> dict[str, float]:
    with Subject(SUBJECT) as subject:
        subject.ask(reader=reader, file=str(small))
        found: dict[str, float] = subject.ask(reader=reader, file=str(file))
        return found


def write_instances(file: Path, count: int) -> None:
    """A file of instances with texts of their own, the same for every call."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

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
