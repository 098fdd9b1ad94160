"""The Harbor server's API over our jobs: real uploads, real sandboxes, and a server that is killed."""

import asyncio
import io
import json
import os
import re
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from agent_runtime.agents.base import AgentContext
from agent_runtime.integrations.harbor_server.archive import pack
from agent_runtime.integrations.harbor_server.runs import FolderInUse
from agent_runtime.integrations.harbor_server.schemas import PATH, RunResult
from agent_runtime.integrations.harbor_server.trials import rewards_of
from agent_runtime.models.providers.openai_endpoint import OpenAIEndpoint
from agent_runtime.proxy.serve import standalone_proxy
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.records import AttemptRecord
from tests.support.harbor_server import KEY, asking, harbor_server, job, job_manifest, start_serve
from tests.support.harbor_tasks import hello_world
from tests.support.ports import free_port

ORACLE = job("oracle", {"type": "Oracle"}, mode="Eval")
Answer = tuple[int, dict[str, Any]]


async def post(url: str, archive: bytes, metadata: Any = None, **headers: str) -> Answer:
    """Send a request as PR #83's client does, with further headers."""
    form = aiohttp.FormData()
    form.add_field("metadata", metadata if isinstance(metadata, str) else json.dumps(metadata or {}))
    form.add_field("task_archive", archive, filename="task.tar.gz", content_type="application/gzip")
    async with aiohttp.ClientSession() as http, http.post(url + PATH, data=form, headers=headers) as reply:
        return reply.status, await reply.json()


async def get(url: str, run: str, method: str = "GET", **params: str) -> Answer:
    async with aiohttp.ClientSession() as http, http.request(method, f"{url}{PATH}/{run}", params=params) as reply:
        return reply.status, await reply.json()


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, link
    return found


async def test_pr_83_client_gets_its_rewards_and_warnings(tmp_path: Path) -> None:
    metadata = {
        "task_path": "/data/hello",
        "agent": {"name": "oracle", "kwargs": {"temperature": 0.7, "total_cost_limit": 0}, "later": 1},
        "timeout_multiplier": 1.0,
        "verifier": {"disable": False},
        "environment_kwargs": {"namespace": "default"},
    }
    async with harbor_server(tmp_path, ORACLE) as (url, _):
        status, answer = await post(url, pack(hello_world(tmp_path / "hello")), metadata)

        assert (status, answer["status"], answer["rewards"]) == (200, "completed", {"reward": 1.0})
        assert answer["error"] is None
        assert Path(answer["result_uri"]).is_dir()
        told = " ".join(answer["warnings"])
        assert all(
            name in told for name in ("agent.later", "agent.kwargs.total_cost_limit", "environment_kwargs.namespace")
        )
        assert await get(url, answer["run_id"]) == (200, answer)


@pytest.mark.parametrize(("written", "reward"), [('{"score": 0.75}', 0.75), ('{"reward": 0.5, "style": 1}', 0.5)])
async def test_server_counts_reward_once_when_client_sums_rewards(tmp_path: Path, written: str, reward: float) -> None:
    script = f"#!/bin/bash\necho '{written}' > /logs/verifier/reward.json\n"
    folder = hello_world(tmp_path / "hello", **{"tests/test.sh": script})
    async with harbor_server(tmp_path, ORACLE) as (url, _):
        _, answer = await post(url, pack(folder))
        assert (rewards_of(RunResult.model_validate(answer)) or {}).get("reward") == reward, answer


class Broken:
    async def run(self, context: AgentContext) -> None:
        raise KeyError("a typo")


async def test_runs_fail_when_the_agent_raises_the_same_in_each_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = hello_world(tmp_path / "hello")
    shutil.rmtree(folder / "environment")
    scripted = {"scripted": {"tasks": [{"task": "hello", "members": [{"turns": [{"content": "x"}]}]}]}}
    archive, served = pack(folder), job("broken", {"type": f"{__name__}:Broken"}, mode="Eval", model=scripted)
    async with harbor_server(tmp_path, served) as (url, _):
        _, alone = await post(url, archive)
        together = await asyncio.gather(*(post(url, archive) for _ in range(10)))
        _, later = await post(url, archive)
    assert (alone["status"], alone["rewards"]) == ("completed", {"reward": 0.0})
    assert re.match(r"AgentError: KeyError: 'a typo' \(.*test_server.py:\d+\)$", alone["error"])
    for answer in (*(answer for _, answer in together), later):
        assert (answer["status"], answer["rewards"]) == ("failed", None)
        assert re.match(r"AgentBroken: (.|\n)*test_server.py(.|\n)*KeyError: 'a typo'", answer["error"])
    [logged] = [record for record in caplog.records if "KeyError: 'a typo'" in record.getMessage()]
    assert "broken" in logged.getMessage()


