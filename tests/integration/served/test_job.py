"""Jobs whose policy is updated and whose servers die or cannot load, under their rollouts."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from agent_runtime.engine.run import JobSummary, run_job
from agent_runtime.models.served import fleet as fleet_module
from agent_runtime.models.served import gate
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from agent_runtime.recording.token_history import TokenHistory
from agent_runtime.sandboxes.dummy import DummyProvider
from rollout_api.records import ResponseRecord, Result
from rollout_api.rollout_job import RolloutJob
from tests.integration.served.fleet import Fleet, until
from tests.support.vllm_server import logprobs_by, made_by

UPDATES, TOKENS, MEMBERS = 10, 30, 4


def a_job(folder: Path, tasks: int, turns: int) -> RolloutJob:
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
                "sampling": {"maxTokens": TOKENS, "extra": {"ignore_eos": True, "seed": 7}},
                "agent": {"type": "tests.integration.served.talker:Talker", "tools": [], "maxTurns": turns},
                "runners": {"concurrency": tasks * MEMBERS},
                "output": {"uri": str(folder)},
            },
        }
    )


def start(job: RolloutJob, fleet: Fleet, folder: Path) -> asyncio.Task[JobSummary]:
    running = run_job(job, base_dir=folder, environ={}, provider=DummyProvider("updated"), model=fleet.model)
    return asyncio.create_task(running)


async def spans_of(reader: RunReader, result: Result, turns: int) -> list[list[int]]:
    """The policy versions of each of a rollout's answers, every token and log probability computed again by its version."""
    assert result.failed_attempts == []
    assert (result.token_capture, result.token_forks) == ("Tokens", 0)
    answers = [r for r in await reader.records(result.index) if isinstance(r, ResponseRecord)]
    assert len(answers) == turns
    history, found = TokenHistory(), list[list[int]]()
    for answer in answers:
        prompt, ids = history.add(answer, messages=1), answer.completion_token_ids
        assert prompt is not None
        assert ids is not None
        position, versions = 0, list[int]()
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
        found.append(versions)
    flat = [version for versions in found for version in versions]
    assert flat == sorted(flat), "an older policy followed a newer one"
    assert result.policy_versions == [str(version) for version in sorted(set(flat))]
    return found


async def test_each_token_of_a_job_is_recorded_with_the_version_that_made_it_through_updates_and_kills(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "SILENCE_SECONDS", 0.3)  # on the loopback nothing is on the way for longer
    monkeypatch.setattr(fleet_module, "PROBE_SECONDS", 0.5)
    random = Random(1)
    await fleet.start(3, "--tokens-per-second", "60", spares=3)
    turns, tasks = 16, 3
    running = start(a_job(tmp_path / "out", tasks, turns), fleet, tmp_path)
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
    assert summary.outcomes["Completed"] == tasks * MEMBERS
    assert fleet.model.resent > 0, "the test needs servers that die with calls"

    reader = await open_run(Store.open(str(tmp_path / "out"), {}), "updated")
    spans = [versions for result in reader.results() for versions in await spans_of(reader, result, turns)]
    straddling = sum(len(versions) > 1 for versions in spans)
    assert straddling > tasks * MEMBERS, "the test needs calls that are under way when the policy changes"
    assert len({version for versions in spans for version in versions}) > UPDATES // 2


async def test_500_rollouts_go_on_when_one_of_four_servers_cannot_load_the_new_policy(
    fleet: Fleet, tmp_path: Path
) -> None:
    turns, tasks = 2, 125
    await fleet.start(4, "--tokens-per-second", "8")
    held, failing, *_ = fleet.servers
    running = start(a_job(tmp_path / "out", tasks, turns), fleet, tmp_path)
    await until(lambda: fleet.model.in_flight > 0)
    for server in (held, failing):
        await server.post("/_standin/faults", {"hang_after": 4})
    await until(lambda: min(fleet.arrived[held.url], fleet.arrived[failing.url]) >= 4 and fleet.model.in_flight > 100)
    await fleet.update(failing=[failing])
    await held.post("/_standin/faults", {"hang": False})
    summary = await running
    assert summary.outcomes["Completed"] == tasks * MEMBERS
    assert fleet.model.resent > 0

    reader = await open_run(Store.open(str(tmp_path / "out"), {}), "updated")
    spans = [versions for result in reader.results() for versions in await spans_of(reader, result, turns)]
    assert [0, 1] in spans, "calls that were under way kept what they had"
    assert all(versions in ([0], [0, 1], [1]) for versions in spans)
