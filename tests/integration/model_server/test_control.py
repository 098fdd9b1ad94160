"""The operator's side of the control port: what is retried, and the messages of failures."""

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiohttp import web

from rollout_api.inference.description import Description
from rollout_api.inference.sglang import SGLANG
from rollout_api.inference.vllm import VLLM
from rollout_api.model_server import PolicySource, TransferMode
from rollout_operator.actions import Ask, Ref
from rollout_operator.model_server.control import MOST_ANSWER, Address, Control, ControlError
from rollout_operator.model_server.operations import ServerOperations
from rollout_operator.server_contact import Call, LoadOptions, Server, ServerOperation
from rollout_operator.tenant_limits import ByteBudget
from tests.support.memory_api import until


class Port:
    """Answers with the test's `answers` by route, and repeats the last one."""

    def __init__(self) -> None:
        self.answers: dict[str, list[web.Response]] = {}
        self.asked: list[tuple[str, str]] = []
        self.bodies: dict[str, bytes] = {}
        """Last body by route."""
        self.gates: dict[str, asyncio.Event] = {}
        """Routes that answer only when their event is set."""

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, request.headers.get("Authorization", "")))
        self.bodies[request.path] = await request.read()
        if gate := self.gates.get(request.path):
            await gate.wait()
        answers = self.answers.get(request.path, [web.json_response({})])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        location = {"Location": found.headers["Location"]} if "Location" in found.headers else {}
        return web.Response(body=found.body, status=found.status, content_type=found.content_type, headers=location)


def up(server: Address) -> Server:
    """Return a running server at an address."""
    return Server(
        name=server.name,
        uid="uid",
        restarts=0,
        url=server.url,
        control_url=server.url,
        up=True,
        leaving=False,
        loaded=True,
    )