async def test_client_without_the_key_can_neither_run_read_nor_end(tmp_path: Path) -> None:
    archive = pack(hello_world(tmp_path / "hello"))
    async with harbor_server(tmp_path, ORACLE) as (url, _):
        bare = f"http://{url.partition('@')[2]}"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic !"}, {"x-api-key": KEY + "x"}):
            assert (await post(bare, archive, **headers))[0] == 401
        assert (await get(bare, "run-x"))[0] == (await get(bare, "run-x", "DELETE"))[0] == 401
        assert not list((tmp_path / "runs").iterdir())
        assert (await post(bare, b"", Authorization=f"Bearer {KEY}"))[0] == 400


async def test_hostile_archive_writes_and_reads_nothing_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("s3cret")
    hostile = {
        "leads out": tar_of((member("../../out"), b"x")),
        "is neither a file": tar_of((member("t/link", tarfile.SYMTYPE, "/etc/passwd"), b"")),
        "is neither a file nor": tar_of((member("t/dev", tarfile.CHRTYPE), b"")),
        "not a tar.gz": b"nonsense",
        "leads out of": tar_of((member(str(tmp_path / "absolute")), b"x")),
        "no folder with": tar_of((member("t/readme"), b"x")),
        "expected one folder": tar_of(*((member(f"{n}/task.toml"), b"") for n in "ab")),
    }
    monkeypatch.setenv("SERVERS_SECRET", "s3cret")
    leaking = hello_world(tmp_path / "leaking", '\n[environment.env]\nX = "${SERVERS_SECRET}"\n')
    hostile["SERVERS_SECRET; send it in environment_overrides"] = pack(leaking)
    reading = hello_world(tmp_path / "reading", f'docker_image = "{tmp_path}"\n')
    hostile["is a path of the server"] = pack(reading)
    async with harbor_server(tmp_path / "server", ORACLE) as (url, _):
        for reason, archive in hostile.items():
            status, answer = await post(url, archive)
            assert status == 400, (reason, answer)
            if reason != "expected one folder":
                assert reason.split(" and")[0] in answer["detail"], answer
        assert not list((tmp_path / "server" / "runs").iterdir())
    assert not (tmp_path / "absolute").exists()
    assert not list(tmp_path.glob("**/out"))


async def test_body_that_cannot_be_decoded_is_refused(tmp_path: Path) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=b", "Content-Encoding": "gzip"}
    async with (
        harbor_server(tmp_path, ORACLE) as (url, _),
        aiohttp.ClientSession() as http,
        http.post(url + PATH, data=b"no gzip", headers=headers) as reply,
    ):
        assert (reply.status, "not a multipart form" in (await reply.json())["detail"]) == (400, True)


async def test_too_much_is_refused_before_it_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime.integrations.harbor_server.archive.UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr("agent_runtime.integrations.harbor_server.archive.MEMBERS", 50)
    monkeypatch.setattr("agent_runtime.integrations.harbor_server.server.ARCHIVE_BYTES", 1 << 16)
    monkeypatch.setattr("agent_runtime.integrations.harbor_server.server.METADATA_BYTES", 1 << 10)
    bomb = tar_of((member("t/zeros"), b"\0" * (2 << 20)))
    crowd = tar_of(*((member(f"t/{number}"), b"") for number in range(60)))
    async with harbor_server(tmp_path, ORACLE) as (url, _):
        assert "bytes unpacked" in (await post(url, bomb))[1]["detail"]
        assert "more than 50 entries" in (await post(url, crowd))[1]["detail"]
        assert "task_archive has more than" in (await post(url, os.urandom(1 << 17)))[1]["detail"]
        assert "metadata has more than" in (await post(url, b"", {"task_path": "x" * 2000}))[1]["detail"]
        assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ("{not json", "metadata: "),
        ({"agent": {"name": "nobody"}}, "agent.name: 'nobody' is not served; the server was started with oracle"),
        ({"timeout_multiplier": 0}, "timeout_multiplier: "),
        ({"environment_overrides": {"not a name": "x"}}, "sandbox.env"),
    ],
)
async def test_unsupported_request_is_refused_with_the_field(tmp_path: Path, metadata: Any, told: str) -> None:
    async with harbor_server(tmp_path, ORACLE) as (url, _):
        status, answer = await post(url, pack(hello_world(tmp_path / "hello")), metadata)

    assert status == 400
    assert told in answer["detail"]


