"""The real openai package as a client: its results, its errors, and what is recorded."""

import asyncio
import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from yarl import URL

from agent_runtime.models.base import ContextExceeded, ModelError
from agent_runtime.proxy.session import GRACE_SECONDS
from agent_runtime.recording.branches import token_branches
from agent_runtime.recording.messages import linear, undelivered_turns
from agent_runtime.recording.store import Store
from rollout_api.records import ResponseRecord
from tests.integration.proxy.conftest import ADMIN, Proxy, opened_vllm, proxy_over, until
from tests.support.proxied_model import TokenModel
from tests.support.vllm_server import VllmStandIn

HELLO: list[Any] = [{"role": "user", "content": "Hello there."}]


async def test_the_first_byte_comes_before_the_last_token(proxy: Proxy, model: TokenModel) -> None:
    model.hold = asyncio.Event()
    client = await proxy.openai("s")
    async with await client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == "word ":
                model.hold.set()
    assert text == "word 1"


async def test_a_conversation_is_token_exact_by_every_form_of_call(vllm_proxy: Proxy, engine: VllmStandIn) -> None:
    client = await vllm_proxy.openai("s")
    messages = list(HELLO)
    for number in range(6):
        if number % 2:
            stream = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        else:
            whole = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
            text = whole.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {number}?"}]
    records = linear(await vllm_proxy.records("s"))
    [branch] = token_branches(records)
    served = list(engine.served)
    assert branch.token_ids == [*served[-1].prompt_ids, *served[-1].ids]
    sampled = [token for token, mask in zip(branch.token_ids, branch.mask, strict=True) if mask]
    assert sampled == [token for request in served for token in request.ids]


async def test_every_refusal_is_an_exception_of_the_package_with_advice(proxy: Proxy, model: TokenModel) -> None:
    client = await proxy.openai("s", max_retries=2, limits={"turns": 2})
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="use tiny"):
        await ask(model="gpt-4o", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="messages"):
        await ask(model="tiny", messages=[])
    model.failures = [ContextExceeded("1000 tokens are too many")]
    with pytest.raises(openai.BadRequestError) as too_long:
        await ask(model="tiny", messages=HELLO)
    assert too_long.value.code == "context_length_exceeded"
    await ask(model="tiny", messages=HELLO)
    await ask(model="tiny", messages=HELLO)
    asked = len(model.asked)
    with pytest.raises(openai.PermissionDeniedError, match="2 turns are used up"):
        await ask(model="tiny", messages=HELLO)
    async with proxy.http.post(f"{proxy.url}/sessions/s/complete", headers=ADMIN) as reply:
        assert reply.status == 200
    with pytest.raises(openai.ConflictError, match="has ended"):
        await ask(model="tiny", messages=HELLO)
    assert len(model.asked) == asked, "what is refused is not tried again"
    assert GRACE_SECONDS == 10


async def test_failing_model_is_reported_by_status_and_retried_by_the_package(proxy: Proxy, model: TokenModel) -> None:
    statuses = {"Unreachable": 502, "ServerError": 502, "RateLimited": 503, "Timeout": 504}
    client = await proxy.openai("s")
    for reason, status in statuses.items():
        model.failures = [ModelError(reason, "not now")]
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        assert failed.value.status_code == status
        assert failed.value.response.headers["retry-after"] == "1"
    model.failures = [ModelError("Unreachable", "not now")]
    patient = client.with_options(max_retries=1)
    assert (await patient.chat.completions.create(model="tiny", messages=HELLO)).choices[0].message.content == "word 6"


async def test_completing_a_session_again_names_the_same_failure(proxy: Proxy, model: TokenModel) -> None:
    client = await proxy.openai("s")
    model.failures = [ModelError("Unreachable", "not now")]
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="tiny", messages=HELLO)
    for _ in range(2):
        async with proxy.http.post(f"{proxy.url}/sessions/s/complete", headers=ADMIN) as reply:
            assert (await reply.json())["failure"] == "Unreachable: not now"


async def test_only_the_key_of_a_session_opens_it(proxy: Proxy) -> None:
    first, second = await proxy.register("first"), await proxy.register("second", expires_seconds=1)
    key = first.split("/")[-2]

    async def status(path: str, key: str | None = None, header: str = "Authorization") -> int:
        scheme = {"Authorization": "Bearer ", "Basic": "Basic "}.get(header, "")
        headers = {} if key is None else {"Authorization" if scheme else header: scheme + key}
        body = {"model": "tiny", "messages": HELLO}
        async with proxy.http.post(f"{proxy.url}{path}", json=body, headers=headers) as reply:
            return reply.status

    assert await status("/v1/chat/completions") == 401
    assert await status("/v1/chat/completions", key) == 200
    assert await status("/v1/chat/completions", key, "x-api-key") == 200
    in_url = base64.b64encode(f"any:{key}".encode()).decode()
    assert await status("/v1/chat/completions", in_url, "Basic") == 200
    assert await status("/v1/chat/completions", "no base64", "Basic") == 401
    assert await status("/first/v1/chat/completions", key) == 200
    assert await status("/v1/chat/completions/first", key) == 200
    assert await status("/sessions/first/v1/chat/completions", key) == 200
    assert await status("/second/v1/chat/completions", key) == 401
    assert await status("/v1/chat/completions", key[:-1] + ("a" if key[-1] != "a" else "b")) == 401
    assert await status("/nobody/v1/chat/completions", key) == 401
    await asyncio.sleep(1.1)
    assert await status(f"/{second.split('/')[-2]}/v1/chat/completions") == 401


