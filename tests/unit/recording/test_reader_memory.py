"""Reading a run of 100,000 rollouts must not take gigabytes: its seals are kept on disk."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

from agent_runtime.recording.results import statistics_of
from agent_runtime.recording.seals import read_seals
from agent_runtime.recording.store import Store
from rollout_api.records import CommandVerdict, Result, Seal, Verdict
from rollout_api.rewards import RewardNormalization

ROLLOUTS = 1500
OUTPUT = "test passed\n" * 2000


async def test_reading_a_run_keeps_under_a_kilobyte_of_each_rollout(
    tmp_path: Path, make_result: Callable[..., Result]
) -> None:
    store = Store.open(str(tmp_path), {})
    verdict = Verdict(
        reward=1.0, passed=True, commands=[CommandVerdict(command="test", exit_code=0, seconds=1.0, output=OUTPUT)]
    )
    (tmp_path / "seals").mkdir()
    for index in range(ROLLOUTS):
        seal = Seal(result=make_result(index), verdict=verdict, objects=[])
        (tmp_path / f"seals/{index}.json").write_text(seal.model_dump_json())
    tracemalloc.start()
    try:
        seals = await read_seals(store)
        seals.compare(RewardNormalization())
        assert statistics_of(map(seals.result, seals))["rollouts"] == ROLLOUTS
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / ROLLOUTS < 1000
    assert list(seals) == list(range(ROLLOUTS))
    assert seals[7].result == seals.result(7)
    assert seals[7].verdict == verdict
