"""The operator uses the API server's time."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_operator import clock
from rollout_operator.api import KubeApi


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_ahead", timedelta())


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(), -timedelta(hours=1)])
async def test_time_is_the_api_servers_when_this_machines_clock_is_wrong(ahead: timedelta) -> None:
    async def answer(_: web.Request) -> web.Response:
        date = format_datetime(datetime.now(UTC) - ahead, usegmt=True)
        return web.json_response({"metadata": {"name": "x"}}, headers={"Date": date})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        api = KubeApi(lambda: kopf.ConnectionInfo(server=str(server.make_url(""))))
        assert await api.find("Pod", "default", "x")
        await api.close()
    assert abs(clock.now() - (datetime.now(UTC) - ahead)) <= timedelta(seconds=1 if ahead else 0.1)


def test_time_is_this_machines_when_an_answer_has_no_date() -> None:
    for date in (None, "yesterday", "Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"):
        clock.learn_from(date, datetime.now(UTC))
    assert abs(clock.now() - datetime.now(UTC)) < timedelta(seconds=0.1)
