"""Kills a run in the middle of its work, and checks that its record has lost nothing that was acknowledged."""

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

_SEGMENT = re.compile(r"attempts/(\d+)/\d+/(\d+)-(\d+)\.jsonl\.zst$")
_RECORDS = re.compile(r"/(\d+)-(\d+)-records\.jsonl\.zst$")
_SEAL = re.compile(r"/seals/(\d+)\.json$")


def segments_in(store: Store) -> int:
    """Return how many segments of journals all runs in a store have written so far."""
    return segments_among([item.key for item in asyncio.run(store.list(""))])


def segments_among(keys: Sequence[str]) -> int:
    """Return how many segments were written by the time of a listing, with those that a seal has replaced."""
    replaced = sum(int(match[2]) for key in keys if (match := _RECORDS.search(key)))
    return replaced + sum(_SEGMENT.search(key) is not None for key in keys)


def rollouts_at_work(store: Store) -> set[str]:
    """Return the rollouts that have recorded something and are not sealed."""
    keys = [item.key for item in asyncio.run(store.list(""))]
    begun, sealed = ({match[1] for key in keys if (match := what.search(key))} for what in (_SEGMENT, _SEAL))
    return begun - sealed


def kill_in_the_midst(
    process: subprocess.Popen[Any], store: Store, rng: random.Random, *, after: Sequence[int]
) -> bool:
    """SIGKILL it a moment after it has written one of these numbers of segments. False: it ended before.

    Segments are counted instead of seconds, because on a slow machine all kills would hit a starting interpreter.
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
    """Return the rollouts whose recorded work one process began and another continued.

    Checks that each attempt that had recorded its workspace is the sealed one, with as many segments as were ever written
    to it: a runner's death costs neither an attempt nor a turn. Only an attempt that was still starting may end without
    a seal.
    """
    return asyncio.run(_resumed_rollouts(store, name))


async def _resumed_rollouts(store: Store, name: str) -> set[int]:
    run = await open_run(store, name)
    resumed = set()
    for index, seal in run.seals.items():
        for attempt in set(await run.attempts(index)) - {seal.result.attempt}:
            records = await AttemptFolder.of_rollout(run.store, index, attempt).records()
            begun = any(isinstance(record, AttemptRecord) for record in records)
            assert not begun, f"rollout {index} began anew and lost attempt {attempt}'s work"
        # Of the segments only closings are left, or more if the runner died after it sealed and before it deleted them.
        # A closing is the last object of its epoch, and its number is that of the epoch's segments.
        names = [item.key for item in await run.store.list(f"attempts/{index}/{seal.result.attempt}")]
        (epoch, count), *_ = [
            (int(match[1]), int(match[2])) for item in seal.objects if (match := _RECORDS.search(item.key))
        ]
        closings: dict[int, int] = {}
        for match in filter(None, map(_SEGMENT.search, names)):
            if int(match[2]) < epoch:
                closings[int(match[2])] = max(int(match[3]), closings.get(int(match[2]), 0))
        earlier = sum(closings.values())
        assert sorted(closings) == list(range(1, epoch)), f"rollout {index}: {names}"
        assert count >= earlier, f"rollout {index} lost what was recorded: {names}"
        if earlier and count > earlier:
            resumed.add(index)
    return resumed
