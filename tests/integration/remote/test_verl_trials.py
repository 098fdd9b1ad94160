"""verl's rollouts as trials on a Harbor server: a real server, real sandboxes, and a policy in this process instead of
verl's.
"""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from agent_runtime.engine.program.program import Program
from agent_runtime.engine.program.program_rules import Ended
from agent_runtime.integrations.harbor_server import trials
from agent_runtime.integrations.harbor_server.rows import HarborRows, with_remote_agent
from agent_runtime.integrations.harbor_server.settings import read_settings
from agent_runtime.integrations.harbor_server.trials import Trial, make_trials
from agent_runtime.integrations.verl.job import Kind
from agent_runtime.integrations.verl.model import LLMClientModel
from agent_runtime.integrations.verl.rollouts import Member, Rollouts
from agent_runtime.integrations.verl.rows import read_row
from agent_runtime.models.base import TokenPrefix
from agent_runtime.proxy.serve import ADMIN_KEY_VARIABLE
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import SandboxFailure
from rollout_api.records import IntentRecord, Message
from tests.support.harbor_server import asking, harbor_server, job
from tests.support.harbor_tasks import hello_world
from tests.support.proxy_process import KEY, rolloutctl, url_of


@dataclass
class Output:
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    stop_reason: str | None = "completed"
    extra_fields: Mapping[str, Any] = field(default_factory=lambda: {"global_steps": 1})
    routed_experts: Any = None


class Letters:
    """A token is a character. Tools are at the head of the prompt, as in chat templates."""

    stop_token_ids = ()

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prefix: TokenPrefix | None
    ) -> list[int]:
        names = "".join(f"[{tool['function']['name']}]" for tool in tools)
        return [ord(letter) for letter in names + "".join(message["content"] for message in messages)]

    async def read(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stops: Sequence[str]
    ) -> tuple[str, list[dict[str, Any]]]:
        return "".join(map(chr, ids)), []


