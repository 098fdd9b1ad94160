"""Jobs during policy updates like the operator's, while servers die or cannot load."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from agent_runtime.engine.events import JobSummary
from agent_runtime.engine.run import run_job
from agent_runtime.models.pool import fleet as fleet_module
from agent_runtime.models.pool import gate, server
from agent_runtime.models.token_history import TokenHistory
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.model_server import ServerState
from rollout_api.records import ResponseRecord, Result
from rollout_api.rollout_job import RolloutJob
from tests.integration.served.fleet import PATIENCE_SECONDS, until
from tests.integration.served.operated import OperatedFleet
from tests.integration.served.talker import Talker
from tests.support.dummy_sandboxes import DummyProvider
from tests.support.vllm_server import logprobs_by, made_by

UPDATES, MEMBERS = 10, 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SILENCE_SECONDS", 0.3)  # messages on loopback take less time
    monkeypatch.setattr(fleet_module, "PROBE_SECONDS", 0.5)


def a_job(folder: Path, tasks: int, tokens: int) -> RolloutJob:
    prompts = [{"name": f"task-{number}", "prompt": f"Talk of {number}."} for number in range(tasks)]
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "updated"},
            "spec": {
                "groupSize": MEMBERS,
                "tasks": {"inline": prompts},
                "model": {"serverRef": "policy"},
                "sampling": {"maxTokens": tokens, "extra": {"ignore_eos": True, "seed": 7}},
                "agent": {"type": "tests.integration.served.talker:Talker", "tools": [], "maxTurns": 1000},
                "runners": {"concurrency": tasks * MEMBERS},
                "output": {"uri": str(folder / "out")},
            },
        }
    )


def start(fleet: OperatedFleet, folder: Path, job: RolloutJob) -> asyncio.Task[JobSummary]:
    provider = DummyProvider("updated")
    return fleet.run(run_job(job, base_dir=folder, environ={}, provider=provider, model=fleet.model))


async def spans_of(reader: RunReader, result: Result, tokens: int, *, unknown: bool) -> list[list[int]]:
    """Return the policy versions of each of a rollout's answers, after a check of every token and log probability.

    With `unknown`, some tokens may have no version.
    """
    assert result.failed_attempts == []
    assert (result.token_capture, result.token_forks) == ("Tokens", 0)
    answers = [r for r in await reader.records(result.index) if isinstance(r, ResponseRecord)]
    assert len(answers) == result.turns
    history, found = TokenHistory(), list[list[int]]()
    for answer in answers:
        prompt, ids = history.add(answer, messages=1), answer.completion_token_ids
        assert prompt is not None
        assert ids is not None
        position, versions = 0, list[int]()
        for span in answer.policy_spans:
            assert span.version is not None or unknown
            if span.version is not None:
                before, part = [*prompt, *ids[:position]], ids[position : position + span.tokens]
                assert part == made_by(int(span.version), before, span.tokens, seed=7, ignore_eos=True)
                assert answer.logprobs is not None
                logprobs = answer.logprobs[position : position + span.tokens]
                assert logprobs == logprobs_by(int(span.version), before, part)
                versions.append(int(span.version))
            position += span.tokens
        assert position == len(ids) == tokens
        found.append(versions)
    flat = [version for versions in found for version in versions]
    assert flat == sorted(flat), "an older policy followed a newer one"
    assert result.policy_versions == [str(version) for version in sorted(set(flat))]
    return found


async def all_spans(fleet: OperatedFleet, folder: Path, tokens: int) -> list[list[int]]:
    """Return the spans of all answers of the job."""
    reader = await open_run(Store.open(str(folder / "out"), {}), "updated")
    unknown = fleet.mixed > 0
    results = list(reader.results())
    return [versions for result in results for versions in await spans_of(reader, result, tokens, unknown=unknown)]


@pytest.mark.full
async def test_every_token_has_its_version_through_updates_and_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, tasks, tokens = Random(1), 3, 30
    async with OperatedFleet(tmp_path, servers=3, tokens_per_second=60) as fleet:
        await fleet.until_open(0)
        running = start(fleet, tmp_path, a_job(tmp_path, tasks, tokens))
        for version in range(1, UPDATES + 1):
            enough = fleet.arrived.total() + chance.randrange(50, 200)
            await until(lambda enough=enough: fleet.arrived.total() >= enough or running.done())  # type: ignore[misc]
            assert not running.done()
            fleet.ask_for(version)
            for _ in range(chance.randrange(1, 3)):
                await asyncio.sleep(chance.random() * 0.6)
                if chance.random() < 0.6:
                    await fleet.kill_updater()
                else:
                    await fleet.kill(chance.choice(fleet.pods))
            await fleet.until_open(version, least=2)
        monkeypatch.setattr(Talker, "enough", True)
        summary = await running
        assert summary.outcomes["Completed"] == tasks * MEMBERS
        assert fleet.killed_updaters >= 5
        assert fleet.model.resent > 0, "the test needs servers that die with calls"
        spans = await all_spans(fleet, tmp_path, tokens)
    straddling = sum(len(versions) > 1 for versions in spans)
    assert straddling > tasks * MEMBERS, "the test needs calls that are under way when the policy changes"
    assert len({version for versions in spans for version in versions}) > UPDATES // 2


@pytest.mark.full
async def test_rollouts_continue_when_one_server_cannot_load_the_new_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, tokens = 500, 12
    monkeypatch.setattr(server, "STALL_SECONDS", 10 * PATIENCE_SECONDS)  # servers that hold calls back do not hang
    async with OperatedFleet(tmp_path, servers=4, tokens_per_second=20) as fleet:
        await fleet.until_open(0)
        failing = fleet.pods[1]
        first = failing.uid
        await fleet.fault(failing, load_failures=1000)
        for pod in fleet.pods:
            await fleet.fault(pod, hold_at=tokens - 1)  # so that no call ends meanwhile, however busy the machine is
        running = start(fleet, tmp_path, a_job(tmp_path, rollouts // MEMBERS, tokens))
        await until(lambda: fleet.arrived.total() == rollouts * (tokens - 1))
        fleet.ask_for(1)
        await until(lambda: fleet.status.policy.paused)
        assert fleet.model.in_flight == rollouts
        await until(lambda: (first, ServerState.EVICTED) in [(s.uid, s.state) for s in fleet.status.servers])
        await fleet.until_open(1, least=3)
        monkeypatch.setattr(Talker, "enough", True)
        for pod in fleet.pods:
            if pod is not failing:
                await fleet.fault(pod, hold_at=None)
        summary = await running
        assert summary.outcomes["Completed"] == rollouts
        assert fleet.model.resent > 0.1 * rollouts, "those of the server that left"
        await fleet.until_open(1)
        assert failing.uid != first
        assert await fleet.really_loaded() == [1] * 4
        spans = await all_spans(fleet, tmp_path, tokens)
    assert spans.count([0, 1]) > 0.6 * rollouts, "calls that were under way kept what they had"
    assert all(versions in ([0, 1], [1]) for versions in spans)
