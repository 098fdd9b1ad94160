"""The webhook's answers to an API server about created and changed objects."""

import asyncio
import contextlib
import copy
import gc
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from rollout_api.listener import MOST_OF_ADDRESS
from rollout_api.on_cluster.objects import MOST_CHARACTERS, TOO_DEEP
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_operator import admission
from rollout_operator.admission import CHECKS, MOST_PER_ADDRESS, Server, refusal, register
from tests.support.ports import free_port

LEAST: dict[str, Any] = {"images": {"runtime": "r:1", "executor": "e:1"}, "lease": {"namespace": "agent-rollouts"}}
CONFIG = OperatorConfig.model_validate(LEAST)
JOB: dict[str, Any] = {
    "apiVersion": "rollout.dev/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "j", "namespace": "team-a"},
    "spec": {
        "tasks": {"inline": [{"name": "t", "prompt": "p", "verifier": {"commands": ["true"]}}]},
        "agent": {"type": "Nop"},
        "sandbox": {"image": "busybox"},
        "output": {"uri": "s3://b/p"},
    },
}
SERVER: dict[str, Any] = {
    "apiVersion": "rollout.dev/v1alpha1",
    "kind": "ModelServer",
    "metadata": {"name": "server", "namespace": "team-a"},
    "spec": {"model": {"name": "m"}, "engine": {"image": "vllm", "version": "0.27.0"}},
}
SANDBOX: dict[str, Any] = {
    "apiVersion": "rollout.dev/v1alpha1",
    "kind": "Sandbox",
    "metadata": {"name": "s", "namespace": "team-a"},
    "spec": {"image": "busybox"},
}
POOL: dict[str, Any] = {
    "apiVersion": "rollout.dev/v1alpha1",
    "kind": "SandboxPool",
    "metadata": {"name": "p", "namespace": "team-a"},
    "spec": {"sandbox": {"image": "busybox", "resources": {"disk": "1Gi"}}},
}
GOOD = {"rolloutjobs": JOB, "modelservers": SERVER, "sandboxes": SANDBOX, "sandboxpools": POOL}
BAD = [
    ("rolloutjobs", ("spec", "output", "uri"), "./out", "spec.output.uri: './out' is a local folder"),
    ("rolloutjobs", ("spec", "groupSize"), "many", "spec.groupSize: "),
    ("modelservers", ("metadata", "name"), "7b", "metadata.name: is '7b'"),
    ("sandboxes", ("spec", "security"), "Privileged", "spec.security: Privileged is not allowed in namespace team-a"),
    ("sandboxes", ("spec", "startSeconds"), 0, "spec.startSeconds: "),
    ("sandboxpools", ("spec", "recycle"), {"ageSeconds": 86_400}, "spec.recycle.ageSeconds: 86400 is not below"),
    ("sandboxpools", ("spec", "recycle"), {"disk": "9Gi"}, "spec.recycle.disk: 9Gi is more than"),
    (
        "sandboxpools",
        ("spec", "sandbox", "podTemplate"),
        {"spec": {"hostNetwork": True}},
        "SandboxPool p spec.sandbox.podTemplate.spec.hostNetwork: refused",
    ),
    (
        "sandboxpools",
        ("spec", "sandbox", "security"),
        "Privileged",
        "SandboxPool p spec.sandbox.security: Privileged is not allowed in namespace team-a",
    ),
]


def changed(body: dict[str, Any], where: tuple[str, ...], value: object) -> dict[str, Any]:
    body = copy.deepcopy(body)
    *parents, last = where
    at = body
    for part in parents:
        at = at[part]
    at[last] = value
    return body


@pytest.mark.parametrize("plural", CHECKS)
def test_valid_object_is_admitted(plural: str) -> None:
    assert refusal(plural, GOOD[plural], None, CONFIG) is None


