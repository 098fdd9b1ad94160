"""Becoming still for a parking: which parking may ask for it, and when the sandbox counts as idle."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_runtime.executor.attempts import Hold, Key
from agent_runtime.executor.errors import ApiError, bad_request
from agent_runtime.executor.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("virtual_clock")


def made() -> Sandbox:
    return Sandbox(cast(Any, None), "")


async def refused(sandbox: Sandbox, is_still: bool, parking: int, if_idle_seconds: float = 0) -> ApiError:
    with pytest.raises(ApiError) as raised:
        async with asyncio.timeout(10):
            await sandbox.set_still(is_still, parking, if_idle_seconds)
    assert raised.value.code == "Conflict"
    return raised.value


async def test_late_request_of_an_earlier_parking_changes_nothing() -> None:
    sandbox = made()
    await sandbox.set_still(True, 1, 0)
    await sandbox.set_still(True, 1, 0)  # the next try of its Job
    await sandbox.set_still(False, 1, 0)
    assert "parking 1 is over" in (await refused(sandbox, True, 1)).message
    assert not sandbox.stillness.is_on
    await sandbox.set_still(False, 1, 0)  # a try whose answer was lost
    await sandbox.set_still(True, 2, 0)
    await refused(sandbox, False, 1)
    assert sandbox.stillness.is_on
    await sandbox.set_still(False, 2, 0)
    await sandbox.set_still(False, 3, 0)  # a parking whose Job never reached it
    await refused(sandbox, True, 3)


async def test_only_the_newest_restorer_changes_anything_until_it_ends_the_parking() -> None:
    sandbox = made()
    for restorer in ("one", "two"):
        await sandbox.set_still(True, 1, 0, restorer)
        attempt = sandbox.attempt("a")
        with pytest.raises(ApiError, match="wait until it is Ready"):
            await attempt.raise_fence(Hold(5, "client"))
        await attempt.raise_fence(Hold(0, restorer))
        attempt.require(Hold(0, restorer))
    with pytest.raises(ApiError, match="never fenced"):
        sandbox.attempt("b").require(Hold(0, "one"))
    with pytest.raises(ApiError, match="wait until it is Ready"):
        await attempt.raise_fence(Hold(0, "one"))
    with pytest.raises(ApiError, match="another try"):
        await sandbox.set_still(False, 1, 0, "one")
    await sandbox.set_still(False, 1, 0, "two")
    await sandbox.set_still(False, 1, 0, "two")  # its answer was lost
    with pytest.raises(ApiError, match="parking 1 is over"):
        await sandbox.set_still(True, 1, 0, "one")
    await attempt.raise_fence(Hold(1, "client"))


async def test_call_in_progress_without_a_caller_is_use() -> None:
    sandbox, go_on = made(), asyncio.Event()
    attempt, hold, request = (
        sandbox.attempt("a"),
        Hold(1, "me"),
        cast(Any, SimpleNamespace(line="PUT", body_digest=b"")),
    )
    await attempt.raise_fence(hold)

    async def work() -> Any:
        await go_on.wait()
        raise bad_request("so that there is no reply to keep")

    caller = asyncio.create_task(attempt.once(hold, Key(1, "x"), request, b"", work, lambda: False))
    await asyncio.sleep(1)
    caller.cancel()
    await asyncio.sleep(100)
    assert (await refused(sandbox, True, 1, 60)).details == {"idleSeconds": 0.0}
    go_on.set()
    await asyncio.sleep(1)
    await sandbox.set_still(True, 1, 60)
    assert sandbox.stillness.is_on