class Policy:
    """Answers `ok`, or nothing while it is held."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.working = self.stopped = 0

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Output:
        self.working += 1
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return Output([ord(letter) for letter in "ok"], [-1.0, -1.0])

    def model(self) -> LLMClientModel:
        return LLMClientModel(self.generate, Letters(), context=4096)


def config(folder: Path, **remote: Any) -> dict[str, Any]:
    sampled = {"temperature": 0.5, "top_p": 1.0, "top_k": -1}
    rollout = sampled | {"val_kwargs": sampled, "prompt_length": 4096, "response_length": 256}
    return {
        "actor_rollout_ref": {"rollout": rollout},
        "trainer": {"default_local_dir": str(folder / "trained"), "experiment_name": "e"},
        "data": {"train_harbor_dir": str(folder / "tasks")},
        "remote_agent": {"retry_base_delay": 0, **remote},
    }


async def play(
    folder: Path, policy: Policy, members: int = 1, environ: Mapping[str, str] | None = None, **remote: Any
) -> list[Member]:
    """Run the rollouts of one row, as a worker of verl does."""
    settings = read_settings(config(folder, **remote), environ or {})
    assert settings is not None
    running = Rollouts(
        with_remote_agent(config(folder, **remote), settings), policy.model, make_trials(settings, environ or {})
    )
    row = read_row({"uid": "u", "index": 0, "instance_id": "hello"}, HarborRows(config(folder, **remote), {}, settings))
    try:
        return await running.run(row, Kind(members, validate=False))
    finally:
        await running.close()


async def test_prompt_is_trained_with_its_tools_and_the_engines_tokens(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    async with harbor_server(tmp_path / "server", job("mini", asking(turns=2))) as (url, _):
        members = await play(tmp_path, Policy(), members=2, agent_name="mini", harbor_server_url=url)

    for member in members:
        assert (member.result.outcome, member.result.reward) == ("Completed", 1.0), member.result.message
        (sample,) = member.samples
        text = "".join(map(chr, [*sample.prompt_ids, *sample.response_ids]))
        assert text == "[write]Write `Hello, world!` into hello.txt.\nokAnd 0?ok"
        trained = [chr(token) for token, mask in zip(sample.response_ids, sample.response_mask, strict=True) if mask]
        assert "".join(trained) == "okok"
        assert sample.logprobs[0] == -1.0


async def test_answers_of_an_attempt_that_the_server_lost_are_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    run_program = Program._run
    lost: list[bool] = []

    async def lose_the_first(program: Program) -> Ended:
        ended = await run_program(program)
        if not isinstance(program._workspace, Trial) and not lost:
            lost.append(True)
            raise SandboxFailure("NodeLost", "the server's node is gone")
        return ended

    monkeypatch.setattr(Program, "_run", lose_the_first)
    served = job("mini", asking(turns=2), attempts={"limit": 3, "backoffSeconds": 0})
    async with harbor_server(tmp_path / "server", served) as (url, _):
        (member,) = await play(tmp_path, Policy(), agent_name="mini", harbor_server_url=url)

    assert lost
    assert (member.result.outcome, member.result.reward, member.result.turns) == ("Completed", 1.0, 2)
    assert len(member.samples) == 1


async def test_a_local_trial_is_the_same_task_run_by_this_engine(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")

    (member,) = await play(tmp_path, Policy(), agent_name="oracle", use_local_trial=True)

    assert (member.result.outcome, member.result.reward) == ("Completed", 1.0), member.result.message


async def test_a_local_trial_uses_the_users_own_agent_and_sandboxes(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    own: dict[str, Any] = {"environment_import_path": "tests.support.own_trials:Sandboxes", "use_local_trial": True}

    (solved,) = await play(
        tmp_path, Policy(), agent_name="oracle", environment_kwargs={"folder": str(tmp_path / "mine")}, **own
    )
    (told,) = await play(
        tmp_path,
        Policy(),
        agent_import_path="tests.support.own_trials:Agent",
        environment_kwargs={"folder": str(tmp_path / "mine")},
        **own,
    )

    assert (solved.result.outcome, solved.result.reward) == ("Completed", 1.0), solved.result.message
    assert (told.result.outcome, told.result.reward) == ("Completed", 0.0), told.result.message
    assert (tmp_path / "mine" / "sandboxes").is_dir()
    assert [chr(token) for token in told.samples[0].response_ids] == ["o", "k"]


class ForeignServer:
    """Behaves like PR #83's own server: it answers when the trial has ended, and ignores our headers."""

    def __init__(self, *answers: dict[str, Any], is_asking: bool = False) -> None:
        self.answers, self.is_asking = list(answers), is_asking
        self.asked: list[dict[str, Any]] = []

    async def __aenter__(self) -> str:
        app = web.Application(client_max_size=0)
        app.router.add_post("/api/v1/runs", self.run)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def run(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.asked.append(json.loads(str(form["metadata"])))
        if self.is_asking:
            body = {"model": "verl", "messages": [{"role": "user", "content": "hello"}]}
            url = f"{self.asked[-1]['agent']['llm_proxy_url']}/chat/completions"
            async with ClientSession() as http, http.post(url, json=body) as reply:
                assert reply.status == 200, await reply.text()
        return web.json_response({"run_id": "r", **self.answers.pop(0)})


LOST = {"status": "error", "rewards": {"reward": 0.0}, "error": "ConnectionError: the cluster is away"}


class HangsUp(ForeignServer):
    """Its sandbox is lost while the agent waits for its second answer."""

    async def run(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.asked.append(json.loads(str(form["metadata"])))
        if "rewards" not in self.answers[0]:
            url = f"{self.asked[-1]['agent']['llm_proxy_url']}/chat/completions"
            body: dict[str, Any] = {"model": "verl", "messages": [{"role": "user", "content": "hello"}]}
            async with ClientSession() as http:
                async with http.post(url, json=body) as reply:
                    body["messages"] += [(await reply.json())["choices"][0]["message"], *body["messages"]]
                second = asyncio.create_task(http.post(url, json=body).__aenter__())
                await asyncio.sleep(0.5)
                second.cancel()
                await asyncio.gather(second, return_exceptions=True)
        return web.json_response({"run_id": "r", **self.answers.pop(0)})


class SlowInTheMiddle(Policy):
    """Answers a second call slowly."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Output:
        await asyncio.sleep(2 if "ok" in "".join(map(chr, prompt_ids)) else 0)
        return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params)


@pytest.mark.parametrize(("losses", "ends"), [(1, ("Completed", 1.0)), (2, ("Completed", 0.0))])
async def test_trial_whose_agent_hung_up_is_graded_only_the_second_time(
    losses: int, ends: tuple[str, float], tmp_path: Path
) -> None:
    """Its sandbox may have been lost in the call. But a policy must not discard its trials by its words."""
    hello_world(tmp_path / "tasks" / "hello")
    failed = {"status": "failed", "error": "DockerException: the daemon is away"}
    server = HangsUp(*[failed] * losses, {"status": "completed", "rewards": {"reward": 1.0}})
    async with server as url:
        (member,) = await play(tmp_path, SlowInTheMiddle(), agent_name="a", harbor_server_url=url, max_retries=1)
    assert (member.result.outcome, member.result.reward) == ends
    assert len(server.asked) == 2


async def test_retry_has_its_own_session_and_the_first_one_is_fenced_off(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    foreign = ForeignServer(LOST, {"status": "completed", "rewards": {"reward": 0.5, "style": 0.25}})
    async with foreign as url:
        (member,) = await play(tmp_path, Policy(), agent_name="swe-agent", harbor_server_url=url)

    assert (member.result.outcome, member.result.reward, member.result.attempt) == ("Completed", 0.75, 1)
    keys = [asked["environment_overrides"]["OPENAI_API_KEY"] for asked in foreign.asked]
    assert len(set(keys)) == 2
    assert [asked["agent"]["name"] for asked in foreign.asked] == ["swe-agent"] * 2


async def test_trials_lost_by_a_server_have_no_reward_when_no_retry_is_left(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    async with ForeignServer(LOST, LOST) as url:
        (member,) = await play(tmp_path, Policy(), agent_name="a", harbor_server_url=url, max_retries=2)

    assert member.is_lost
    assert (member.result.outcome, member.result.reward) == ("InfraFailed", None)
    assert "the cluster is away" in member.result.message


@pytest.mark.parametrize(
    "error", ["AgentTimeoutError: 1800 s", "VerifierTimeoutError: 600 s", "ApiRateLimitError: too many requests"]
)
async def test_a_policy_that_makes_its_agent_fail_is_neither_tried_again_nor_masked(tmp_path: Path, error: str) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    foreign = ForeignServer({"status": "error", "rewards": {"reward": 0.0}, "error": error}, is_asking=True)
    async with foreign as url:
        (member,) = await play(tmp_path, Policy(), agent_name="a", harbor_server_url=url)

    assert (member.result.outcome, member.result.reward) == ("Completed", 0.0)
    assert len(foreign.asked) == 1


async def test_policy_that_makes_a_slow_verifier_time_out_is_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello_world(tmp_path / "tasks" / "hello", "\n[verifier]\ntimeout_sec = 60.0\n")
    monkeypatch.setattr(trials, "GRACE_SECONDS", 0.5)

    class Slow(ForeignServer):
        """A server whose verifier runs until its time limit, which exceeds the time for building an image."""

        async def run(self, request: web.Request) -> web.Response:
            answer = await super().run(request)
            await asyncio.sleep(2)
            return answer

    foreign = Slow({"status": "error", "rewards": None, "error": "VerifierTimeoutError: 60 s"}, is_asking=True)
    async with foreign as url:
        (member,) = await play(
            tmp_path, Policy(), agent_name="a", harbor_server_url=url, harbor_timeout=1, max_retries=1
        )

    assert (member.result.outcome, member.result.reward) == ("Completed", 0.0), member.result.message


async def test_trial_whose_agent_never_reached_the_model_has_no_reward(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    foreign = ForeignServer(
        {"status": "error", "rewards": {"reward": 0.0}, "error": "NetworkConnectionError: no route"}
    )
    async with foreign as url:
        (member,) = await play(tmp_path, Policy(), agent_name="a", harbor_server_url=url, max_retries=1)

    assert (member.result.outcome, member.result.reward) == ("InfraFailed", None)
    assert "no route" in member.result.message


async def test_a_trial_that_is_cancelled_leaves_neither_the_server_nor_the_model_working(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    policy = Policy()
    policy.free.clear()
    async with harbor_server(tmp_path / "server", job("mini", asking(turns=1))) as (url, runs):
        playing = asyncio.create_task(play(tmp_path, policy, agent_name="mini", harbor_server_url=url))
        while not policy.working:
            assert not playing.done(), playing.result()
            await asyncio.sleep(0.02)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

        async with asyncio.timeout(20):
            while runs.count or policy.stopped < policy.working:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_remote_trials_are_recorded_like_every_run(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    async with harbor_server(tmp_path / "server", job("mini", asking(turns=1))) as (url, _):
        await play(tmp_path, Policy(), agent_name="mini", harbor_server_url=url)

    run = await open_run(Store.open(str(tmp_path / "trained" / "rollouts"), {}), "e-train")
    (intent,) = [record for record in await run.records(0) if isinstance(record, IntentRecord)]
    assert intent.tools is not None
    assert [tool["function"]["name"] for tool in intent.tools] == ["write"]


# A standalone proxy (PROXY_SERVER_URL): a process of its own, which agents call, and to which the trainer connects.


async def test_trials_behind_a_standalone_proxy_are_recorded_token_for_token(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    async with (
        rolloutctl("proxy", "--relay", "--model", "any", "--port", "0", "--store", str(tmp_path / "store")) as proxy,
        harbor_server(tmp_path / "server", job("mini", asking(turns=2))) as (harbor, _),
    ):
        environ = {"PROXY_SERVER_URL": await url_of(proxy), ADMIN_KEY_VARIABLE: KEY}
        workers = [tmp_path / name for name in ("a", "b")]
        for worker in workers:
            shutil.copytree(tmp_path / "tasks", worker / "tasks")
        played = await asyncio.gather(
            *(play(worker, Policy(), 2, environ, agent_name="mini", harbor_server_url=harbor) for worker in workers)
        )
        proxy.terminate()
        assert proxy.stderr is not None
        log = (await proxy.stderr.read()).decode()

    assert log.count("has connected") == len(workers)
    for member in [member for members in played for member in members]:
        assert (member.result.outcome, member.result.reward) == ("Completed", 1.0), member.result.message
        (sample,) = member.samples
        text = "".join(map(chr, [*sample.prompt_ids, *sample.response_ids]))
        assert text == "[write]Write `Hello, world!` into hello.txt.\nokAnd 0?ok"
        trained = [chr(token) for token, mask in zip(sample.response_ids, sample.response_mask, strict=True) if mask]
        assert "".join(trained) == "okok"
    assert not list((tmp_path / "store").rglob("*.json*")), "a trial that has ended leaves no session whose key is good"


async def test_trial_is_retried_when_its_standalone_proxy_dies(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    policy = Policy()
    policy.free.clear()
    command = ("proxy", "--relay", "--keyless", "--model", "any", "--store", str(tmp_path / "store"), "--port")
    async with harbor_server(tmp_path / "server", job("mini", asking(turns=1))) as (harbor, _):
        async with rolloutctl(*command, "0") as proxy:
            url = await url_of(proxy)
            environ = {"PROXY_SERVER_URL": url}
            playing = asyncio.create_task(
                play(tmp_path, policy, environ=environ, agent_name="mini", harbor_server_url=harbor)
            )
            while not policy.working:
                assert not playing.done(), playing.result()
                await asyncio.sleep(0.02)
            proxy.kill()
            await proxy.wait()
        async with rolloutctl(*command, url.rpartition(":")[2]):
            policy.free.set()
            (member,) = await playing

    assert (member.result.outcome, member.result.reward, member.result.attempt) == ("Completed", 1.0, 1)


async def test_failure_that_only_the_proxy_sees_is_not_graded_as_zero(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    store = tmp_path / "store"

    class GivesUp(ForeignServer):
        """A server whose agent calls the model while the proxy cannot write its record, and then ends."""

        async def run(self, request: web.Request) -> web.Response:
            answer = await super().run(request)
            body = {"model": "verl", "messages": [{"role": "user", "content": "hello"}]}
            store.rename(tmp_path / "away")
            store.touch()
            try:
                url = f"{self.asked[-1]['agent']['llm_proxy_url']}/chat/completions"
                async with ClientSession() as http, http.post(url, json=body) as reply:
                    assert reply.status == 503, await reply.text()
            finally:
                store.unlink()
                (tmp_path / "away").rename(store)
            return answer

    foreign = GivesUp(
        {"status": "error", "rewards": {"reward": 0.0}, "error": "NonZeroAgentExitCodeError: exit code 1"}
    )
    async with (
        rolloutctl("proxy", "--relay", "--keyless", "--model", "any", "--port", "0", "--store", str(store)) as proxy,
        foreign as harbor,
    ):
        environ = {"PROXY_SERVER_URL": await url_of(proxy)}
        (member,) = await play(
            tmp_path, Policy(), environ=environ, agent_name="a", harbor_server_url=harbor, max_retries=1
        )

    assert member.is_lost
    assert member.result.message.startswith("the agent's last call at the proxy failed"), member.result.message


async def test_policy_whose_request_fails_behind_the_proxy_is_graded(tmp_path: Path) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    told: list[str] = []

    class Chokes(Policy):
        """Fails at one request, and answers all others."""

        async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Output:
            if "choke" in "".join(map(chr, prompt_ids)):
                raise RuntimeError("the tool parser cannot read it")
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params)

    class GivesUp(ForeignServer):
        """A server whose agent ends with the request at which the model fails."""

        async def run(self, request: web.Request) -> web.Response:
            answer = await super().run(request)
            body = {"model": "verl", "messages": [{"role": "user", "content": "choke"}]}
            url = f"{self.asked[-1]['agent']['llm_proxy_url']}/chat/completions"
            async with ClientSession() as http, http.post(url, json=body) as reply:
                assert reply.status == 502
                told.append(await reply.text())
            return answer

    failed = {"status": "error", "rewards": {"reward": 0.0}, "error": "NonZeroAgentExitCodeError: exit code 1"}
    foreign = GivesUp(failed, failed, failed, is_asking=True)
    store = str(tmp_path / "store")
    async with (
        rolloutctl("proxy", "--relay", "--keyless", "--model", "any", "--port", "0", "--store", store) as proxy,
        foreign as harbor,
    ):
        environ = {"PROXY_SERVER_URL": await url_of(proxy)}
        (member,) = await play(
            tmp_path, Chokes(), environ=environ, agent_name="a", harbor_server_url=harbor, max_retries=3
        )

    assert (member.result.outcome, member.result.reward) == ("Completed", 0.0), member.result.message
    assert len(foreign.asked) == 2, "as without a proxy"
    assert "sk-rollout" not in "".join(told), "the key of the trial's own session"


@pytest.mark.parametrize("keys", [{ADMIN_KEY_VARIABLE: "x" * 20}, {}])
async def test_trainer_that_the_proxy_refuses_fails_before_the_first_trial(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    hello_world(tmp_path / "tasks" / "hello")
    async with rolloutctl("proxy", "--relay", "--model", "any", "--port", "0", "--store", str(tmp_path)) as proxy:
        environ = {"PROXY_SERVER_URL": await url_of(proxy), **keys}
        with pytest.raises(SandboxFailure, match=r"proxy_server_url: .* refused the admin key"):
            await play(tmp_path, Policy(), environ=environ, agent_name="a")
