"""Exports of a run, finished or not."""

import io
import json
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agent_runtime.export.formats import FOLDERS, Format, export
from agent_runtime.export.predictions import PATCH_NAME
from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.reader import NoSuchRun, open_run
from agent_runtime.recording.store import Store
from rollout_api.records import IntentRecord, Message, Observation, ObservationsRecord, Record, ResponseRecord, Result
from rollout_api.rollout_job import RolloutJob
from rollout_api.tasks import Task
from tests.support.records import call

MakeResult = Callable[..., Result]
MakeJob = Callable[..., RolloutJob]


def answer(turn: int, prompt: list[int], sampled: list[int]) -> ResponseRecord:
    return ResponseRecord(
        turn=turn,
        time=turn,
        seconds=0,
        message={"role": "assistant", "content": f"answer {turn}"},
        finish_reason="stop",
        prompt_token_ids=prompt,
        completion_token_ids=sampled,
        logprobs=[-1.0] * len(sampled),
    )


ASK: Message = {"role": "user", "content": "go"}
FORKED: list[Record] = [
    IntentRecord(turn=0, time=0, keep=0, messages=[ASK]),
    answer(0, [1], [2]),
    IntentRecord(turn=1, time=1, keep=0, messages=[{"role": "user", "content": "again"}], branch=1),
    answer(1, [9], [4, 5]),
]


async def run_rollout(record: JobRecord, index: int, records: list[Record], result: Result | None) -> None:
    journal = await Journal.claim(record, index, 0)
    await journal.begin()
    await journal.append(records)
    if result is not None:
        await journal.seal(result, None, records)


@pytest.fixture
async def run(folder: Store, record: JobRecord, make_result: MakeResult) -> Store:
    """A run whose rollouts 1 and 0 are sealed, in that order; 2 is running, 3 has not begun."""
    await run_rollout(record, 1, FORKED, make_result(1))
    await run_rollout(record, 0, FORKED[:2], make_result(0, reward=0.0, passed=False))
    await run_rollout(record, 2, FORKED[:1], None)
    return folder


async def lines(store: Store, form: Format) -> list[dict[str, object]]:
    return [json.loads(line) async for line in export(await open_run(store, "fix"), form)]


async def test_results_are_in_the_order_of_their_indices(run: Store) -> None:
    assert [line["index"] for line in await lines(run, Format.RESULTS)] == [0, 1]


async def test_every_branch_is_a_separate_conversation(run: Store) -> None:
    found = await lines(run, Format.OPENAI)
    assert [line["branch"] for line in found] == [0, 0, 1]
    assert found[0]["messages"] == [ASK, {"role": "assistant", "content": "answer 0"}]
    assert found[2]["messages"] == [{"role": "user", "content": "again"}, {"role": "assistant", "content": "answer 1"}]


async def test_every_branch_is_a_token_sequence_of_its_own_with_the_reward_beside_it(run: Store) -> None:
    found = await lines(run, Format.TOKENS)
    assert [(line["tokenIds"], line["mask"]) for line in found] == [
        ([1, 2], [0, 1]),
        ([1, 2], [0, 1]),
        ([9, 4, 5], [0, 1, 1]),
    ]
    assert [line["result"]["reward"] for line in found] == [0.0, 1.0, 1.0]  # type: ignore[index]
    assert [line["result"]["branches"] for line in found] == [1, 2, 2]  # type: ignore[index]


async def test_trajectories_carry_their_outcome(run: Store) -> None:
    found = await lines(run, Format.ATIF)
    assert [line["extra"]["reward"] for line in found] == [0.0, 1.0]  # type: ignore[index]
    assert [line["session_id"].rsplit("/", 1)[-1] for line in found] == ["0", "1"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("written", ['"\\ud83d"', "1e999", "NaN", "9" * 4000])
async def test_tool_call_with_odd_arguments_ends_no_export(
    written: str, folder: Store, record: JobRecord, make_result: MakeResult, tmp_path: Path
) -> None:
    calling = answer(0, [1], [2])
    calling.message["tool_calls"] = [call("c", f'{{"command": {written}, "timeout": {written}}}')]
    results = ObservationsRecord(
        turn=0, time=1, results=[Observation(call_id="c", tool="bash", content="", seconds=0, error=False)]
    )
    await run_rollout(record, 0, [FORKED[0], calling, results], make_result(0))

    assert len(await lines(folder, Format.ATIF)) == 1
    for form, write in FOLDERS.items():
        assert await write(await open_run(folder, "fix"), tmp_path / form) == 1


@pytest.mark.parametrize("target", ["nowhere", "model.patch", "large"])
async def test_link_in_place_of_a_patch_does_not_end_the_export(
    target: str, folder: Store, record: JobRecord, make_result: MakeResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime.export.predictions.PATCH_BYTES", 1000)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        large = tarfile.TarInfo(f"{PATCH_NAME.partition('/')[0]}/large")
        large.size = 1001
        tar.addfile(large, io.BytesIO(bytes(1001)))
        member = tarfile.TarInfo(PATCH_NAME)
        member.type, member.linkname = tarfile.SYMTYPE, target
        tar.addfile(member)

    async def chunks() -> AsyncIterator[bytes]:
        yield buffer.getvalue()

    journal = await Journal.claim(record, 0, 0)
    await journal.begin()
    stored = await journal.store_artifacts(chunks(), limit=1 << 20)
    await journal.append([*FORKED, stored])
    await journal.seal(make_result(0), None, [*FORKED, stored])

    assert [line["model_patch"] for line in await lines(folder, Format.SWE_BENCH)] == [""]


async def test_an_unfinished_run_is_readable_at_any_time(run: Store) -> None:
    reader = await open_run(run, "fix")
    assert (reader.total, reader.stats()["rollouts"]) == (4, 2)
    assert await reader.attempts(2) == [0]
    assert await reader.records(2) == FORKED[:1]
    assert (await reader.trajectory(2) or {})["steps"][0]["message"] == "go"
    assert await reader.tokens(2) == []
    with pytest.raises(NoSuchRun, match=r"rollout 3 of fix-.* has not begun"):
        await reader.records(3)
    with pytest.raises(NoSuchRun, match="has no attempt 5: it has 0"):
        await reader.records(2, attempt=5)


async def test_run_is_found_by_job_name_or_folder_and_a_wrong_name_lists_the_runs(
    run: Store, make_job: MakeJob, tasks: list[Task]
) -> None:
    older = (await open_run(run, "fix")).folder
    newer = (await JobRecord.open(run, make_job(), tasks, new=True)).folder
    assert (await open_run(run, "fix")).folder == newer
    assert (await open_run(run, older)).folder == older
    with pytest.raises(NoSuchRun, match=f"has no run of 'fxi'; there are .*{older}"):
        await open_run(run, "fxi")
