"""Calls for workspaces and their model ports; ROUTES in routes.py lists them."""

from __future__ import annotations

import re
from typing import Any

from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.host import Limits, WorkspaceSpec
from agent_runtime.executor.http.fields import Fields
from agent_runtime.executor.http.messages import Switched
from agent_runtime.executor.network.model_port import UPGRADE
from agent_runtime.executor.network.rules import NO_NETWORK, NetworkRule, read_rule
from agent_runtime.executor.overlay.standing_still import PauseBroken, end_pause, extend_pause, pause_for
from agent_runtime.executor.routes.calls import Call

# An id becomes a folder's name and part of paths.
ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
ID_EXPECTED = "1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit,"
# Not the root, nor what the executor mounts itself.
VOLUME_PATH = r"/(?!(proc|dev|sys)(/|$))(?!.*(^|/)\.\.(/|$))[^\0]*[^\0/]"
VOLUME_EXPECTED = "an absolute path without '..' outside /proc, /dev and /sys"
# A pause ends by itself soon after its runner has died.
MOST_PAUSED_SECONDS = 60.0


async def create(call: Call) -> dict[str, Any]:
    fields = call.fields()
    limits = fields.object("limits")
    spec = WorkspaceSpec(
        id=fields.text("id", pattern=ID_PATTERN, expected=ID_EXPECTED),
        parent=fields.text("parent", None, pattern=ID_PATTERN, expected=ID_EXPECTED),
        is_bare=fields.flag("bare", False),
        joins=fields.text("joins", None, pattern=ID_PATTERN, expected=ID_EXPECTED),
        shares=fields.flag("shares", False),
        volumes=_volumes(fields),
        limits=Limits(
            memory_bytes=limits.whole("memoryBytes", None, least=1),
            processes=limits.whole("processes", None, least=1),
            disk_bytes=limits.whole("diskBytes", None, least=1),
            file_bytes=limits.whole("fileBytes", None, least=1),
            leaves_free=limits.flag("leavesFree", False),
        ),
        env=fields.environment("env"),
        user=fields.text("user", None, pattern=r"[^\0]+", expected="a name, a uid or uid:gid"),
        working_dir=fields.text("workingDir", "/", pattern=r"/[^\0]*", expected="an absolute path"),
    )
    rule = _network(fields) if fields.raw("network", None) is not None else NO_NETWORK
    limits.done()
    fields.done()
    entry = await call.sandbox.create(call.attempt, fields.all(), spec, rule)
    return entry.describe()


def _volumes(fields: Fields) -> dict[str, str]:
    volumes = fields.environment("volumes")
    for name, path in volumes.items():
        if not re.fullmatch(ID_PATTERN, name):
            raise bad_request(f"{fields.name_of('volumes')}: {ID_EXPECTED} expected as a name, got {name!r}")
        if not re.fullmatch(VOLUME_PATH, path):
            raise bad_request(f"{fields.name_of('volumes')}.{name}: {VOLUME_EXPECTED} expected, got {path!r}")
    return volumes


async def show_all(call: Call) -> dict[str, Any]:
    entries = call.sandbox.workspaces.values()
    return {"workspaces": [{**entry.describe(), "made": entry.made_by} for entry in entries]}


async def show(call: Call) -> dict[str, Any]:
    return call.seen().describe()


async def freeze(call: Call) -> dict[str, Any]:
    entry = call.owned()
    entry.require_working()
    if not entry.is_frozen:
        await entry.freeze()
    return entry.describe()


async def end_processes(call: Call) -> dict[str, Any]:
    entry = call.live()
    await entry.end_processes("Signal")
    return {}


async def set_steady(call: Call) -> dict[str, Any]:
    fields = call.fields()
    is_steady = fields.flag("steady", True)
    fields.done()
    # A pause would make time limits of its programs expire.
    call.live().workspace.pause.is_steady = is_steady
    return {}


async def pause(call: Call) -> dict[str, Any]:
    fields = call.fields()
    seconds = fields.number("seconds", most=MOST_PAUSED_SECONDS)
    extends = fields.flag("extends", False)
    fields.done()
    workspace = call.live().workspace
    try:
        if not seconds:
            end_pause(workspace)
        elif extends:
            extend_pause(workspace, seconds)
        else:
            await pause_for(workspace, seconds)
    except PauseBroken as broken:
        raise ApiError("Conflict", f"workspace {workspace.spec.id!r}: {broken}") from None
    return {}


async def switch_network(call: Call) -> dict[str, Any]:
    fields = call.fields()
    rule = _network(fields)
    fields.done()
    entry = call.live()
    await entry.switch_network(rule)
    return {"network": rule.as_json()}


async def check_network(call: Call) -> dict[str, Any]:
    return await call.seen().check_network()


async def destroy(call: Call) -> dict[str, Any]:
    await call.sandbox.destroy(call.owned())
    return {}


def _network(fields: Fields) -> NetworkRule:
    rule = read_rule(fields.raw("network"))
    if rule is None:
        raise bad_request(
            f'{fields.name_of("network")}: "None", "Public" or a list of host:port expected, like '
            '["files.example.org:443"]'
        )
    return rule


async def open_port(call: Call) -> dict[str, Any]:
    entry = call.live()
    return {"url": (await entry.open_model_port()).url}


async def attach(call: Call) -> Switched:
    call.upgrade(UPGRADE)
    entry = call.live()
    if entry.model_port is None:
        raise ApiError(
            "Conflict", f"the model port of workspace {entry.id!r} is not open in this phase; PUT .../model opens it"
        )
    assert call.hold is not None
    return Switched(UPGRADE, entry.model_port.attach(call.hold))
