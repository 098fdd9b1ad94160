"""What a trial's server does when the session of its client refuses or fails, and what the client makes of it."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_runtime.integrations.harbor_server.client import TrialFailed, TrialLost
from agent_runtime.integrations.harbor_server.plan import SessionUrl
from agent_runtime.integrations.harbor_server.runs import SessionModel
from agent_runtime.integrations.harbor_server.schemas import RunResult, RunStatus
from agent_runtime.integrations.harbor_server.trials import rewards_of
from agent_runtime.integrations.verl.model import LLMClientModel
from agent_runtime.models.base import (
    ContextExceeded,
    ModelConfigError,
    ModelReply,
    ModelRequest,
    RequestRefused,
    TokenPrefix,
)
from agent_runtime.models.probe import PROBE_TOKENS, ProbeResult, probe_request
from agent_runtime.proxy import session
from rollout_api.records import Message
from tests.integration.remote import test_verl_trials as trials
from tests.integration.remote.test_verl_trials import Letters, Output, Policy, play
from tests.support.harbor_server import asking, harbor_server, job
from tests.support.harbor_tasks import hello_world

AGENT = {"type": "ToolCalling", "tools": ["bash"], "maxTurns": 8}


class Calling(Letters):
    """Each answer calls a tool."""

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prefix: TokenPrefix | None
    ) -> list[int]:
        texts = [str(message.get("content") or "") for message in messages]
        return await super().prompt([{"content": text} for text in texts], tools, prefix)

    async def read(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stops: Sequence[str]
    ) -> tuple[str, list[dict[str, Any]]]:
        if not tools:
            return "".join(map(chr, ids)), []
        call = {"name": "bash", "arguments": json.dumps({"command": "echo cho''ke"})}
        return "go on", [{"id": f"c{len(ids)}", "type": "function", "function": call}]


class Caller(Policy):
    """Answers at once, and never again after `answers` answers. `asked`: the most tokens of each request."""

    def __init__(self, answers: int = 1000) -> None:
        super().__init__()
        self._left, self.asked = answers, list[int]()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Output:
        self.asked.append(sampling_params["max_tokens"])
        self._left -= 1
        if self._left < 0 and sampling_params["max_tokens"] > PROBE_TOKENS:
            await asyncio.sleep(60)
        return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params)

    def model(self) -> LLMClientModel:
        return LLMClientModel(self.generate, Calling(), context=4096)


class Choking(LLMClientModel):
    """Refuses what the tool printed."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        if any("choke" in str(message.get("content")) for message in request.messages if message["role"] == "tool"):
            raise RequestRefused("BadRequest", "the template cannot render it")
        return await super().complete(request)


class Choker(Caller):
    def model(self) -> LLMClientModel:
        return Choking(self.generate, Calling(), context=4096)


def limit_turns(monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]) -> None:
    config = trials.config

    def limited(folder: Path, **remote: Any) -> dict[str, Any]:
        found = config(folder, **remote)
        found["actor_rollout_ref"]["rollout"]["custom"] = {"agent_rollouts": {"agent": limits}}
        return found

    monkeypatch.setattr(trials, "config", limited)


@pytest.mark.parametrize("limits", [{"maxTurns": 2}, {"tokenBudget": 250}])
@pytest.mark.parametrize("agent", [AGENT, asking(6)], ids=["in the engine", "a program"])
async def test_a_policy_beyond_its_limits_is_graded_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: dict[str, Any], limits: dict[str, int]
) -> None:
    limit_turns(monkeypatch, limits)
    hello_world(tmp_path / "tasks" / "hello")
    served = job("solo", agent, attempts={"limit": 1})
    async with harbor_server(tmp_path / "server", served) as (url, _):
        (member,) = await play(tmp_path, Caller(), agent_name="solo", harbor_server_url=url)
    assert (member.result.outcome, member.result.reward) == ("Completed", 0.0), member.result.message
    assert not member.result.failed_attempts


@pytest.mark.parametrize(
    ("policy", "seconds"), [(Choker(), 60), (Caller(answers=1), 4)], ids=["refused", "out of time"]
)
async def test_a_test_of_the_model_is_no_turn_of_the_policy(tmp_path: Path, policy: Caller, seconds: int) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    async with harbor_server(tmp_path / "server", job("solo", AGENT)) as (url, _):
        (member,) = await play(
            tmp_path, policy, agent_name="solo", harbor_server_url=url, max_retries=1, harbor_timeout=seconds
        )
    assert PROBE_TOKENS in policy.asked
    assert (member.result.outcome, member.result.turns) == ("Completed", 1), member.result
    assert not any("Say ok." in "".join(map(chr, sample.prompt_ids)) for sample in member.samples)


@pytest.mark.parametrize(
    ("status", "code", "raised"),
    [(403, "budget_exceeded", ContextExceeded), (409, "session_ended", ModelConfigError), (403, "x", ModelConfigError)],
)
async def test_a_refusal_of_a_session_is_not_repeated(status: int, code: str, raised: type[Exception]) -> None:
    asked = list[str]()

    async def refuse(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"error": {"message": "no", "code": code}}, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as server:
        model = SessionModel(SessionUrl(str(server.make_url("/v1")), "m", "key"))
        request = probe_request(seed=0, session="s", task="t", member=0)
        with pytest.raises(raised, match="no"):
            await asyncio.wait_for(model.complete(request), 10)
        await model.close()
    assert len(asked) <= 2, "an exceeded limit is tried once more with a shorter answer"


@pytest.mark.parametrize(
    ("status", "body", "may_record", "found"),
    [
        (200, {"answers": True}, True, ProbeResult.ANSWERED),
        (200, {"answers": False, "refuses": True}, False, ProbeResult.REFUSED),
        (200, {}, True, ProbeResult.UNKNOWN),
        (404, {}, True, ProbeResult.ANSWERED),
        (404, {}, False, ProbeResult.UNKNOWN),
    ],
)
async def test_a_proxy_without_a_route_for_tests_gets_a_call(
    status: int, body: dict[str, Any], *, may_record: bool, found: ProbeResult
) -> None:
    asked = list[str]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/v1/test":
            return web.json_response(body, status=status)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}
        return web.json_response({"id": "x", "model": "m", "choices": [choice]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        model = SessionModel(SessionUrl(str(server.make_url("/v1")), "m", "key"))
        request = probe_request(seed=0, session="s", task="t", member=0)
        assert await model.test(request, may_record=may_record) is found
        await model.close()
    assert asked == ["/v1/test", "/v1/chat/completions"][: 1 + (status == 404 and may_record)]


async def test_grading_after_a_limit_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "GRACE_SECONDS", 0.5)
    limit_turns(monkeypatch, {"maxTurns": 2})
    slow = "#!/bin/sh\nsleep 3\necho 1 > /logs/verifier/reward.txt\n"
    hello_world(tmp_path / "tasks" / "hello", **{"tests/test.sh": slow})
    async with harbor_server(tmp_path / "server", job("solo", AGENT)) as (url, _):
        (member,) = await play(tmp_path, Caller(), agent_name="solo", harbor_server_url=url)
    assert (member.result.outcome, member.result.reward) == ("Completed", 1.0), member.result.message


@pytest.mark.parametrize(("error", "kind"), [("NodeLost: gone", TrialLost), ("ValueError: x", TrialFailed)])
def test_what_the_server_lost_from_outside_is_no_failure_of_the_program(error: str, kind: type[Exception]) -> None:
    with pytest.raises(TrialLost) as raised:
        rewards_of(RunResult(run_id="r", status=RunStatus.FAILED, error=error))
    assert type(raised.value) is kind
