"""How a route finds its server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from tests.support.vllm_server.server import VllmStandIn

SERVER: web.AppKey[VllmStandIn] = web.AppKey("server")


def server_of(http: web.Request) -> VllmStandIn:
    """Return the stand-in that received a request."""
    return http.app[SERVER]
