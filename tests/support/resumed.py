"""Kills a run in the midst of its work, and holds its record to what was promised: nothing that was acknowledged is lost."""

import asyncio
import random
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from agent_runtime.recording.attempt_folder import AttemptFolder
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.records import AttemptRecord

_SEGMENT = re.compile(r"/attempts/(\d+)/\d+/\d+-\d+\.jsonl\.zst$")
_SEAL = re.compile(r"/seals/(\d+)\.json$")
_EPOCH = re.compile(r"/(\d+)-\d+\.jsonl\.zst$")


def segments_in(store: Store) -> int:
    """Segments of journals that all runs in a store have written by now."""
    return sum(_SEGMENT.search(item.key) is not None for item in asyncio.run(store.list("")))


def rollouts_at_work(store: Store) -> set[str]:
    """Rollouts that have recorded something and are not sealed."""
    keys = [item.key for item in asyncio.run(store.list(""))]
    begun, sealed = ({match[1] for key in keys if (match := what.search(key))} for what in (_SEGMENT, _SEAL))
    return begun - sealed


def kill_in_the_midst(
    process: subprocess.Popen[Any], store: Store, rng: random.Random, *, after: Sequence[int]
) -> bool:
    """SIGKILL it a moment after it has written one of these numbers of segments. False: it ended before that.

    Counted in segments and not in seconds, so that a slow machine's kills do not all meet a starting interpreter.
    """
    enough = segments_in(store) + rng.choice(after)
    while process.poll() is None and segments_in(store) < enough:
        time.sleep(0.05)
    try:
        process.wait(rng.uniform(0, 0.2))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    return False


def resumed_rollouts(store: Store, name: str) -> set[int]:
    """Rollouts whose recorded work one process began and another went on with.

    Asserts that each attempt that had recorded its workspace is the one that was sealed, with every segment that was ever
    written to it: a runner's death neither costs an attempt nor a turn. Only an attempt that was still booting may end
    without a seal.
    """
    return asyncio.run(_resumed_rollouts(store, name))


async def _resumed_rollouts(store: Store, name: str) -> set[int]:
    run = await open_run(store, name)
    resumed = set()
    for index, seal in run.seals.items():
        sealed = {item.key for item in seal.objects}
        for attempt in await run.attempts(index):
            epochs = await AttemptFolder.of_rollout(run.store, index, attempt).read()
            if not any(isinstance(record, AttemptRecord) for epoch in epochs.values() for record in epoch.records):
                continue
            assert attempt == seal.result.attempt, f"rollout {index} began anew and lost attempt {attempt}'s work"
            lost = {item.key for epoch in epochs.values() for item in epoch.objects} - sealed
            assert not lost, f"rollout {index} lost what was recorded: {sorted(lost)}"
        if len({match[1] for key in sealed if (match := _EPOCH.search(key))}) > 1:
            resumed.add(index)
    return resumed
