"""An engine from before weights had versions serves all the same: with the weights that it was started with."""

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_operator.model_server.control import Address, Control


async def test_an_engine_without_weight_versions_has_its_own_weights_and_becomes_ready() -> None:
    async def is_paused(_: web.Request) -> web.Response:
        return web.json_response({"is_paused": False})

    app = web.Application()
    app.router.add_get("/is_paused", is_paused)
    control = Control()
    async with TestServer(app) as server:
        try:
            assert await control.look(Address("old-0", str(server.make_url("")).rstrip("/"), "t")) == (False, 0)
        finally:
            await control.close()
