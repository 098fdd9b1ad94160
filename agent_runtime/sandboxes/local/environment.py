"""The machine's files that a workspace can see: masked paths, bind mounts, and PATH. PATH has the machine's folders,
then the Python environment that runs this program. The environment comes first if it has pytest and the machine's
`python3` does not, so that `python3 -m pytest` works. It is mounted read-only, even below a masked home.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_runtime.sandboxes.images.files import STANDARD_PATH

# Folders with private or live content: homes; secrets that the tools' root could read, because it has their owner's
# rights; sockets that give root on the machine.
HOMES = ("/root", "/home")
SECRETS = (
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/etc/ssh",
    "/etc/ssl/private",
    "/etc/pki/private",
    "/etc/krb5.keytab",
    "/etc/kubernetes",
    "/etc/rancher",
    "/etc/NetworkManager",
    "/etc/wireguard",
    "/var/lib/cloud",
    "/var/lib/kubelet",
    "/var/lib/rancher",
    "/var/spool",
    "/var/mail",
    "/var/backups",
)
LIVE_STATE = ("/run", "/var/lib/docker", "/var/lib/containers", "/var/lib/containerd", "/var/log")
# Folders that are never masked as homes, although some system accounts have them as home.
SYSTEM_FOLDERS = frozenset({"/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/sbin", "/srv"}) | {
    "/sys", "/tmp", "/usr", "/usr/bin", "/usr/local", "/usr/sbin", "/var", "/var/lib", "/nonexistent",
}  # fmt: skip
# Prefixes of the machine's own Python. They are visible in workspaces anyway, and on PATH.
SYSTEM_PREFIXES = frozenset({"/", "/usr", "/usr/local"})
FIRST_ORDINARY_UID = 1000
# find_spec avoids the import, which takes ten times as long. -s, because a home's site-packages are masked. The result
# is printed, because a stub in place of python3 may exit with code 0.
HAS_PYTEST = ("-s", "-c", "import importlib.util; print(importlib.util.find_spec('pytest') is not None)")


@dataclass(frozen=True)
class PythonEnvironment:
    """The Python environment that runs this program."""

    bin: str
    """Folder of its `python3` and of its packages' programs."""
    prefixes: tuple[str, ...]
    """All folders that it needs: its own, its base installation's, and those of links."""

    @property
    def is_system(self) -> bool:
        return os.path.dirname(self.bin) in SYSTEM_PREFIXES


def running_environment() -> PythonEnvironment:
    return PythonEnvironment(
        bin=os.path.join(sys.prefix, "bin"), prefixes=environment_prefixes(sys.executable, sys.prefix, sys.base_prefix)
    )


def environment_prefixes(executable: str, prefix: str, base_prefix: str) -> tuple[str, ...]:
    """Return the folders that an interpreter needs to locate itself, including those of links to it. The machine's own
    (`/usr`) are left out.
    """
    found = [prefix, base_prefix]
    link = executable
    # The kernel's limit of followed links.
    for _ in range(40):
        found.append(os.path.dirname(os.path.dirname(link)))
        if not os.path.islink(link):
            break
        link = os.path.join(os.path.dirname(link), os.readlink(link))
    found.append(os.path.dirname(os.path.dirname(os.path.realpath(executable))))
    clean = (os.path.normpath(folder) for folder in found)
    return tuple(dict.fromkeys(folder for folder in clean if folder not in SYSTEM_PREFIXES))


def masked_paths(private: Iterable[Path], homes: Iterable[str]) -> list[str]:
    """Return the existing paths to mask in every workspace; none is inside another. `private` are this run's folders."""
    wanted = {os.path.realpath(path) for path in (*HOMES, *SECRETS, *LIVE_STATE, *homes, *map(str, private))}
    existing = sorted(path for path in wanted - SYSTEM_FOLDERS if os.path.exists(path))
    return [path for path in existing if not any(lies_below(path, other) for other in existing if other != path)]


def people_homes() -> list[str]:
    """Return the home folders of this machine's users."""
    accounts = (account for account in pwd.getpwall() if account.pw_uid == 0 or account.pw_uid >= FIRST_ORDINARY_UID)
    return [os.path.expanduser("~"), *(account.pw_dir for account in accounts)]


def lies_below(path: str, folder: str) -> bool:
    """Whether a path is the folder or inside it. Both must be absolute and normalised."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def binds(environment: PythonEnvironment) -> list[dict[str, object]]:
    """Return the executor's `binds` for a Python environment."""
    return [{"source": os.path.realpath(prefix), "target": prefix, "readOnly": True} for prefix in environment.prefixes]


def search_path(machine: str, environment_bin: str | None, masks: Sequence[str], *, environment_first: bool) -> str:
    """Return PATH of all commands: the machine's visible folders, and the environment's last, or first."""
    folders = [folder for folder in (*machine.split(":"), *STANDARD_PATH) if folder.startswith("/")]
    visible = [folder for folder in folders if not any(lies_below(os.path.realpath(folder), mask) for mask in masks)]
    own = [environment_bin] if environment_bin else []
    order = own + visible if environment_first else [folder for folder in visible if folder not in own] + own
    return ":".join(dict.fromkeys(order))


async def has_pytest(python: str | None) -> bool:
    """Whether that interpreter can import pytest without this process's environment variables."""
    if python is None:
        return False
    process = await asyncio.create_subprocess_exec(
        python, *HAS_PYTEST, env={"PATH": os.defpath}, cwd="/",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    output, _ = await process.communicate()
    return output.strip() == b"True"


async def choose_search_path(
    environment: PythonEnvironment | None, masks: Sequence[str], variables: Mapping[str, str]
) -> tuple[str, str]:
    """Return (PATH of all commands, the reason in one line). `environment` is None if commands cannot read it."""
    machine = variables.get("PATH", "")
    if environment is None or environment.is_system:
        return search_path(machine, None, masks, environment_first=False), "the machine's own"
    own = environment.bin
    last = search_path(machine, own, masks, environment_first=False)
    rest = ":".join(folder for folder in last.split(":") if folder != own)
    found = shutil.which("python3", path=rest)
    if await has_pytest(found):
        return last, f"the machine's own, then {own}"
    if not await has_pytest(os.path.join(own, "python3")):
        return last, f"the machine's own, then {own}; neither has pytest"
    why = f"{found} has no pytest" if found else "the machine has no python3"
    return search_path(machine, own, masks, environment_first=True), f"{own} first, because {why}"


def readable_by(environment: PythonEnvironment, uid: int) -> bool:
    """Whether a user may enter all folders of an environment, judging by the permission bits."""
    return all(may_enter(prefix, uid) for prefix in environment.prefixes)


def may_enter(folder: str, uid: int) -> bool:
    """Whether a user may enter a folder and all its parents, judging by the permission bits."""
    place = Path(os.path.realpath(folder))
    found = (os.stat(above) for above in (place, *place.parents))
    return uid == 0 or all(info.st_mode & (0o100 if info.st_uid == uid else 0o001) for info in found)
