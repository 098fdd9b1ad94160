"""The operator's side of the control port: what is tried again, what is not, and what a person reads when it fails."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from rollout_api.model_server import PolicySource
from rollout_operator.model_server.control import Address, Control, ControlError


class Port:
    """Answers what the test puts into `answers`, by route; the last one for ever."""

    def __init__(self) -> None:
        self.answers: dict[str, list[web.Response]] = {}
        self.asked: list[tuple[str, str]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, request.headers.get("Authorization", "")))
        answers = self.answers.get(request.path, [web.json_response({})])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.Response(body=found.body, status=found.status, content_type=found.content_type)


@pytest.fixture
async def port() -> AsyncIterator[tuple[Port, Address, Control]]:
    port, app, control = Port(), web.Application(), Control(backoff_seconds=0.01)
    app.router.add_route("*", "/{path:.*}", port.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield port, Address("qwen-0", "http://{}:{}".format(*runner.addresses[0][:2]), "secret"), control
    finally:
        await control.close()
        await runner.cleanup()


async def test_a_servers_own_trouble_is_tried_again(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/pause"] = [web.Response(status=500), web.Response(status=503), web.json_response({})]
    await control.pause(server)
    assert answers.asked == [("/pause", "Bearer secret")] * 3


async def test_a_refusal_is_not_tried_again_and_names_server_and_route(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/resume"] = [web.Response(status=401, text="a bearer token is needed")]
    with pytest.raises(ControlError, match=r"qwen-0: POST http.*/resume answered 401: a bearer token is needed"):
        await control.resume(server)
    assert len(answers.asked) == 1


async def test_tensors_are_never_asked_for_twice(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/update_weights"] = [web.Response(status=500)]
    with pytest.raises(ControlError):
        await control.transfer(server, {"names": []}, seconds=5)
    assert len(answers.asked) == 1


async def test_a_transfer_that_was_never_finished_does_not_stop_the_next(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/start_weight_update"] = [web.Response(status=500), web.json_response({})]
    await control.begin_transfer(server, None)
    routes = [path for path, _ in answers.asked]
    assert routes == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]


async def test_an_engine_without_checksums_is_not_taken_for_a_broken_one(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/weight_checker"] = [web.Response(status=404)]
    assert await control.digest(server) is None


async def test_what_is_no_vllm_is_said_to_be_none(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/policy/served"] = [web.json_response({"engine": "a-process", "version": None})]
    with pytest.raises(ControlError, match="is it vLLM"):
        await control.look(server)


async def test_a_side_car_that_names_no_folder_is_an_error(port: tuple[Port, Address, Control]) -> None:
    _, server, control = port
    with pytest.raises(ControlError, match="expected a path"):
        await control.fetch(server, PolicySource(version=1, uri="s3://b/1"), seconds=5)


async def test_a_port_that_nobody_listens_on_is_named(port: tuple[Port, Address, Control]) -> None:
    _, _, control = port
    with pytest.raises(ControlError, match=r"qwen-1: GET http://127.0.0.1:1/policy/served cannot be reached") as raised:
        await control.look(Address("qwen-1", "http://127.0.0.1:1", "secret"))
    assert raised.value.may_pass
    assert "secret" not in repr(Address("qwen-1", "http://127.0.0.1:1", "secret"))