async def test_keyless_proxy_serves_clients_that_have_no_key(model: TokenModel, tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with proxy_over(model, tmp_path, admin_key=None) as proxy:
        async with proxy.http.post(f"{proxy.url}/sessions/trial") as reply:
            assert reply.status == 201
        for headers in ({}, {"Authorization": "Bearer EMPTY"}):
            async with proxy.http.post(f"{proxy.url}/trial/v1/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
        async with proxy.http.get(f"{proxy.url}/sessions/trial") as reply:
            assert len((await reply.json())["turns"]) == 2
        async with proxy.http.post(f"{proxy.url}/unknown/v1/chat/completions", json=body) as reply:
            assert reply.status == 401, "no session is made but by registering it"
        async with proxy.http.post(f"{proxy.url}/sessions/short", json={"expires_seconds": 1}) as reply:
            assert reply.status == 201
        await asyncio.sleep(1.1)
        async with proxy.http.post(f"{proxy.url}/short/v1/chat/completions", json=body) as reply:
            assert reply.status == 401, "it has expired"
        async with proxy.http.post(f"{proxy.url}/sessions/trial/complete") as reply:
            assert reply.status == 200


async def test_sessions_are_registered_read_and_deleted_by_their_administrator_alone(proxy: Proxy) -> None:
    client = await proxy.openai("s", metadata={"task": "t"})
    async with proxy.http.post(f"{proxy.url}/sessions/s", headers=ADMIN) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (409, "session_exists")
    for method, path in (("POST", "new"), ("GET", "s"), ("GET", "s/traces"), ("POST", "s/complete"), ("DELETE", "s")):
        for headers in ({}, {"Authorization": "Bearer x"}):
            async with proxy.http.request(method, f"{proxy.url}/sessions/{path}", headers=headers) as reply:
                assert reply.status == 401
    async with proxy.http.get(f"{proxy.url}/sessions/new", headers=ADMIN) as reply:
        assert reply.status == 404, "reading must not create"
    await client.chat.completions.create(model="tiny", messages=HELLO)
    async with proxy.http.get(f"{proxy.url}/sessions/s", headers=ADMIN) as reply:
        record = await reply.json()
    [turn] = record["turns"]
    assert (record["session_id"], record["completed"], record["metadata"]) == ("s", False, {"task": "t"})
    assert (turn["request_messages"], turn["completion_text"]) == (HELLO, "word 1")
    assert (turn["completion_token_ids"], turn["completion_logprobs"]) == ([1002, 1003], [-0.5, -0.25])
    async with proxy.http.get(f"{proxy.url}/sessions/s/traces", headers=ADMIN) as reply:
        [trace] = await reply.json()
    assert (trace["prompt_token_ids"], trace["token_counts"]) == ([7, 7, 7], {"prompt": 3, "completion": 2})
    async with proxy.http.delete(f"{proxy.url}/sessions/s", headers=ADMIN) as reply:
        assert reply.status == 200
    with pytest.raises(openai.AuthenticationError):
        await client.chat.completions.create(model="tiny", messages=HELLO)
    assert await proxy.store.store.list("sessions") == []


async def test_malformed_request_leaves_no_key_in_the_log(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    base_path = await proxy.register("s")
    address = URL(proxy.url)
    for malformed in (
        f"GET {URL(base_path).path}/models HTTP/9.x\r\n\r\n",
        "GET / HTTP/1.1\r\nx-api-key: the-admin-key\0\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(malformed.encode())
        assert b" 400 " in await reader.readline()
        writer.close()
    headers = {"Content-Encoding": "gzip"}
    async with proxy.http.post(f"{base_path}/chat/completions", data=b"no gzip", headers=headers) as reply:
        assert reply.status == 400
    assert "sk-s." not in caplog.text
    assert "the-admin-key" not in caplog.text


async def test_a_body_over_the_limit_is_refused_before_it_is_read(proxy: Proxy) -> None:
    base = await proxy.register("s", limits={"body_bytes": 1000})
    with pytest.raises(openai.APIStatusError) as refused:
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client:
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 2000}])
    assert refused.value.status_code == 413


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_stops_the_engine(tmp_path: Path, stream: bool) -> None:
    async with (
        VllmStandIn(tokens_per_second=100, abort_seconds=0.02) as engine,
        opened_vllm(engine) as vllm,
        proxy_over(vllm, tmp_path) as proxy,
    ):
        client = await proxy.openai("s")
        wanted: Any = {"model": "policy", "messages": HELLO, "max_tokens": 2000, "extra_body": {"min_tokens": 2000}}
        if stream:
            answer = await client.chat.completions.create(**wanted, stream=True)
            await anext(aiter(answer))
            await answer.close()
        else:
            asking = asyncio.ensure_future(client.chat.completions.create(**wanted))
            await until(lambda: bool(engine.served and engine.served[-1].ids))
            asking.cancel()
        await until(lambda: bool(engine.served and engine.served[-1].ended))
        served = engine.served[-1]
        assert served.aborted
        assert served.disconnected
        assert len(served.ids) < 2000
        assert served.orphan_tokens <= 20, "what the engine makes until its own abort, and no more"
        assert await proxy.metric("session_proxy_cancelled_total") == 1


@dataclass
class LateAnswers:
    """The first answer is `written`, and the store reports that only when `told` is set."""

    written: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def late_answers(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> LateAnswers:
    """See LateAnswers."""
    answers = LateAnswers()
    create = Store.create

    async def late(self: Store, key: str, data: bytes) -> bool:
        done = await create(self, key, data)
        if key.endswith("/1-1.jsonl.zst"):  # the segment after the intent's
            answers.written.set()
            await answers.told.wait()
        return done

    monkeypatch.setattr(Store, "create", late)
    return answers


async def test_the_packages_own_retry_gets_the_answer_that_its_first_try_did_not_wait_for(
    proxy: Proxy, model: TokenModel, late_answers: LateAnswers
) -> None:
    client = await proxy.openai("s", timeout=1, max_retries=100)
    asking = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HELLO))
    while await proxy.metric("session_proxy_coalesced_total") < 1:
        assert not asking.done()
    late_answers.told.set()
    assert (await asking).choices[0].message.content == "word 1"
    assert len(model.asked) == 1


