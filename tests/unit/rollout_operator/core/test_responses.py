"""What the operator's client takes from a response that refuses a request."""

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_operator.api import LONGEST_RETRY_SECONDS, ApiError, KubeApi


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [("7", 7), ("86400", LONGEST_RETRY_SECONDS), ("inf", LONGEST_RETRY_SECONDS), ("nan", LONGEST_RETRY_SECONDS)],
)
async def test_pause_that_a_response_asks_for_is_limited(asked: str, seconds: float) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=429, text="busy", headers={"Retry-After": asked})

    app = web.Application()
    app.router.add_get("/{path:.*}", refuse)
    async with TestServer(app) as server:
        api = KubeApi(lambda: kopf.ConnectionInfo(server=str(server.make_url("/")).rstrip("/")))
        try:
            with pytest.raises(ApiError) as caught:
                await api.find("Lease", "default", "a")
        finally:
            await api.close()
    assert (caught.value.status, caught.value.retry_after) == (429, seconds)
