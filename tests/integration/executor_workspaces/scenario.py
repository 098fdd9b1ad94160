"""A whole life of a host in a separate process with only the standard library: `scenario.py MODE STATE_DIR [hold]`.

Prints what it observed as one JSON object. With `hold` it prints that while everything still runs, and waits to be
killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from agent_runtime.executor.overlay import HostFailure, open_host, start_zygote
from agent_runtime.executor.overlay.config import HostConfig

start_zygote()

import asyncio  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from typing import Any  # noqa: E402

from agent_runtime.executor.host import FileFailure, WorkspaceFailure, WorkspaceSpec  # noqa: E402
from agent_runtime.executor.init.channel import StartRequest  # noqa: E402
from agent_runtime.executor.overlay.workspace import Workspace, spawn  # noqa: E402


async def run(workspace: Workspace, script: str, user: str | None = None) -> str:
    readable, writable = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    child = await spawn(workspace, StartRequest(script, user=user), [null, writable, os.dup(writable)])
    loop = asyncio.get_running_loop()
    output = b""
    while block := await loop.run_in_executor(None, os.read, readable, 65536):
        output += block
    os.close(readable)
    await child.exited
    return output.decode()


async def background(workspace: Workspace, script: str) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    await spawn(workspace, StartRequest(script), [null, os.dup(null), os.dup(null)])


async def scenario(mode: str, state_dir: str, hold: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    root = "/" if mode != "Plain" else state_dir
    try:
        host, reason = await open_host(HostConfig(state_dir, mode=mode, places=3, root=root))
    except HostFailure as failure:
        return {"failure": str(failure)}
    seen |= {"mode": host.mode, "reason": reason}
    workspace = await host.create(WorkspaceSpec("first"))
    seen["id"] = await run(workspace, "id -u; cat /proc/self/uid_map")
    seen["wrote"] = await run(workspace, "echo x > made && echo $?")
    await background(workspace, "(setsid sleep 3001 &); sleep 3002")
    if host.mode == "Overlay":
        seen["host files"] = await run(
            workspace, "stat -c %u /etc/passwd; ls /tmp | wc -l; test -w /dev/shm && echo shm"
        )
        seen["other user"] = await _refused(run(workspace, "id -u", user="1234"))
        await workspace.freeze()
        workspace = await host.create(WorkspaceSpec("fork", parent="first"))
        remove = "rm -rf /usr/share/doc 2>/dev/null && mkdir /usr/share/doc && ls /usr/share/doc | wc -l"
        seen["fork"] = await run(workspace, f"cat made; {remove}")
        await background(workspace, "(setsid sleep 3001 &); sleep 3002")
    seen["layers"] = sorted(os.listdir(f"{state_dir}/layers")) if host.mode == "Overlay" else []
    if hold:
        print(json.dumps(seen), flush=True)
        await asyncio.sleep(3600)
    await host.close()
    own = [name for name in seen["layers"] if name[0].isdigit()]
    seen["left"] = [name for name in own if os.path.exists(f"{state_dir}/layers/{name}")]
    seen["descriptors"] = len(os.listdir("/proc/self/fd"))
    return seen


async def _refused(work: Any) -> str:
    try:
        return str(await work)
    except (FileFailure, WorkspaceFailure) as failure:
        return f"refused: {failure}"


print(json.dumps(asyncio.run(scenario(sys.argv[1], sys.argv[2], "hold" in sys.argv))))
