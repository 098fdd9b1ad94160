"""Time from an executor's start until it listens, which every sandbox takes longer to start. Plain mode, as in a sandbox
with one workspace.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.conversation import ROOT
from benchmarks.measuring import quantile
from benchmarks.report import Row, Target

STARTS = 20
BARE, OURS = "python3 -c pass", "our executor"


def measure() -> list[Row]:
    seconds: dict[str, list[float]] = {BARE: [], OURS: []}
    for number in range(STARTS + 1):
        taken = {BARE: _bare(), OURS: _executor()}
        if number:  # the first round only reads the files from disk
            for who, found in taken.items():
                seconds[who].append(found)
    bare, ours = (quantile(seconds[who], 0.5) * 1e3 for who in (BARE, OURS))
    return [
        Row(f"{OURS}, p50", ours, "ms", f"{BARE} {bare:.3g} ms", target=Target("at most", 300)),
        Row(f"{OURS}, p99", quantile(seconds[OURS], 0.99) * 1e3, "ms"),
    ]


def _bare() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - started


def _executor() -> float:
    """Return the seconds until the ready file exists, which the executor writes when it listens."""
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        root, state, ready = (Path(folder) / name for name in ("root", "state", "ready"))
        root.mkdir()
        state.mkdir()
        config = {
            "listen": f"unix:{folder}/socket",
            "tokenSha256": hashlib.sha256(os.urandom(16)).hexdigest(),
            "mode": "Plain",
            "places": 1,
            "stateDir": str(state),
            "root": str(root),
            "readyFile": str(ready),
        }
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "agent_runtime.executor", "--config", "-"], stdin=subprocess.PIPE, cwd=ROOT
        )
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(config).encode())
            process.stdin.close()
            while not ready.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the executor ended with {process.returncode} before it was ready")
                time.sleep(0.001)
            return time.perf_counter() - started
        finally:
            process.terminate()
            process.wait()
