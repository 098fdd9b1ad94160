"""Models that connect to the proxy: answers, streams, cancellation, and workers that die, hang and come back."""

import asyncio
import contextlib
import io
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_runtime.models.base import (
    ContextExceeded,
    ModelConfigError,
    ModelError,
    ModelReply,
    ModelRequest,
    RequestRefused,
)
from agent_runtime.proxy.relay import schemas
from agent_runtime.proxy.relay.hub import Hub
from agent_runtime.proxy.relay.worker import Worker
from agent_runtime.proxy.serve import standalone_proxy
from agent_runtime.recording.store import Store
from rollout_api.model import Sampling
from rollout_api.records import Usage

KEY = "the-admin-key"
BEARER = {"Authorization": f"Bearer {KEY}"}


@dataclass
class NamedModel:
    """Answers with its own name, one word after another. A test may hold its answers."""

    own: str = "worker"
    name: str = "tiny"
    token_capture: str = "Tokens"
    asked: list[ModelRequest] = field(default_factory=list)
    cancelled: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    failures: list[Exception] = field(default_factory=list)
    text: str = ""
    prompts: list[str | Sequence[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hold.set()

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.asked.append(request)
        if self.failures:
            raise self.failures.pop(0)
        if request.on_text is not None:
            request.on_text(f"{self.own} ")
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        request.health.on_prompt(3)
        if request.on_reasoning is not None:
            request.on_reasoning("hm")
        if request.on_text is not None:
            request.on_text("done")
        content = self.text or f"{self.own} done"
        message = {"role": "assistant", "content": content, "reasoning_content": "hm"}
        return ModelReply(
            message, "stop", self.name, Usage(prompt_tokens=3, completion_tokens=2), [1, 2, 3], [4, 5], [-1, -2]
        )

    async def check(self) -> None: ...

    async def close(self) -> None: ...


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not what():  # noqa: ASYNC110 what is waited for is on the other end of a connection
            await asyncio.sleep(0.005)


@dataclass
class Bench:
    """A proxy whose model is the relay's hub, the hub's workers, and a registered session."""

    hub: Hub
    url: str
    client: aiohttp.ClientSession
    base_url: str = ""
    workers: list[asyncio.Task[Any]] = field(default_factory=list)

    async def start(self, model: NamedModel, **options: Any) -> asyncio.Task[Any]:
        """Start a worker; return when it is connected."""
        before = self.hub.workers
        worker = Worker(self.url, KEY, model, f"worker-{model.own}", **options)
        task = asyncio.ensure_future(worker.run())
        self.workers.append(task)
        await until(lambda: self.hub.workers > before)
        return task

    async def go_on(self, prompt: str | list[int], *, stream: bool = False) -> tuple[int, str]:
        """Return status, and text or error, of a completion of a bare prompt."""
        body = {"model": "tiny", "prompt": prompt, "stream": stream}
        async with self.client.post(f"{self.base_url}/completions", json=body) as reply:
            text = await reply.text()
        if reply.status != 200:
            return reply.status, text
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        return 200, "".join(json.loads(event)["choices"][0]["text"] for event in events)

    async def ask(self, text: str = "hello", *, stream: bool = False) -> tuple[int, str]:
        """Return status and body of a call of the session."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": stream}
        data = io.BytesIO(json.dumps(body).encode())
        async with self.client.post(f"{self.base_url}/chat/completions", data=data) as reply:
            return reply.status, await reply.text()


@contextlib.asynccontextmanager
async def bench(folder: Path, **options: Any) -> AsyncIterator[Bench]:
    hub = Hub("tiny", **options)
    async with (
        standalone_proxy(Store.open(str(folder), {}), hub, KEY) as proxy,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        found = Bench(hub, proxy.address, client)
        limits = {"limits": {"bodyBytes": schemas.FRAME_BYTES, "conversationBytes": 4 * schemas.FRAME_BYTES}}
        async with client.post(f"{proxy.address}/sessions/s", headers=BEARER, json=limits) as reply:
            found.base_url = proxy.address + (await reply.json())["base_path"]
        try:
            yield found
        finally:
            for task in found.workers:
                task.cancel()
            await asyncio.gather(*found.workers, return_exceptions=True)


def content(body: str) -> str:
    text: str = json.loads(body)["choices"][0]["message"]["content"]
    return text


def pieces(body: str) -> list[str]:
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    return [piece for event in events if "choices" in event and (piece := event["choices"][0]["delta"].get("content"))]


async def test_an_answer_through_the_relay_is_recorded_token_for_token(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        model = NamedModel()
        await relay.start(model)
        assert relay.hub.token_capture == "Tokens"
        status, body = await relay.ask()
        assert (status, content(body)) == (200, "worker done")
        async with relay.client.get(f"{relay.url}/sessions/s", headers=BEARER) as reply:
            [turn] = (await reply.json())["turns"]
        assert (turn["prompt_token_ids"], turn["completion_token_ids"]) == ([1, 2, 3], [4, 5])
        assert turn["message"]["reasoning_content"] == "hm"
        async with relay.client.get(f"{relay.url}/health") as reply:
            assert (await reply.json())["connected_workers"] == 1


async def test_stream_through_the_relay_begins_before_its_answer_is_complete(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        model = NamedModel()
        model.hold.clear()
        await relay.start(model)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with relay.client.post(f"{relay.base_url}/chat/completions", json=body) as reply:
            first = await reply.content.readany()
            assert b"worker " in first
            model.hold.set()
            rest = await reply.content.read()
            assert b"[DONE]" in rest
            assert (first + rest).count(b'"reasoning_content":"hm"') == 1


async def test_client_that_leaves_stops_the_model_behind_the_relay(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        model = NamedModel()
        model.hold.clear()
        await relay.start(model)
        for stream in (False, True):
            call = asyncio.ensure_future(relay.ask(stream=stream))
            await until(lambda: len(model.asked) > model.cancelled)
            call.cancel()
            await until(lambda: len(model.asked) == model.cancelled)
        assert model.cancelled == 2
        model.hold.set()
        assert (await relay.ask())[0] == 200


async def test_requests_of_a_dead_worker_are_answered_by_another_one(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        models = [NamedModel(own=name) for name in ("a", "b")]
        tasks = {}
        for model in models:
            model.hold.clear()
            tasks[model.own] = await relay.start(model)
        calls = [asyncio.ensure_future(relay.ask(f"question {number}")) for number in range(8)]
        await until(lambda: sum(len(model.asked) for model in models) == 8)
        dead, alive = sorted(models, key=lambda model: -len(model.asked))
        tasks[dead.own].cancel()
        await until(lambda: len(alive.asked) == 8)
        alive.hold.set()
        assert {content(body) for _, body in await asyncio.gather(*calls)} == {f"{alive.own} done"}


async def test_stream_of_a_dead_worker_ends_with_an_error_and_is_never_mixed(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        first, second = NamedModel(own="a"), NamedModel(own="b")
        first.hold.clear()
        task = await relay.start(first)
        request = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with relay.client.post(f"{relay.base_url}/chat/completions", json=request) as reply:
            body = ""
            while "a " not in pieces(body):
                body += (await reply.content.readline()).decode()
            await relay.start(second)
            task.cancel()
            body += await reply.text()
        assert pieces(body) == ["a "]
        assert "Interrupted" in body
        assert '"finish_reason":"stop"' not in body
        assert not second.asked


async def test_request_that_ends_every_worker_fails_eventually(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        tasks = []
        models = [NamedModel(own=str(number)) for number in range(4)]
        for model in models:
            model.hold.clear()
            tasks.append(await relay.start(model))
        call = asyncio.ensure_future(relay.ask())
        for killed in range(1, 4):
            await until(lambda killed=killed: sum(len(model.asked) for model in models) == killed)  # type: ignore[misc]
            [at] = [number for number, model in enumerate(models) if model.asked and not tasks[number].done()]
            tasks[at].cancel()
            await asyncio.wait([tasks[at]])
        status, body = await call
        assert status == 502
        assert "3 workers disconnected" in body


async def test_calls_wait_for_the_first_worker_and_fail_with_a_message_when_none_connects(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        call = asyncio.ensure_future(relay.ask())
        await asyncio.wait([call], timeout=0.2)
        await relay.start(NamedModel())
        assert (await call)[0] == 200
    async with bench(tmp_path / "impatient", wait_seconds=0.5) as relay:
        task = await relay.start(NamedModel())
        task.cancel()
        await until(lambda: relay.hub.workers == 0)
        status, body = await relay.ask()
        assert status == 503
        assert "no worker of model tiny" in body


async def test_no_worker_has_more_calls_than_it_takes_and_all_are_answered(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        most = 0

        class Counting(NamedModel):
            running = 0

            async def complete(self, request: ModelRequest) -> ModelReply:
                nonlocal most
                self.running += 1
                most = max(most, self.running)
                await asyncio.sleep(0.01)
                try:
                    return await super().complete(request)
                finally:
                    self.running -= 1

        models = [Counting(own="a"), Counting(own="b")]
        for model in models:
            await relay.start(model, capacity=3)
        answers = await asyncio.gather(*(relay.ask(f"question {number}") for number in range(30)))
        assert {status for status, _ in answers} == {200}
        assert most == 3
        assert all(model.asked for model in models)


@pytest.mark.full
async def test_messages_of_99_megabytes_are_relayed_and_larger_ones_fail_with_a_message(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        model = NamedModel(text="y" * (99 << 20))
        await relay.start(model)
        status, body = await relay.ask("x" * (99 << 20))
        assert (status, len(content(body))) == (200, 99 << 20)
        assert len(model.asked[0].messages[0]["content"]) == 99 << 20
        large = ModelRequest(
            [{"role": "user", "content": "x" * schemas.FRAME_BYTES}], [], Sampling(), 0, "s", "t", 0, 0
        )
        with pytest.raises(RequestRefused, match="TooLarge"):
            await relay.hub.complete(large)
        model.text = "y" * schemas.FRAME_BYTES
        status, body = await relay.ask()
        assert status == 502
        assert "TooLarge" in body
        assert relay.hub.workers == 1


async def test_request_too_large_for_the_relay_is_not_a_model_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as relay:
        await relay.start(NamedModel())
        monkeypatch.setattr(schemas, "FRAME_BYTES", 10_000)
        status, body = await relay.ask("x" * 10_000)
        assert (status, "limited to 10000" in body) == (400, True), body
        async with relay.client.post(f"{relay.url}/sessions/s/complete", headers=BEARER) as reply:
            assert (await reply.json())["failure"] is None, "a trial would be masked, by what its policy asked"


async def test_request_with_the_most_bytes_of_a_message_does_not_disconnect_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as relay:
        monkeypatch.setattr(schemas, "FRAME_BYTES", 10_000)
        await relay.start(NamedModel())
        _, body = await relay.ask("x" * 10_000)
        said = re.search("the request has ([0-9]+) bytes", body)
        assert said is not None
        status, body = await relay.ask("x" * (20_000 - int(said[1])))
        assert (status, "has 10000 bytes" in body) == (400, True), body
        status, body = await relay.ask("x" * (19_999 - int(said[1])))
        assert status == 200, body


class PromptingModel(NamedModel):
    """Continues bare prompts too."""

    async def complete_prompt(self, prompt: str | Sequence[int], request: ModelRequest) -> ModelReply:
        self.prompts.append(prompt)
        return await self.complete(request)


async def test_bare_prompt_through_the_relay_is_continued_streamed_or_not(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        model = PromptingModel()
        await relay.start(model)
        for prompt in ("Once upon", [7, 0, 9]):
            for stream in (False, True):
                assert await relay.go_on(prompt, stream=stream) == (200, "worker done")
        assert model.prompts == ["Once upon", "Once upon", [7, 0, 9], [7, 0, 9]]
        assert not any(request.messages for request in model.asked)


async def test_bare_prompt_goes_only_to_workers_that_support_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        chats, prompts = NamedModel(own="chats"), PromptingModel(own="prompts")
        await relay.start(chats)
        status, words = await relay.go_on("Once upon")
        assert status == 400
        assert "the connected workers of model tiny support chat messages only" in words
        task = await relay.start(prompts, capacity=1)
        prompts.hold.clear()
        calls = [asyncio.ensure_future(relay.go_on(f"prompt {number}")) for number in range(3)]
        await until(lambda: len(prompts.asked) == 1)
        # Bare prompts that wait for a suitable worker do not delay other calls.
        assert content((await relay.ask())[1]) == "chats done"
        prompts.hold.set()
        assert await asyncio.gather(*calls) == [(200, "prompts done")] * 3
        assert len(chats.asked) == 1
        prompts.hold.clear()
        last = asyncio.ensure_future(relay.go_on("prompt"))
        await until(lambda: len(prompts.asked) == 4)
        task.cancel()
        assert (await last)[0] == 400


async def test_session_of_one_worker_goes_to_no_other_worker(tmp_path: Path) -> None:
    async with bench(tmp_path, wait_seconds=0.5) as relay:
        every = NamedModel(own="every")
        await relay.start(every)
        base_url = {}
        for name in ("a", "b"):
            async with relay.client.post(f"{relay.url}/sessions/{name}-1", headers=BEARER) as reply:
                base_url[name] = relay.url + (await reply.json())["base_path"]
            # The worker's model has its own name, and the client that registers the sessions names it in them.
            await relay.start(NamedModel(own=name, name="of-trials"), sessions=f"{name}-")
        answers = [content((await relay.ask())[1])]
        for relay.base_url in (base_url["a"], base_url["b"]):
            answers += [content((await relay.ask(str(number)))[1]) for number in range(3)]
        assert answers == ["every done", *["a done"] * 3, *["b done"] * 3]


async def test_session_of_one_worker_waits_while_its_worker_is_away(tmp_path: Path) -> None:
    async with bench(tmp_path, wait_seconds=0.5) as relay:
        async with relay.client.post(f"{relay.url}/sessions/a-1", headers=BEARER) as reply:
            own_url = relay.url + (await reply.json())["base_path"]
        own = await relay.start(NamedModel(own="a"), sessions="a-")
        own.cancel()
        await asyncio.wait({own})
        await relay.start(NamedModel(own="every"))
        assert content((await relay.ask())[1]) == "every done"
        relay.base_url = own_url
        status, body = await relay.ask()
        assert (status, "no worker" in body) == (503, True)


async def test_failures_of_the_model_behind_the_relay_keep_their_status(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        model = NamedModel(failures=[ContextExceeded("too long"), ModelError("Timeout", "slow"), ValueError("a bug")])
        await relay.start(model)
        answers = [await relay.ask(str(number)) for number in range(4)]
        assert [status for status, _ in answers] == [400, 504, 502, 200]
        assert "context_length_exceeded" in answers[0][1]


async def test_worker_reconnects_after_the_proxy_was_unavailable(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    model = NamedModel()
    task = asyncio.ensure_future(Worker(f"http://127.0.0.1:{port}", KEY, model, "w").run())
    store = Store.open(str(tmp_path), {})
    try:
        for _ in range(2):
            hub = Hub("tiny")
            async with standalone_proxy(store, hub, KEY, port=port):
                await until(lambda hub=hub: hub.workers == 1)  # type: ignore[misc]
    finally:
        task.cancel()


async def test_silently_dead_connection_is_noticed_and_its_calls_move(tmp_path: Path) -> None:
    async with bench(tmp_path, heartbeat_seconds=1.0) as relay, silent_after(relay.url) as (url, silence):
        dead, alive = NamedModel(own="dead"), NamedModel(own="alive")
        dead.hold.clear()
        task = asyncio.ensure_future(Worker(url, KEY, dead, "dead", heartbeat_seconds=1.0).run())
        relay.workers.append(task)
        await until(lambda: relay.hub.workers == 1)
        call = asyncio.ensure_future(relay.ask())
        await until(lambda: bool(dead.asked))
        await relay.start(alive)
        silence.set()
        assert content((await call)[1]) == "alive done"
        await until(lambda: dead.cancelled == 1)  # the worker's end notices as well


async def test_reconnected_worker_replaces_its_dead_connection(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay:
        first = asyncio.ensure_future(Worker(relay.url, KEY, NamedModel(), "w").run())
        await until(lambda: relay.hub.workers == 1)
        second = asyncio.ensure_future(Worker(relay.url, KEY, NamedModel(own="second"), "w").run())
        relay.workers.append(second)
        with pytest.raises(ModelConfigError, match="another worker has connected as w"):
            await first
        assert content((await relay.ask())[1]) == "second done"


@pytest.mark.parametrize(
    ("key", "model", "match"),
    [("wrong", NamedModel(), "refused the admin key"), (KEY, NamedModel(name="other"), "serves model 'tiny'")],
)
async def test_worker_that_can_never_serve_gets_an_immediate_error(
    tmp_path: Path, key: str, model: NamedModel, match: str
) -> None:
    async with bench(tmp_path) as relay:
        with pytest.raises(ModelConfigError, match=match):
            await Worker(relay.url, key, model, "w").run()
        assert relay.hub.workers == 0


@pytest.mark.parametrize(
    "frames",
    [
        ["[]"],
        ["{"],
        ['{"type":"worker_hello","worker_id":7}'],
        ['{"type":"worker_hello","worker_id":"w"}', '{"type":"?"}'],
    ],
)
async def test_worker_with_invalid_messages_is_closed_and_harms_no_other(tmp_path: Path, frames: list[str]) -> None:
    async with bench(tmp_path) as relay:
        await relay.start(NamedModel())
        async with relay.client.ws_connect(relay.url + schemas.PATH, headers=BEARER) as nonsense:
            for frame in frames:
                await nonsense.send_str(frame)
            async for _ in nonsense:
                pass
            assert nonsense.close_code == schemas.BROKEN
        await until(lambda: relay.hub.workers == 1)
        assert (await relay.ask())[0] == 200


async def test_a_worker_of_verl_is_served(tmp_path: Path) -> None:
    async with bench(tmp_path) as relay, relay.client.ws_connect(relay.url + schemas.PATH, headers=BEARER) as verl:
        await verl.send_json({"type": "worker_hello", "worker_id": "worker-1"})
        assert (await verl.receive_json())["type"] == "worker_hello_ack"
        await verl.send_json({"type": "ping"})
        assert await verl.receive_json() == {"type": "pong"}
        call = asyncio.ensure_future(relay.ask())
        request = await verl.receive_json()
        assert request["session_id"] == "s"
        response = {"token_ids": [5], "log_probs": [-0.5], "completion_text": "hi", "content_text": "hi", "error": None}
        await verl.send_json(
            {"type": "completion_response", "request_id": request["request_id"], "finish_reason": "stop", **response}
        )
        assert content((await call)[1]) == "hi"


@contextlib.asynccontextmanager
async def silent_after(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A connection in between that forwards nothing once the event is set, and stays open."""
    silence = asyncio.Event()
    _, _, port = url.rpartition(":")

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if not silence.is_set():
                target.write(data)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", int(port))
        ways: list[Awaitable[None]] = [pass_on(reader, back), pass_on(there, writer)]
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(*ways)
        back.close()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", silence
    finally:
        server.close()
