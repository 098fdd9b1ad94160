"""`python -m agent_runtime.runner.parking`: stores the files of a Sandbox, and brings them back into its next pod.

The operator runs it in pods of their own (docs/parking.md). Every try of a Job may be killed, or run on long after the
Job has ended, as on a node that was cut off. So a try decides nothing: each parking has a number, which the operator
assigns, and a try writes only into the folder of its own number. The operator decides which parking counts.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from agent_runtime.recording.layers import Layers
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import StorageError, Store
from agent_runtime.runner.log import configure, log, write_termination_log
from agent_runtime.sandboxes.base import Fence, Fenced, FileError, SandboxFailure, WorkspaceLimit
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, Hold
from rollout_api.base import ApiModel
from rollout_api.cluster import EXECUTOR_PORT, KEY_FILE, RUNNER_FOLDER, STORED_IN_PART, executor_token
from rollout_api.records import Layer

STATE: Final = "state.json"
"""What the folder of a parking has besides its layers. It is written last."""
MOST_BYTES: Final = 1 << 50
"""Limit of one layer. The disk of a sandbox is smaller."""
STILL_SECONDS: Final = 600.0
"""Time limit until the executor's changes in progress have ended."""
FIRST_ANSWER_SECONDS: Final = 60.0
EPOCH: Final = 0
"""The lowest epoch, so that every client can raise its own fence afterwards."""


class ParkingFailed(Exception):
    """The Sandbox cannot be stored, or brought back; the message says why."""


class ParkedWorkspace(ApiModel):
    """One workspace of a parked Sandbox."""

    made: dict[str, Any]
    """Body of the request that created it."""
    attempt: str
    frozen: bool
    network: str | list[str]
    """What it could reach in its phase."""
    layer: Layer
    """Its own files, over those of its parent."""

    @property
    def id(self) -> str:
        return str(self.made["id"])


class ParkedState(ApiModel):
    """The content of `state.json`."""

    version: Literal[1] = 1
    mode: str
    workspaces: list[ParkedWorkspace]
    """In the order in which they were created: parents before their forks, leaders before those that join them."""
    result: str
    """A sentence about what is stored, for people."""


async def store(executor: ExecutorClient, parking: int, folder: Store) -> str:
    """Store every workspace, and then the state. Returns a sentence about the result.

    Afterwards the executor is still until the operator lets it accept changes: a try does not know whether it is the last.

    Raises ParkingFailed, StorageError and SandboxFailure.
    """
    await _keep_still(executor, True, parking)
    own = _folder_of(folder, parking)
    layers = Layers(own, own)
    kept: list[ParkedWorkspace] = []
    left_out: dict[str, str] = {}
    is_in_part = False
    found = await _listed(executor)
    for each in found:
        why = _reason_to_leave_out(each, left_out)
        if why is None:
            try:
                kept.append(await _stored(executor, each, layers))
            except FileError as error:
                where = f"{error.path}: " if error.path else ""
                is_in_part, why = True, f"its files cannot be stored: {where}{error}"
        if why is not None:
            left_out[each["id"]] = why
    sentence = f"{len(kept)} of {len(found)} workspaces, {sum(each.layer.bytes for each in kept)} bytes"
    sentence = "; ".join([sentence, *(f"left out {name}: {why}" for name, why in left_out.items())])
    if is_in_part and not kept:
        raise ParkingFailed(sentence)
    result = f"{STORED_IN_PART}{sentence}" if is_in_part else sentence
    state = ParkedState(mode=(await executor.health())["mode"], workspaces=kept, result=result)
    # Not model_dump_json: names that are not UTF-8 are lone surrogates, which only this writes.
    if await own.create(STATE, json.dumps(state.model_dump()).encode()):
        return result
    # Another try of this parking was first. It may have left out more or less.
    return (await _read_state(own)).result


async def _stored(executor: ExecutorClient, found: Mapping[str, Any], layers: Layers) -> ParkedWorkspace:
    if found["made"].get("volumes"):
        raise FileError("", "it has volumes; delete it before the Sandbox is parked")
    chunks = executor.stream(f"/workspaces/{found['id']}/snapshot")
    return ParkedWorkspace(
        made=found["made"],
        attempt=found["attempt"],
        frozen=found["state"] == "Frozen",
        network=found["network"],
        layer=await layers.keep(chunks, MOST_BYTES),
    )


def _reason_to_leave_out(found: Mapping[str, Any], left_out: Mapping[str, str]) -> str | None:
    if found["state"] == "Failed":
        return f"it has failed: {found['failure']['message']}"
    needs = (found["made"].get("parent"), found["made"].get("joins"))
    return next((f"it needs {other}" for other in needs if other in left_out), None)