@pytest.mark.parametrize(("plural", "where", "value", "words"), BAD)
def test_a_bad_object_is_refused_by_field(plural: str, where: tuple[str, ...], value: object, words: str) -> None:
    bad = changed(GOOD[plural], where, value)
    assert words in (refusal(plural, bad, None, CONFIG) or "")
    # For an object that is older than the admission check, labels, finalizers and other fields can change, and a change
    # can correct it.
    relabelled = changed(bad, ("metadata", "labels"), {"team": "a"})
    assert refusal(plural, relabelled, bad, CONFIG) is None
    if where[0] == "spec":
        assert words in (refusal(plural, bad, GOOD[plural], CONFIG) or "")
        assert refusal(plural, GOOD[plural], bad, CONFIG) is None


def test_a_job_that_became_invalid_can_still_be_suspended() -> None:
    bad = changed(JOB, ("spec", "output", "uri"), "./out")
    assert refusal("rolloutjobs", changed(bad, ("spec", "suspend"), True), bad, CONFIG) is None
    worse = changed(bad, ("spec", "sandbox"), {})
    assert "./out" not in (told := refusal("rolloutjobs", worse, bad, CONFIG) or "")
    assert "spec.sandbox.image: is missing" in told


@pytest.mark.parametrize("plural", CHECKS)
@pytest.mark.parametrize("levels", [200, 600, 3000])
def test_a_deep_object_is_refused_in_the_operators_words_and_can_be_relabelled(plural: str, levels: int) -> None:
    deep: dict[str, Any] = {}
    for _ in range(levels):
        deep = {"a": deep}
    pod_template = {"spec": {"affinity": {"podAffinity": deep}}}
    where = ("spec", "sandbox", "podTemplate") if plural in ("rolloutjobs", "sandboxpools") else ("spec", "podTemplate")
    bad = changed(GOOD[plural], where, pod_template)
    assert refusal(plural, bad, None, CONFIG) == f"spec: {TOO_DEEP}"
    # Its finalizers can be removed, so that its deletion ends.
    relabelled = {**bad, "metadata": bad["metadata"] | {"finalizers": []}}
    assert refusal(plural, relabelled, bad, CONFIG) is None


@pytest.mark.parametrize("plural", ["modelservers", "sandboxes"])
def test_an_object_too_large_for_the_operator_is_refused(plural: str) -> None:
    bad = changed(GOOD[plural], ("spec", "podTemplate"), {"metadata": {"annotations": {"a": "x" * MOST_CHARACTERS}}})
    assert "expected at most 65536" in (refusal(plural, bad, None, CONFIG) or "")


def test_failing_check_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[str]:
        raise RecursionError

    monkeypatch.setitem(CHECKS, "sandboxes", fail)
    assert refusal("sandboxes", SANDBOX, None, CONFIG) is None


def test_a_sandbox_of_a_job_is_judged_by_the_operator_that_knows_the_job() -> None:
    bad = changed(SANDBOX, ("spec", "security"), "Privileged")
    owner = {"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutJob", "name": "j", "uid": "u"}
    assert refusal("sandboxes", changed(bad, ("metadata", "ownerReferences"), [owner]), None, CONFIG) is None


async def test_requests_beyond_the_bound_fail_unread_and_later_ones_are_answered() -> None:
    go_on = asyncio.Event()
    checked = most_checked = 0

    async def answer(_: Any, **more: Any) -> Any:
        nonlocal checked, most_checked
        checked += 1
        most_checked = max(checked, most_checked)
        await go_on.wait()
        checked -= 1
        return {}

    server, app = Server(), web.Application()

    async def serve(request: web.Request) -> web.Response:
        return await server._serve(answer, request)

    async def have_arrived(requests: int) -> None:
        while server._requests.total() < requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    app.add_routes([web.post("/{id}", serve)])
    async with TestClient(TestServer(app)) as client:
        first = [asyncio.create_task(client.post("/sandboxes", json={})) for _ in range(MOST_PER_ADDRESS)]
        await have_arrived(len(first))
        assert (await client.post("/sandboxes", json={})).status == 503
        other = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(connector=other) as api_server:
            admitted = asyncio.create_task(api_server.post(client.make_url("/sandboxes"), json={}))
            waiting = asyncio.create_task(have_arrived(len(first) + 1))
            await asyncio.wait([admitted, waiting], return_when=asyncio.FIRST_COMPLETED)
            go_on.set()
            assert (await admitted).status == 200, "one pod could take all places"
        assert {(await reply).status for reply in first} == {200}
        assert (await client.post("/sandboxes", json={})).status == 200
    assert most_checked == 1, "parsed requests of one tenant could fill the memory of the operator"


