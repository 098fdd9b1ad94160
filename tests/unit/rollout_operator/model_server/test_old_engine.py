"""An engine without weight versions serves with the weights with which it was started."""

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_operator.model_server.control import Address, Control


async def test_an_engine_without_weight_versions_has_its_own_weights_and_becomes_ready() -> None:
    async def is_paused(_: web.Request) -> web.Response:
        return web.json_response({"is_paused": False})

    async def served(_: web.Request) -> web.Response:
        return web.json_response({"engine": "a-process", "version": None})

    app = web.Application()
    app.router.add_get("/policy/served", served)
    app.router.add_get("/is_paused", is_paused)
    control = Control()
    async with TestServer(app) as server:
        try:
            found = await control.server_report(Address("team", "old-0", str(server.make_url("")).rstrip("/"), "t"))
            assert (found.process, found.paused, found.version, found.opened) == ("a-process", False, 0, None)
        finally:
            await control.close()
