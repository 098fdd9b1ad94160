"""The operator's part of policy updates as a process that can be killed. Files in a folder replace the API server.

python -m tests.support.policy_updater FOLDER

Reads `fleet.json` (the contents of the API server: spec, pods, runners' acknowledgements), and writes `status.json`.
"""

import asyncio
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollout_api.inference.description import EngineType
from rollout_api.inference.engines import DESCRIPTIONS
from rollout_api.model_server import ModelServerStatus, PolicySource, TransferMode
from rollout_operator.actions import Ask, Ref
from rollout_operator.model_server.control import Control
from rollout_operator.model_server.operations import ServerOperations
from rollout_operator.model_server.policy import decide, load_limit
from rollout_operator.model_server.update_state import AdapterWanted, Runner, Seen
from rollout_operator.server_contact import LoadOptions, Server, ServerContact

MODEL = "policy"
TOKEN = "a-token"
TRY_SECONDS = 240.0
"""Time limit of one fetch or push. A version that takes longer is given up for good, which must not happen on a busy
machine.
"""
REF = Ref("ModelServer", "lab", MODEL)


def write(path: Path, data: Any) -> None:
    """Write a file completely or not at all."""
    new = path.with_suffix(f".{os.getpid()}.new")
    new.write_text(json.dumps(data))
    new.replace(path)


def read_status(folder: Path) -> ModelServerStatus:
    """Return the written status, or the initial one."""
    path = folder / "status.json"
    return ModelServerStatus.model_validate_json(path.read_bytes()) if path.exists() else ModelServerStatus()


def observe(folder: Path, operations: ServerOperations) -> Seen:
    """Read everything at one moment."""
    fleet = json.loads((folder / "fleet.json").read_bytes())
    servers = []
    for pod in fleet["pods"]:
        known = operations.known.get((pod["uid"], pod["restarts"]), ServerContact())
        servers.append(
            Server(
                name=pod["name"],
                uid=pod["uid"],
                restarts=pod["restarts"],
                url=pod["url"],
                control_url=pod["control"],
                up=pod["up"],
                leaving=False,
                loaded=True,
                **vars(known),
            )
        )
    return Seen(
        wanted=PolicySource.model_validate(fleet["policy"]),
        asleep=fleet.get("asleep", False),
        mode=TransferMode(fleet["mode"]),
        min_ready=fleet["minReady"],
        load_limit=load_limit(TRY_SECONDS),
        status=read_status(folder),
        servers=servers,
        runners=[Runner(key, update) for key, update in fleet["runners"].items()],
        now=datetime.now(UTC),
        adapters={
            name: AdapterWanted(PolicySource.model_validate(adapter), fleet["minReady"])
            for name, adapter in fleet.get("adapters", {}).items()
        },
    )


async def run(folder: Path) -> None:
    """Observe, decide, send requests, write the status; until killed."""
    fleet = json.loads((folder / "fleet.json").read_bytes())
    operations = ServerOperations(Control(backoff_seconds=0.05), may_ask=lambda: True)
    again = asyncio.Event()
    operations.on_done = lambda ref: again.set()
    asyncio.get_running_loop().create_task(operations.run())
    while True:
        seen = observe(folder, operations)
        decision = decide(seen)
        options = LoadOptions(
            namespace=REF.namespace,
            mode=seen.mode,
            model=MODEL,
            model_path=str(folder / "model"),
            fetch_seconds=TRY_SECONDS,
            hook=fleet["hook"],
            push_seconds=TRY_SECONDS,
            world_size=1,
            update=seen.status.policy.update,
            token=TOKEN,
            engine=DESCRIPTIONS[EngineType(fleet.get("engine", EngineType.VLLM))],
            sleeps="asleep" in fleet,
        )
        for task in decision.tasks:
            operations.start(REF, Ask(task.operation, task.servers, options))
        status = seen.status.model_copy(
            update={"policy": decision.policy, "servers": list(decision.servers), "adapters": dict(decision.adapters)}
        )
        if status != seen.status:
            write(folder / "status.json", status.wire())
            continue
        write(folder / "story.json", {"reason": decision.reason, "message": decision.message})
        again.clear()
        try:
            async with asyncio.timeout(0.05):
                await again.wait()
        except TimeoutError:
            pass


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1])))
