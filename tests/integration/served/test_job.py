"""A job whose policy is updated ten times, and whose servers are killed, under its rollouts."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from agent_runtime.engine.run import run_job
from agent_runtime.models.served import fleet as fleet_module
from agent_runtime.models.served import gate
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from agent_runtime.recording.token_history import TokenHistory
from agent_runtime.sandboxes.dummy import DummyProvider
from rollout_api.records import ResponseRecord
from rollout_api.rollout_job import RolloutJob
from tests.integration.served.fleet import Fleet, until
from tests.support.vllm_server import logprobs_by, made_by

UPDATES, TURNS, ROLLOUTS, TOKENS = 10, 16, 12, 30


def a_job(folder: Path) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "updated"},
            "spec": {
                "groupSize": 4,
                "tasks": {
                    "inline": [{"name": f"task-{number}", "prompt": f"Talk of {number}."} for number in range(3)]
                },
                "model": {"serverRef": "policy"},
                "sampling": {"maxTokens": TOKENS, "extra": {"ignore_eos": True, "seed": 7}},
                "agent": {"type": "tests.integration.served.talker:Talker", "tools": [], "maxTurns": TURNS},
                "output": {"uri": str(folder)},
            },
        }
    )


async def test_each_token_of_a_job_is_recorded_with_the_version_that_made_it_through_updates_and_kills(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "SILENCE_SECONDS", 0.3)  # on the loopback nothing is on the way for longer
    monkeypatch.setattr(fleet_module, "PROBE_SECONDS", 0.5)
    random = Random(1)
    await fleet.start(3, "--tokens-per-second", "60", spares=3)
    out = tmp_path / "out"
    running = asyncio.create_task(
        run_job(a_job(out), base_dir=tmp_path, environ={}, provider=DummyProvider("updated"), model=fleet.model)
    )
    for number in range(UPDATES):
        enough = fleet.arrived.total() + random.randrange(50, 200)
        await until(lambda enough=enough: fleet.arrived.total() >= enough or running.done())  # type: ignore[misc]
        assert not running.done(), "the job was over before its last update"
        victim = random.choice(fleet.servers)
        if number in (1, 7):
            victim.kill()
            await fleet.replace(victim)
        if number == 4:
            await fleet.update(killed=victim)
            await fleet.replace(victim)
        else:
            await fleet.update()
    summary = await running
    assert summary.outcomes["Completed"] == ROLLOUTS
    assert fleet.model.resent > 0, "the test needs servers that die with calls"

    reader = await open_run(Store.open(str(out), {}), "updated")
    straddling, seen = 0, set[str]()
    for result in reader.results():
        assert result.failed_attempts == []
        assert (result.token_capture, result.token_forks) == ("Tokens", 0)
        answers = [r for r in await reader.records(result.index) if isinstance(r, ResponseRecord)]
        assert len(answers) == TURNS
        history, versions = TokenHistory(), list[int]()
        for answer in answers:
            prompt, ids = history.add(answer, messages=1), answer.completion_token_ids
            assert prompt is not None
            assert ids is not None
            position = 0
            for span in answer.policy_spans:
                assert span.version is not None
                before, part = [*prompt, *ids[:position]], ids[position : position + span.tokens]
                assert part == made_by(int(span.version), before, span.tokens, seed=7, ignore_eos=True)
                assert answer.logprobs is not None
                logprobs = answer.logprobs[position : position + span.tokens]
                assert logprobs == logprobs_by(int(span.version), before, part)
                versions.append(int(span.version))
                position += span.tokens
            assert position == len(ids) == TOKENS
            straddling += len(answer.policy_spans) > 1
        assert versions == sorted(versions), "an older policy followed a newer one"
        assert result.policy_versions == [str(version) for version in sorted(set(versions))]
        seen.update(result.policy_versions)
    assert straddling > ROLLOUTS, "the test needs calls that are under way when the policy changes"
    assert len(seen) > UPDATES // 2
