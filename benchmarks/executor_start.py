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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as root:
        started = time.perf_counter()
        with running_executor(mode="Plain", places=1, root=root):
            return time.perf_counter() - started


@contextmanager
def running_executor(**settings: Any) -> Iterator[tuple[str, str]]:
    """Yield the address and the token of an executor with these settings, as soon as it listens: it then writes its ready
    file.
    """
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        address, token = f"unix:{folder}/socket", os.urandom(16).hex()
        state, ready = Path(folder) / "state", Path(folder) / "ready"
        state.mkdir()
        config = {
            "listen": address,
            "tokenSha256": hashlib.sha256(token.encode()).hexdigest(),
            "stateDir": str(state),
            "readyFile": str(ready),
            **settings,
        }
        command = [sys.executable, "-m", "agent_runtime.executor", "--config-json", json.dumps(config)]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"the executor ended with {process.returncode} before it was ready")
                time.sleep(0.001)
            yield address, token
        finally:
            process.terminate()
            process.wait()