@pytest.fixture
async def port() -> AsyncIterator[tuple[Port, Address, Control]]:
    port, app, control = Port(), web.Application(), Control(backoff_seconds=0.01)
    app.router.add_route("*", "/{path:.*}", port.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield port, Address("team", "qwen-0", "http://{}:{}".format(*runner.addresses[0][:2]), "secret"), control
    finally:
        await control.close()
        await runner.cleanup()


async def test_server_errors_are_retried(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/pause"] = [web.Response(status=500), web.Response(status=503), web.json_response({})]
    await control.pause(server)
    assert answers.asked == [("/pause", "Bearer secret")] * 3


async def test_a_refusal_is_not_retried_and_names_server_and_route(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/resume"] = [web.Response(status=401, text="a bearer token is needed")]
    with pytest.raises(ControlError, match=r"qwen-0: POST http.*/resume answered 401: a bearer token is needed"):
        await control.resume(server)
    assert len(answers.asked) == 1


async def test_tensors_are_never_requested_twice(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/update_weights"] = [web.Response(status=500)]
    with pytest.raises(ControlError):
        await control.transfer(server, b"{}", seconds=5)
    assert len(answers.asked) == 1


async def test_a_transfer_that_was_never_finished_does_not_stop_the_next(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/start_weight_update"] = [web.Response(status=500), web.json_response({})]
    await control.begin_transfer(server, None)
    routes = [path for path, _ in answers.asked]
    assert routes == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]


@pytest.mark.parametrize("status", [200, 404], ids=["vLLM 0.32", "older vLLM"])
async def test_engine_leaves_the_last_group_of_the_trainer_before_it_joins_the_next(
    port: tuple[Port, Address, Control], status: int
) -> None:
    answers, server, control = port
    answers.answers["/shutdown_weight_transfer_engine"] = [web.Response(status=status)]
    await control.begin_transfer(server, b"{}")
    routes = [path.lstrip("/") for path, _ in answers.asked]
    assert routes == ["shutdown_weight_transfer_engine", "init_weight_transfer_engine", "start_weight_update"]


async def test_engine_without_checksums_is_not_broken(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/policy/digest"] = [web.Response(status=404)]
    assert await control.digest(server) is None


async def test_control_reads_a_large_hook_answer_whole(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    names = [f"model.layers.{number}.mlp.experts.w1.weight" for number in range(100_000)]
    answers.answers["/policy/hook"] = [web.json_response({"updates": [{"names": names}]})]
    async with control.budget.hold("team") as held:
        answer = await control.ask_hook(server, "http://trainer.example/hook", {}, 30, held)
        assert answer == {"updates": [{"names": names}]}
        assert held.size > 2 * len(str(names))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"x" * (MOST_ANSWER + 1), "answered more than"),
        (b'{"path": "/policies/1"', "malformed JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b'["/policies/1"]', "expected an object"),
    ],
)
async def test_control_rejects_an_unusable_answer_with_the_servers_name(
    port: tuple[Port, Address, Control], body: bytes, error: str
) -> None:
    answers, server, control = port
    answers.answers["/policy/fetch"] = [web.Response(body=body)]
    with pytest.raises(ControlError, match=f"qwen-0: POST .*/policy/fetch.*{error}"):
        await control.fetch(server, PolicySource(version=1, uri="s3://b/1"), seconds=5)


async def test_control_rejects_a_process_name_that_is_not_a_header_value(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/policy/served"] = [web.json_response({"engine": "a\r\nHost: other", "version": None})]
    with pytest.raises(ControlError, match="expected the engine's process"):
        await control.server_report(server)


async def test_control_keeps_nothing_large_of_a_hostile_report(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/policy/served"] = [web.json_response({"engine": "abc", "version": [[] for _ in range(1000)]})]
    with pytest.raises(ControlError, match="expected a version or null"):
        await control.server_report(server)
    answers.answers["/policy/served"] = [web.json_response({"engine": "abc", "version": 0, "calls": "9" * 1000})]
    with pytest.raises(ControlError, match="expected a number of calls"):
        await control.server_report(server)
    failed = {"version": 1, "message": "", "fetched": False, "seconds": -2.5e11}  # a time 8000 years ahead
    red = {"current": 0, "loaded": [], "loading": [], "failed": [failed]}
    answers.answers["/policy/served"] = [web.json_response({"engine": "abc", "version": 0, "adapters": {"red": red}})]
    answers.answers["/is_paused"] = [web.json_response({"is_paused": False})]
    answers.answers["/weight_info"] = [web.json_response({"weight_version": "0"})]
    with pytest.raises(ControlError, match="adapters of another form"):
        await control.server_report(server)
    answers.answers["/policy/digest"] = [web.json_response({"digest": "0" * 100_000})]
    with pytest.raises(ControlError, match="expected a SHA-256"):
        await control.digest(server)


async def test_control_does_not_parse_a_hook_answer_that_would_fill_its_memory(
    port: tuple[Port, Address, Control],
) -> None:
    answers, server, control = port
    nested = b"[" * 400 + b"]" * 400
    updates = b'{"updates": [{"x": [' + b",".join([nested] * 20_000) + b"]}]}"
    answers.answers["/policy/hook"] = [web.Response(body=updates)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with control.budget.hold("team") as held:
        with pytest.raises(ControlError, match="/policy/hook answered more than 1048576 values"):
            await control.ask_hook(server, "http://trainer", {}, 5, held)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "KiB; parsed it takes 800 MiB"


async def test_control_follows_no_redirect_to_another_server(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/pause"] = [web.Response(status=307, headers={"Location": "/secret"})]
    with pytest.raises(ControlError, match="answered 307"):
        await control.pause(server)
    assert answers.asked == [("/pause", "Bearer secret")]


async def test_server_other_than_vllm_is_reported(port: tuple[Port, Address, Control]) -> None:
    answers, server, control = port
    answers.answers["/policy/served"] = [web.json_response({"engine": "a-process", "version": None})]
    with pytest.raises(ControlError, match="is it vLLM"):
        await control.server_report(server)


async def test_a_side_car_that_names_no_folder_is_an_error(port: tuple[Port, Address, Control]) -> None:
    _, server, control = port
    with pytest.raises(ControlError, match="expected a path"):
        await control.fetch(server, PolicySource(version=1, uri="s3://b/1"), seconds=5)


async def test_port_without_a_listener_is_named(port: tuple[Port, Address, Control]) -> None:
    _, _, control = port
    with pytest.raises(ControlError, match=r"qwen-1: GET http://127.0.0.1:1/policy/served cannot be reached") as raised:
        await control.server_report(Address("team", "qwen-1", "http://127.0.0.1:1", "secret"))
    assert raised.value.may_pass
    assert "secret" not in repr(Address("team", "qwen-1", "http://127.0.0.1:1", "secret"))


async def test_operator_never_connects_to_the_address_of_a_push_hook(port: tuple[Port, Address, Control]) -> None:
    """Otherwise a user who may create a ModelServer could read, in its status, what only the operator can reach."""
    answers, server, control = port
    answers.answers["/policy/hook"] = [web.Response(status=502, text="the trainer is away")]
    answers.answers["/policy/served"] = [web.json_response({"engine": "a-process", "version": None})]
    answers.answers["/is_paused"] = [web.json_response({"is_paused": True})]
    answers.answers["/weight_info"] = [web.json_response({"weight_version": "0"})]
    connections = []
    elsewhere = await asyncio.start_server(lambda reader, writer: connections.append(writer), "127.0.0.1", 0)
    operations, done = ServerOperations(control, may_ask=lambda: True), asyncio.Event()
    operations.on_done = lambda ref: done.set()
    target = up(server)
    options = LoadOptions(
        namespace="team",
        mode=TransferMode.PUSH,
        model="qwen",
        model_path="/models/qwen",
        fetch_seconds=5,
        hook=f"http://127.0.0.1:{elsewhere.sockets[0].getsockname()[1]}/secret",
        push_seconds=5,
        world_size=1,
        update=1,
        token="secret",
    )
    operation = ServerOperation(Call.LOAD, PolicySource(version=1))
    operations.start(Ref("ModelServer", "team", "qwen"), Ask(operation, (target,), options))
    await done.wait()
    elsewhere.close()
    assert connections == []
    assert "the trainer is away" in operations.known[target.key].failures[Call.LOAD].message


async def test_answers_of_hooks_are_held_within_the_memory_of_all_tenants(port: tuple[Port, Address, Control]) -> None:
    """They are held until the tensors have arrived, for which a tenant's servers may take any time."""
    answers, server, _ = port
    update = {"names": ["x" * 200_000]}
    large = web.json_response({"initInfo": {"rank": 0}, "updates": [update]})
    answers.answers |= {
        "/policy/hook": [large],
        "/policy/served": [web.json_response({"engine": "a-process", "version": None})],
        "/is_paused": [web.json_response({"is_paused": True})],
        "/weight_info": [web.json_response({"weight_version": "1"})],
    }
    gate = answers.gates["/start_weight_update"] = asyncio.Event()
    # For two answers of a namespace: one that is held, and one of which requests are made.
    control = Control(backoff_seconds=0.01, budget=ByteBudget(total=1_900_000))
    operations, ended = ServerOperations(control, may_ask=lambda: True), list[Ref]()
    operations.on_done = ended.append
    options = LoadOptions(
        namespace="team",
        mode=TransferMode.PUSH,
        model="qwen",
        model_path="/models/qwen",
        fetch_seconds=30,
        hook="http://trainer",
        push_seconds=30,
        world_size=1,
        update=1,
        token="secret",
    )
    operation = ServerOperation(Call.LOAD, PolicySource(version=1))

    def push(number: int, namespace: str) -> None:
        target = replace(up(server), name=f"{namespace}-{number}", uid=f"{namespace}-{number}")
        ask = Ask(operation, (target,), replace(options, namespace=namespace))
        operations.start(Ref("ModelServer", namespace, f"qwen-{number}"), ask)

    def count(route: str) -> int:
        return [path for path, _ in answers.asked].count(route)

    for number in range(3):
        push(number, "team")
    await until(lambda: count("/policy/hook") == 3 and count("/start_weight_update") == 2, "two are held")
    push(0, "other")
    await until(lambda: count("/start_weight_update") == 3, "one of another namespace")
    assert control.budget.has_room("other", 250_000), "its requests are held, and not what was parsed"
    await asyncio.sleep(0.2)
    assert count("/start_weight_update") == 3, "one waits"
    gate.set()
    await until(lambda: len(ended) == 4, "all have ended")
    await control.close()
    assert not any(contact.failures for contact in operations.known.values())
    assert json.loads(answers.bodies["/init_weight_transfer_engine"]) == {"init_info": {"rank": 0}}
    assert json.loads(answers.bodies["/update_weights"]) == {"update_info": update}
    assert control.budget.has_room("team", 630_000)


@pytest.mark.parametrize(("engine", "blamed"), [(VLLM, False), (SGLANG, True)], ids=["vLLM", "SGLang"])
async def test_end_during_a_load_counts_against_the_version_if_bad_weights_end_the_engine(
    port: tuple[Port, Address, Control], engine: Description, blamed: bool
) -> None:
    answers, server, control = port
    updates = engine.updates
    answers.answers |= {
        "/policy/served": [web.json_response({"engine": "a-process", "version": None})],
        "/policy/fetch": [web.json_response({"path": "/policies/1"})],
        updates.paused.path: [web.json_response({"is_paused": True})],
        updates.weights.path: [web.json_response({"weight_version": "loading-1"})],
        updates.reload("", 1).path: [web.Response(status=503), web.Response(status=412, text="it has ended")],
    }
    operations, done = ServerOperations(control, may_ask=lambda: True), asyncio.Event()
    operations.on_done = lambda ref: done.set()
    target = up(server)
    options = LoadOptions(
        namespace="team",
        mode=TransferMode.PULL,
        model="qwen",
        model_path="/models/qwen",
        fetch_seconds=5,
        hook=None,
        push_seconds=0,
        world_size=1,
        update=1,
        token="secret",
        engine=engine,
    )
    operation = ServerOperation(Call.LOAD, PolicySource(version=1, uri="s3://policies/1"))
    operations.start(Ref("ModelServer", "team", "qwen"), Ask(operation, (target,), options))
    await done.wait()
    failure = operations.known[target.key].failures.get(Call.LOAD)
    assert (failure is not None) is blamed
    assert failure is None or "SGLang ended while it loaded version 1" in failure.message