async def test_undelivered_answer_is_recorded_and_in_no_export(
    proxy: Proxy, model: TokenModel, late_answers: LateAnswers
) -> None:
    client = await proxy.openai("s")
    asking = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HELLO))
    await late_answers.written.wait()
    asking.cancel()
    await asyncio.wait([asking])
    late_answers.told.set()
    async with proxy.http.post(f"{proxy.url}/sessions/s/complete", headers=ADMIN) as reply:
        assert reply.status == 200
    records = await proxy.records("s")
    assert [record.turn for record in records if isinstance(record, ResponseRecord)] == [0]
    assert undelivered_turns(records) == {0}
    assert linear(records) == []
    async with proxy.http.get(f"{proxy.url}/sessions/s", headers=ADMIN) as reply:
        assert (await reply.json())["turns"] == []


async def test_many_parallel_samples_of_one_prompt_are_many_branches(proxy: Proxy, model: TokenModel) -> None:
    client = await proxy.openai("s")
    asked = [client.chat.completions.create(model="tiny", messages=HELLO) for _ in range(20)]
    texts = {answer.choices[0].message.content for answer in await asyncio.gather(*asked)}
    assert len(texts) == 20
    assert len(token_branches(linear(await proxy.records("s")))) == 20


async def test_samples_of_one_prompt_through_another_keyless_replica_all_count(tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with proxy_over(TokenModel(), tmp_path, None) as owner, proxy_over(TokenModel(), tmp_path, None) as other:
        await owner.register("s")
        answers = []
        for _ in range(3):
            async with other.http.post(f"{other.url}/s/v1/chat/completions", json=body) as reply:
                answers.append((await reply.json())["choices"][0]["message"]["content"])
            await asyncio.sleep(0.2)  # for the other replica to say that its client has the answer
        async with owner.http.get(f"{owner.url}/sessions/s") as reply:
            turns = (await reply.json())["turns"]
    assert [turn["message"]["content"] for turn in turns] == answers


async def test_client_cannot_set_the_delivery_of_its_answers(proxy: Proxy) -> None:
    base_url = await proxy.register("s")
    key = base_url.split("/")[-2]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    forged = {"x-session-proxy-forwarded": "1"}
    for _ in range(2):
        async with proxy.http.post(f"{base_url}/chat/completions", json=body, headers=forged) as reply:
            assert reply.status == 200
            assert "x-session-proxy-turn" not in reply.headers
    for headers in (ADMIN, {"Authorization": f"Bearer {key}", **forged}):
        url = f"{proxy.url}/sessions/s/turns/1"
        async with proxy.http.post(url, json={"delivered": False}, headers=headers) as reply:
            assert reply.status == 404
    async with proxy.http.post(f"{proxy.url}/sessions/s/complete", headers=ADMIN) as reply:
        assert reply.status == 200
    async with proxy.http.get(f"{proxy.url}/sessions/s", headers=ADMIN) as reply:
        assert [turn["turn"] for turn in (await reply.json())["turns"]] == [0, 1]