async def test_unfinished_requests_use_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "READ_SECONDS", 0.2)

    async def answer(_: Any, **more: Any) -> Any:
        return {}

    server, app = Server(), web.Application()

    async def serve(request: web.Request) -> web.Response:
        return await server._serve(answer, request)

    app.add_routes([web.post("/{id}", serve)])
    async with TestClient(TestServer(app)) as client:
        connections = [await asyncio.open_connection(client.host, client.port) for _ in range(MOST_PER_ADDRESS)]
        for _, writer in connections:
            writer.write(b"POST /sandboxes HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
        for reader, writer in connections:
            assert b" 408 " in await reader.readline()
            writer.close()
        monkeypatch.setattr(admission, "READ_SECONDS", 60)
        assert (await client.post("/sandboxes", json={})).status == 200


async def make_certificate(certificate: Path, key: Path) -> None:
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=a"
    command = ["openssl", *made.split(), "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)


async def test_operator_with_an_unreadable_certificate_runs_and_serves_once_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RELOAD_SECONDS", 0.02)
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_text("no certificate")

    async def answer(_: Any, **more: Any) -> Any:
        return {}

    port = free_port()
    async with Server(port=port, certfile=certificate, pkeyfile=key) as server, aiohttp.ClientSession() as api_server:
        serving = server(answer)
        await anext(serving)
        going_on = asyncio.ensure_future(anext(serving))
        url = f"https://127.0.0.1:{port}/sandboxes"
        with pytest.raises(aiohttp.ClientConnectorError):
            await api_server.post(url, json={}, ssl=False)
        await make_certificate(certificate, key)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectorError):
                    assert (await api_server.post(url, json={}, ssl=False)).status == 200
                    break
                await asyncio.sleep(0.02)
        assert not going_on.done()
        going_on.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await going_on


async def test_connections_of_a_pod_end_before_they_fill_the_memory(tmp_path: Path) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    await make_certificate(certificate, key)

    async def answer(_: Any, *, webhook: str, **more: Any) -> Any:
        return {"webhook": webhook}

    port = free_port()
    async with Server(port=port, certfile=certificate, pkeyfile=key) as server:
        await anext(server(answer))
        idle = [await asyncio.open_connection("127.0.0.2", port) for _ in range(4 * MOST_OF_ADDRESS)]
        async with asyncio.timeout(10):
            for reader, _ in idle[:-MOST_OF_ADDRESS]:
                assert await reader.read() == b""
        assert not any(reader.at_eof() for reader, _ in idle[-MOST_OF_ADDRESS:])
        async with aiohttp.ClientSession() as api_server:
            url = f"https://127.0.0.1:{port}/sandboxes"
            async with api_server.post(url, json={}, ssl=False) as reply:
                assert await reply.json() == {"webhook": "sandboxes"}
        for _, writer in idle:
            writer.close()
        gc.disable()  # Python seldom collects the oldest garbage of a large process.
        tracemalloc.start()
        try:
            for _ in range(100):
                _, writer = await asyncio.open_connection("127.0.0.2", port)
                writer.close()
                await writer.wait_closed()
            assert tracemalloc.get_traced_memory()[1] < 100 * 2**16
        finally:
            tracemalloc.stop()
            gc.enable()


def test_kopf_serves_nothing_unless_the_configuration_says_so(tmp_path: Path) -> None:
    registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    register(registry, settings, CONFIG)
    assert settings.admission.server is None
    register(registry, settings, OperatorConfig.model_validate(LEAST | {"admission": {"certificates": str(tmp_path)}}))
    assert isinstance(settings.admission.server, Server)
    assert settings.execution.max_workers == 1


async def test_kopf_keeps_no_objects_of_admission() -> None:
    memories = admission.NoMemories()
    for number in range(3):
        await memories.recall_memo({"metadata": {"uid": str(number)}}, ephemeral=False)
    assert not list(memories.iter_all_memories())