async def test_concurrent_requests_with_the_same_key_give_one_run(tmp_path: Path) -> None:
    archive = pack(hello_world(tmp_path / "hello"))
    async with harbor_server(tmp_path, ORACLE) as (url, _):
        answers = await asyncio.gather(*(post(url, archive, **{"Idempotency-Key": "a"}) for _ in range(3)))
        again = await post(url, archive, **{"Idempotency-Key": "a"})
        other = await post(url, archive, {"task_path": "another"}, **{"Idempotency-Key": "a"})
        (tmp_path / "hello" / "tests" / "test.sh").chmod(0o700)
        other_mode = await post(url, pack(tmp_path / "hello"), **{"Idempotency-Key": "a"})
        (tmp_path / "hello" / "instruction.md").write_text("Write something else.")
        other_task = await post(url, pack(tmp_path / "hello"), **{"Idempotency-Key": "a"})
        differing = [{"task_path": path} for path in ("one", "two", "three")]
        at_once = await asyncio.gather(*(post(url, archive, each, **{"Idempotency-Key": "b"}) for each in differing))

    assert [answer["run_id"] for _, answer in [*answers, again]] == [again[1]["run_id"]] * 4
    assert sorted(status for status, _ in at_once) == [200, 409, 409]
    assert len(list((tmp_path / "out").iterdir())) == 2
    assert (other[0], other_mode[0], other_task[0]) == (409, 409, 409)


async def test_equal_keys_at_two_servers_with_one_output_are_two_runs(tmp_path: Path) -> None:
    """Otherwise the second client would get the first one's reward, for another task."""
    oracle = job("oracle", {"type": "Oracle"}, mode="Eval", output={"uri": str(tmp_path / "out")})
    task = hello_world(tmp_path / "hello")
    rewards = []
    for server in ("one", "two"):
        async with harbor_server(tmp_path / server, oracle) as (url, _):
            _, answer = await post(url, pack(task), **{"Idempotency-Key": "step-1"})
            rewards.append(answer["rewards"])
        (task / "solution" / "solve.sh").write_text("#!/bin/sh\n")
    assert rewards == [{"reward": 1.0}, {"reward": 0.0}]


async def test_second_server_on_a_folder_is_refused_and_takes_no_run_from_the_first(tmp_path: Path) -> None:
    """Otherwise it would end the first server's runs, and report them as failed to their clients."""
    archive, model = pack(hello_world(tmp_path / "hello")), HeldModel()
    async with model as model_url, harbor_server(tmp_path, job("mini", asking(turns=1))) as (url, _):
        metadata = {
            "agent": {"llm_proxy_url": model_url},
            "environment_overrides": {"OPENAI_API_KEY": "of-the-session"},
        }
        waiting = asyncio.create_task(post(url, archive, metadata))
        while not model.calls:
            assert not waiting.done(), waiting.result()
            await asyncio.sleep(0.05)
        with pytest.raises(FolderInUse, match="--folder"):
            async with harbor_server(tmp_path, job("mini", asking(turns=1))):
                pass
        model.free.set()
        assert (await waiting)[1]["status"] == "completed"


