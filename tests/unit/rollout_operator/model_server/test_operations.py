"""What is kept of servers whose pods are deleted during an operation."""

import asyncio
from typing import Any, cast

import pytest

from rollout_api.model_server import TransferMode
from rollout_operator.actions import Ask, Ref
from rollout_operator.clock import now
from rollout_operator.model_server.control import ControlError
from rollout_operator.model_server.operations import ServerOperations
from rollout_operator.server_contact import Call, LoadOptions, Server, ServerOperation, ServerReport

REF = Ref("ModelServer", "team", "qwen")
OPTIONS = LoadOptions("team", TransferMode.PULL, "qwen", "/models/qwen", 5, None, 5, 1, 1, token="secret")


def ask(name: str) -> Ask:
    server = Server(
        name=name, uid=f"uid-{name}", restarts=0, url="", control_url="", up=True, leaving=False, loaded=False
    )
    return Ask(ServerOperation(Call.LOOK), (server,), OPTIONS)


class Control:
    """The control port of a server, which answers when `gate` is set."""

    def __init__(self, error: ControlError | None) -> None:
        self.gate, self.asked, self._error = asyncio.Event(), asyncio.Event(), error

    async def server_report(self, address: Any) -> ServerReport:
        self.asked.set()
        await self.gate.wait()
        if self._error is not None:
            raise self._error
        return ServerReport(now(), paused=False, version=0)


@pytest.mark.parametrize("error", [None, ControlError("qwen-0: no answer")])
async def test_nothing_is_kept_of_a_pod_that_is_deleted_during_an_operation(error: ControlError | None) -> None:
    control, done = Control(error), asyncio.Event()
    operations = ServerOperations(cast("Any", control), may_ask=lambda: True)
    operations.on_done = lambda ref: done.set()
    operations.start(REF, ask("qwen-0"))
    await control.asked.wait()
    operations.forget("uid-qwen-0")
    control.gate.set()
    await done.wait()
    assert operations.known == {}


async def test_no_operation_begins_on_a_pod_that_was_deleted_after_the_plan() -> None:
    operations = ServerOperations(cast("Any", None), may_ask=lambda: True)
    operations.exists = lambda ref, uid: (ref, uid) != (Ref("Pod", "team", "qwen-0"), "uid-qwen-0")
    operations.start(REF, ask("qwen-0"))
    assert operations.known == {}
