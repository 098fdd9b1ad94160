"""A large run must resume: its results are read with few requests and little memory, and only seals say what has ended."""

import random
import tracemalloc
from collections.abc import Callable

import pytest

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.results import result_line, statistics_of, stats_json
from agent_runtime.recording.seals import ENTRIES, INDEX, SealedResults, read_seals
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import Store
from rollout_api.records import Outcome, Result, Seal

MakeResult = Callable[..., Result]


async def sealed(store: Store, results: list[Result]) -> None:
    """Seal rollouts and add them to the index, as a runner does."""
    taken = SealedResults(store)
    for result in results:
        await store.create(f"seals/{result.index}.json", Seal(result=result, objects=[]).model_dump_json().encode())
        await taken.add(result)


def counting(store: Store) -> tuple[Store, list[str]]:
    """Return the store, and the requests made with it."""
    requests: list[str] = []
    object.__setattr__(store, "on_request", lambda operation, seconds, failed: requests.append(operation))
    return store, requests


async def test_resume_reads_few_objects_for_many_sealed_rollouts(memory: Store, make_result: MakeResult) -> None:
    results = [make_result(index) for index in random.Random(0).sample(range(2 * ENTRIES + 7), 2 * ENTRIES + 7)]
    await sealed(memory, results)
    store, requests = counting(memory)
    found = SealedResults(store)
    await found.load()
    assert list(found.values()) == sorted(results, key=lambda result: result.index)
    assert (requests.count("get"), requests.count("list")) == (2 + 7, 2)


async def test_results_of_other_shards_are_not_read(memory: Store, make_result: MakeResult) -> None:
    await sealed(memory, [make_result(index) for index in range(ENTRIES + 10)])
    found = SealedResults(memory, lambda index: index % 2 == 1)
    await found.load()
    assert list(found) == list(range(1, ENTRIES + 10, 2))


async def test_index_entry_without_a_seal_is_ignored(memory: Store, make_result: MakeResult) -> None:
    await sealed(memory, [make_result(index) for index in range(ENTRIES)])
    await memory.delete(["seals/3.json"])
    found = SealedResults(memory)
    await found.load()
    assert 3 not in found
    assert len(found) == ENTRIES - 1


async def test_files_of_file_managers_among_seals_are_ignored_and_others_are_refused(
    memory: Store, make_result: MakeResult
) -> None:
    await sealed(memory, [make_result(0)])
    await memory.put("seals/.DS_Store", b"")
    found = SealedResults(memory)
    await found.load()
    assert (list(found), list(await read_seals(memory))) == ([0], [0])
    for name in ("notes.txt", "notes.json", "1", "١.json"):
        await memory.put(f"seals/{name}", b"")
        with pytest.raises(RecordCorrupt, match=f"^seals/{name}: seals are named INDEX.json"):
            await found.load()
        await memory.delete([f"seals/{name}"])
    await memory.put("seals/.json", b"")
    await found.load()


async def test_damaged_index_costs_requests_and_no_result(memory: Store, make_result: MakeResult) -> None:
    await sealed(memory, [make_result(index) for index in range(ENTRIES)])
    (entry,) = await memory.list(INDEX)
    await memory.put(entry.key, (await memory.get(entry.key) or b"")[:-3])
    found = SealedResults(memory)
    await found.load()
    assert len(found) == ENTRIES
    store, requests = counting(memory)
    await SealedResults(store).load()
    assert requests.count("get") == 1, "the damaged object was not replaced"


async def test_results_and_statistics_are_the_same_bytes_with_and_without_the_index(
    record: JobRecord, make_result: MakeResult
) -> None:
    results = [make_result(index, reward=index / 7, seconds={"total": index * 0.1}) for index in range(ENTRIES + 30)]
    await sealed(record.store, results[::-1])
    await record.finish_shard(0, {})
    written = []
    for _ in range(2):
        assert await record.finish(1)
        written.append([await record.store.get(key) for key in ("results.jsonl", "stats.json")])
        await record.store.delete([meta.key for meta in await record.store.list(INDEX)])
    assert written == [[b"".join(map(result_line, results)), stats_json(statistics_of(results))]] * 2


async def test_finished_rollout_keeps_under_a_hundred_bytes_in_memory(memory: Store, make_result: MakeResult) -> None:
    found = SealedResults(memory)
    await found.add(make_result(0))
    tracemalloc.start()
    try:
        for index in range(1, 4 * ENTRIES):
            await found.add(make_result(index, message="x" * 1500))
        await found.end()
        await memory.delete([meta.key for meta in await memory.list(INDEX)])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / (4 * ENTRIES) < 100
    assert (found.outcomes[Outcome.COMPLETED], found.mean_reward) == (4 * ENTRIES, 1.0)