class HeldModel:
    """A client's session whose first call hangs."""

    def __init__(self) -> None:
        self.asked, self.gone, self.free = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.calls = 0

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post("/{key}/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/sk-one/v1"

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def answer(self, request: web.Request) -> web.Response:
        self.calls += 1
        self.asked.set()
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.gone.set()
            raise
        body = {"choices": [{"message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}], "model": "m"}
        return web.json_response(body | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}})


MINI = job("mini", asking(turns=2))


async def test_a_client_that_goes_away_ends_its_run_and_its_model_call(tmp_path: Path) -> None:
    model = HeldModel()
    async with model as model_url, harbor_server(tmp_path, MINI) as (url, runs):
        metadata = {"agent": {"llm_proxy_url": model_url}}
        posting = asyncio.create_task(post(url, pack(hello_world(tmp_path / "hello")), metadata))
        await asyncio.wait_for(model.asked.wait(), 30)

        posting.cancel()

        await asyncio.wait_for(model.gone.wait(), 30)
        (kept,) = [path for path in (tmp_path / "runs").iterdir() if path.name.startswith("run-")]
        _, answer = await get(url, kept.name, wait="30")
        assert (answer["status"], answer["rewards"]) == ("failed", None)
        assert answer["error"].startswith("Cancelled: its client disconnected")
        assert runs.count == 0


async def test_a_run_is_ended_by_delete_and_has_no_reward(tmp_path: Path) -> None:
    model = HeldModel()
    async with model as model_url, harbor_server(tmp_path, MINI) as (url, _):
        metadata = {"agent": {"llm_proxy_url": model_url}}
        status, begun = await post(url, pack(hello_world(tmp_path / "hello")), metadata, Prefer="respond-async")
        assert (status, begun["status"]) == (202, "running")
        await asyncio.wait_for(model.asked.wait(), 30)

        ended = await get(url, begun["run_id"], "DELETE")

        assert (ended[0], ended[1]["status"], ended[1]["rewards"]) == (200, "failed", None)
        await asyncio.wait_for(model.gone.wait(), 30)
        assert await get(url, begun["run_id"]) == ended
        assert (await get(url, "run-unknown", "DELETE"))[0] == 404


async def test_run_of_a_killed_server_resumes_and_is_not_doubled(tmp_path: Path) -> None:
    """The agent's first call is held while the server is killed: the next server finds the same process in its sandbox."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_manifest("mini", asking(turns=2))))
    archive, port, model = pack(hello_world(tmp_path / "hello")), free_port(), HeldModel()
    url = f"http://:{KEY}@127.0.0.1:{port}"
    async with model as model_url:
        metadata = {
            "agent": {"name": "mini", "llm_proxy_url": model_url},
            "environment_overrides": {"OPENAI_API_KEY": "of-the-session"},
        }
        first = await start_serve(tmp_path, port)
        _, begun = await post(url, archive, metadata, **{"Idempotency-Key": "k", "Prefer": "respond-async"})
        waiting = asyncio.create_task(post(url, archive, {**metadata, "task_path": "another"}))
        while model.calls < 2:
            assert not waiting.done(), waiting.result()
            await asyncio.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        with pytest.raises(aiohttp.ClientError):
            await waiting
        model.free.set()
        # Another manifest: the resumed run must not use it.
        (tmp_path / "job.yaml").write_text(
            yaml.safe_dump(job_manifest("other", {"type": "Nop"}, output={"uri": "else"}))
        )
        second = await start_serve(tmp_path, port)
        try:
            # The same key: the client that lost its connection finds its run, and begins no other.
            status, answer = await post(url, archive, metadata, **{"Idempotency-Key": "k"})
            names = {path.name for path in (tmp_path / "runs").iterdir()} - {begun["run_id"]}
            _, given_up = await get(url, names.pop(), wait="60")
        finally:
            second.send_signal(signal.SIGTERM)
            await second.wait()

    assert (status, answer["run_id"]) == (200, begun["run_id"])
    assert (answer["status"], answer["rewards"]) == ("completed", {"reward": 1.0}), answer
    assert not names
    # No client can fetch the result of an unnamed request, so it is reported as failed and not as reward 0.
    assert (given_up["status"], given_up["rewards"]) == ("failed", None)
    run = await open_run(Store.open(str(tmp_path / "out"), {}), begun["run_id"])
    assert await run.attempts(0) == [0]
    assert (
        len({json.dumps(record.workspace) for record in await run.records(0) if isinstance(record, AttemptRecord)}) == 1
    )
    assert "of-the-session" not in "".join(
        path.read_text(errors="replace")
        for path in tmp_path.rglob("*")
        if path.is_file() and path.suffix in (".json", "")
    )


async def test_answer_that_a_killed_server_got_is_not_sampled_again(tmp_path: Path) -> None:
    """Otherwise the client trains on two answers, of which only one was acted on."""
    agent = {"type": "ToolCalling", "tools": ["bash"]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_manifest("mini", agent)))
    archive, port, model = pack(hello_world(tmp_path / "hello")), free_port(), HeldModel()
    url, admin = f"http://:{KEY}@127.0.0.1:{port}", {"Authorization": f"Bearer {KEY}"}
    async with model as model_url, aiohttp.ClientSession() as http:
        endpoint = OpenAIEndpoint(model_url, "m", headers={}, key_origin="nowhere", call_seconds=60)
        async with standalone_proxy(Store.open(str(tmp_path / "sessions"), {}), endpoint, KEY) as proxy:

            async def turns() -> int:
                async with http.get(f"{proxy.address}/sessions/one", headers=admin) as reply:
                    return len((await reply.json())["turns"])

            async with http.post(f"{proxy.address}/sessions/one", headers=admin, json={}) as reply:
                key = (await reply.json())["key"]
            metadata = {
                "agent": {"llm_proxy_url": f"{proxy.address}/v1", "model_name": "m"},
                "environment_overrides": {"OPENAI_API_KEY": key},
            }
            first = await start_serve(tmp_path, port)
            await post(url, archive, metadata, **{"Idempotency-Key": "k", "Prefer": "respond-async"})
            await asyncio.wait_for(model.asked.wait(), 60)
            # The answer reaches the server's socket, and not its record.
            first.send_signal(signal.SIGSTOP)
            model.free.set()
            while not await turns():  # noqa: ASYNC110 the proxy has no event for it
                await asyncio.sleep(0.05)
            first.send_signal(signal.SIGKILL)
            await first.wait()
            second = await start_serve(tmp_path, port)
            try:
                _, answer = await post(url, archive, metadata, **{"Idempotency-Key": "k"})
            finally:
                second.send_signal(signal.SIGTERM)
                await second.wait()
            assert (answer["status"], model.calls, await turns()) == ("completed", 1, 1)
