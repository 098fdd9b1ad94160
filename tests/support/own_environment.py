"""Separate Python environments for packages on which the product does not depend, created once and kept in the cache."""

import asyncio
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def own_environment(name: str, *requirements: str) -> Path:
    """Return the folder of a virtual environment with these packages; each list of packages has its own environment.

    A missing one is created, which needs a package index and takes a minute or two. Concurrent callers wait for it.
    """
    wanted = "\n".join((*requirements, sys.version))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-rollouts" / "environments"
    folder = cache / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, *requirements], check=True)
            (folder / "installed").touch()
    return folder


ROLLOUTCTL = "from rolloutctl.main import app; app()"


async def start_rolloutctl(folder: Path, environment: Path) -> asyncio.subprocess.Process:
    """Start `rolloutctl run job.yaml` in such an environment. On this machine, its programs are in every sandbox."""
    return await asyncio.create_subprocess_exec(
        str(environment / "bin" / "python"), "-c", ROLLOUTCTL, "run", "job.yaml", "-o", "json",
        cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def run_killed(folder: Path, environment: Path, kill: asyncio.Event, mend: Callable[[], None]) -> str:
    """Run the job to its end. Whenever `kill` is set, its runner is killed, `mend` is called, and another runner
    continues. Returns the run's folder.
    """
    while True:
        process = await start_rolloutctl(folder, environment)
        ended = asyncio.ensure_future(process.communicate())
        asked = asyncio.ensure_future(kill.wait())
        await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not kill.is_set():
            output, errors = ended.result()
            assert output, errors.decode()[-3000:]
            found: str = json.loads(output)["folder"]
            return found
        process.send_signal(signal.SIGKILL)
        await ended
        kill.clear()
        mend()
