"""The calls about a workspace's model port."""

from __future__ import annotations

from agent_runtime.executor.calls import Call
from agent_runtime.executor.errors import ApiError
from agent_runtime.executor.messages import Reply, Switched, json_reply
from agent_runtime.executor.model_port import UPGRADE


async def open_port(call: Call) -> Reply:
    """PUT /workspaces/{w}/model"""
    call.no_query()
    call.no_fields()
    hosted = call.owned()
    hosted.require_live()
    port = await call.sandbox.open_model_port(hosted)
    return json_reply({"url": port.url})


async def attach(call: Call) -> Switched:
    """POST /workspaces/{w}/model"""
    call.upgrade(UPGRADE)
    hosted = call.owned()
    hosted.require_live()
    if hosted.model_port is None:
        raise ApiError(
            "Conflict", f"the model port of workspace {hosted.id!r} is not open in this phase; PUT .../model opens it"
        )
    assert call.hold is not None
    return Switched(UPGRADE, hosted.model_port.attach(call.hold))
