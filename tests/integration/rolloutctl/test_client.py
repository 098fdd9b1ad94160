"""A trainer in Python gets every finished group once, can stop early, and can keep a session across steps."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_runtime.recording.store import Store
from agent_runtime.tasks import TaskSourceError
from rollout_api.manifest import ManifestError, load_manifest
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Dockerfiles, Task
from rolloutctl import client
from rolloutctl.client import Client
from rolloutctl.job_stream import JobStream
from rolloutctl.sources import stored_tasks

STARTER = Path(__file__).parents[3] / "rolloutctl" / "starter.yaml"


def starter(folder: Path, delay: float = 0, **tasks: object) -> Path:
    job = yaml.safe_load(STARTER.read_text())
    job["spec"]["runners"] = {"concurrency": 3}
    if tasks:
        job["spec"]["tasks"] = tasks
    for task in job["spec"]["model"]["scripted"]["tasks"]:
        for member in task["members"]:
            for turn in member["turns"]:
                turn["delaySeconds"] = delay
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def tasks_of_starter() -> list[Task]:
    return list(load_manifest(STARTER).spec.tasks.inline or [])


def test_public_names_are_those_of_the_docs() -> None:
    public = ["Client", "FinishedGroup", "GroupFinished", "RolloutSession", "RunAborted", "Trajectory"]
    assert sorted(client.__all__) == public


async def test_every_group_is_returned_once_with_all_its_rewards(tmp_path: Path) -> None:
    groups = {group.task: group async for group in Client().run(starter(tmp_path))}
    assert sorted(groups) == ["count-errors", "fix-add"]
    for group in groups.values():
        assert [result.reward for result in group.results] == [1, 1, 0]


async def test_a_job_made_in_python_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job: RolloutJob = load_manifest(STARTER)
    assert len([group async for group in Client().run(job)]) == 2
    assert (tmp_path / "out").is_dir(), "relative to the working directory"


async def test_leaving_early_stops_the_run_and_the_next_one_resumes(tmp_path: Path) -> None:
    path = starter(tmp_path, delay=0.2)
    running = Client().run(path)
    first = await anext(running)
    await running.aclose()
    sealed = len(list(tmp_path.glob("out/starter-*/seals/*.json")))
    assert 3 <= sealed < 6
    again = [group async for group in Client().run(path)]
    assert sorted(group.task for group in again) == ["count-errors", "fix-add"]
    assert next(group for group in again if group.task == first.task).results == first.results


async def test_the_manifest_says_all_else_about_tasks_from_a_program(tmp_path: Path) -> None:
    environments = [{"id": "FrozenLake", "groups": 1}]
    path = starter(tmp_path, environments=environments, dockerfiles={"args": {"V": "7"}}, folderImages=["/images"])
    job = await stored_tasks(load_manifest(path), tasks_of_starter(), Store.open(str(tmp_path / "out"), {}))
    tasks = job.spec.tasks
    assert (tasks.dockerfiles, tasks.folder_images) == (Dockerfiles(args={"V": "7"}), ["/images"])
    assert (tasks.environments, tasks.runner_environments) == (None, ["FrozenLake"])


async def test_tasks_from_any_iterable_are_run_stored_and_resumed(tmp_path: Path) -> None:
    path = starter(tmp_path, stream={"maxInFlight": 2})
    fix, count = tasks_of_starter()

    def generated() -> Iterator[Task | dict[str, Any]]:
        yield fix
        yield count.wire()

    first = {group.task: group.results async for group in Client().run(path, tasks=generated())}
    assert sorted(first) == ["count-errors", "fix-add"]
    again = {group.task: group.results async for group in Client().run(path, tasks=[fix, count])}
    assert again == first, "the same tasks are the same run"
    with pytest.raises(TaskSourceError) as caught:
        await anext(Client().run(path, tasks=[fix, {"name": "x"}, fix]))
    assert str(caught.value).splitlines() == [
        "tasks:2: prompt: is missing. The agent's instructions.",
        "tasks:3: name: a task named 'fix-add' already exists in line 1; names must be unique",
    ]


async def test_errors_reach_the_caller_and_nothing_is_left_running(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("kind: RolloutJob\n")
    before = asyncio.all_tasks()
    with pytest.raises(ManifestError):
        await anext(Client().run(path))
    assert asyncio.all_tasks() == before


async def test_session_accepts_tasks_between_steps_and_returns_each_group_with_its_label(tmp_path: Path) -> None:
    path = starter(tmp_path, stream={"maxInFlight": 2})
    fix, count = tasks_of_starter()
    async with Client().session(path) as session:
        assert await session.submit(fix, label="step-0") == 0
        first = await anext(aiter(session))
        assert (first.sequence, first.task, first.label) == (0, "fix-add", "step-0")
        assert [result.reward for result in first.results] == [1, 1, 0]
        assert await session.submit(count.wire(), label="step-1") == 1
        await session.close()
        rest = [group async for group in session]
    assert [(group.sequence, group.label) for group in rest] == [(1, "step-1")]


async def test_waiting_session_yields_groups_of_other_clients_and_ends_when_one_closes_the_stream(
    tmp_path: Path,
) -> None:
    fix, count = tasks_of_starter()
    async with Client().session(starter(tmp_path, stream={})) as session, asyncio.timeout(60):
        await session.submit(fix, label="own")
        assert (await anext(session)).label == "own"
        other = await JobStream.open(session.uri)
        rest = asyncio.create_task(_sequences(session))
        await asyncio.sleep(0)
        await other.submit(count, label="other")
        await other.close()
        assert await rest == [(1, "other")]
        with pytest.raises(ValueError, match="the session is closed"):
            await session.submit(fix)


async def _sequences(session: client.RolloutSession) -> list[tuple[int, str | None]]:
    return [(group.sequence, group.label) async for group in session]