async def restore(executor: ExecutorClient, parking: int, folder: Store) -> str:
    """Bring every workspace back. The executor destroys what an earlier try has made, and refuses it from then on. Returns
    a sentence about the result.

    Then delete what earlier parkings have stored: this one counts, or else the operator would not restore it. If it has left
    out a workspace, an earlier one may have that, so they are kept for people.

    Raises ParkingFailed, StorageError, RecordCorrupt, SandboxFailure, WorkspaceLimit and FileError.
    """
    own = _folder_of(folder, parking)
    state = await _read_state(own)
    mode = (await executor.health())["mode"]
    if mode != state.mode:
        raise ParkingFailed(f"the files were stored in mode {state.mode}, and the new pod has mode {mode}")
    layers = Layers(own, own)
    fence = Fence(EPOCH, f"parking-{os.urandom(8).hex()}")
    await _keep_still(executor, True, parking, fence.holder)
    for attempt in dict.fromkeys(each.attempt for each in state.workspaces):
        body = {"epoch": fence.epoch, "holder": fence.holder}
        await executor.call("PUT", f"/attempts/{attempt}/fence", hold=Hold(attempt, fence), json_body=body)
    for each in state.workspaces:
        hold, path = Hold(each.attempt, fence), f"/workspaces/{each.id}"

        async def change(method: str, path: str, key: str, hold: Hold = hold, **body: Any) -> None:
            await executor.call(method, path, hold=hold, key=f"0:parking-{key}-{path[-100:]}", **body)

        await change("POST", "/workspaces", f"create-{each.id}", json_body=each.made)
        await change("PUT", f"{path}/restore", "restore", body=layers.load(each.layer))
        if each.frozen:
            await change("POST", f"{path}/freeze", "freeze")
        else:
            await change("PUT", f"{path}/network", "network", json_body={"network": each.network})
    await _keep_still(executor, False, parking, fence.holder)
    with contextlib.suppress(StorageError):
        for other in () if state.result.startswith(STORED_IN_PART) else await folder.folders():
            if other.isdecimal() and int(other) < parking:
                await folder.delete([meta.key for meta in await folder.list(other)])
    return f"{len(state.workspaces)} workspaces"


async def _read_state(own: Store) -> ParkedState:
    content = await own.get(STATE)
    if content is None:
        raise ParkingFailed(f"{own.uri}/{STATE} does not exist, so nothing can be brought back")
    return ParkedState.model_validate(json.loads(content))


def _folder_of(folder: Store, parking: int) -> Store:
    """Return where one parking is stored. Never named by the executor, which a tool may control."""
    return folder.below(str(parking))


async def _keep_still(executor: ExecutorClient, is_still: bool, parking: int, restorer: str | None = None) -> None:
    body = {"still": is_still, "parking": parking, **({} if restorer is None else {"restorer": restorer})}
    await executor.call("PUT", "/still", json_body=body, wait_seconds=STILL_SECONDS)


async def _listed(executor: ExecutorClient) -> list[dict[str, Any]]:
    """Return all workspaces, in the order in which they were created."""
    found: list[dict[str, Any]] = (await executor.call("GET", "/workspaces")).json()["workspaces"]
    return found


@contextlib.asynccontextmanager
async def _opened(address: str, token: str, idle_seconds: float) -> AsyncIterator[ExecutorClient]:
    executor = ExecutorClient(address, token)

    async def pause() -> float:
        return 0.2

    try:
        await executor.first_health(pause, FIRST_ANSWER_SECONDS)
        alive = asyncio.create_task(executor.keep_alive(idle_seconds))
        try:
            yield executor
        finally:
            alive.cancel()
    finally:
        await executor.close()


async def run(what: str, parking: int, address: str, token: str, idle_seconds: float, folder: Store) -> str:
    """Do `store` or `restore`."""
    async with _opened(address, token, idle_seconds) as executor:
        return await (store if what == "store" else restore)(executor, parking, folder)


async def _main(
    what: str, parking: str, namespace: str, name: str, uid: str, address: str, idle_seconds: str, uri: str
) -> str:
    # The first process of a container ignores SIGTERM without a handler.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    key = (Path(RUNNER_FOLDER) / KEY_FILE).read_text().strip()
    folder = Store.open(uri, os.environ).below(f"parked/{namespace}/{name}-{uid}")
    token = executor_token(key, name, uid)
    return await run(what, int(parking), f"tcp:{address}:{EXECUTOR_PORT}", token, float(idle_seconds), folder)


_EXPECTED = (ParkingFailed, StorageError, RecordCorrupt, SandboxFailure, WorkspaceLimit, FileError, Fenced)

if __name__ == "__main__":
    configure(os.environ)
    try:
        write_termination_log(asyncio.run(_main(*sys.argv[1:])), logging.INFO)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the operator shows its message
        if not isinstance(error, _EXPECTED):
            log.exception("unexpected")
        write_termination_log(str(error) or type(error).__name__)
        sys.exit(1)
