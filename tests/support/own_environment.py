"""A Python environment of its own for a package that the product does not depend on: made once, kept in the cache."""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path


def own_environment(name: str, *requirements: str) -> Path:
    """The folder of a virtual environment that has these packages; another list of them is another environment.

    Made where it is missing, which needs a package index and takes a minute or two; whoever else wants it meanwhile waits.
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
