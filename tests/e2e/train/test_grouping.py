"""Advantages compare only members of the same group. A learning curve on one map could not show that."""

import math
import random
from pathlib import Path

from rollout_api.environments import TaskEnvironment
from rollout_api.tasks import Task
from tests.support.lake import opened

GROUPS = 12


def lamp(number: int, offset: float) -> Task:
    environment = TaskEnvironment(id="tests.support.lamp:Lamp", seed=number, config={"offset": offset})
    return Task(name=f"lamp-{number}", prompt="{observation}", environment=environment)


async def test_excess_members_of_a_group_get_no_advantage(tmp_path: Path) -> None:
    chance = random.Random(3)
    # Sums of these are exact, so nothing has to be compared approximately.
    offsets = [chance.randrange(-64, 64) / 8 for _ in range(GROUPS)]
    async with opened(tmp_path, environments=["tests.support.lamp:Lamp"]) as (trainer, session):
        await trainer.publish()
        for number, offset in enumerate(offsets):
            await session.submit(lamp(number, offset), "batch")
        groups = [await anext(session) for _ in range(GROUPS)]
        dealt = {group.sequence: [sample.advantage for sample in await trainer.samples(group)] for group in groups}

    mixed = 0
    for group in groups:
        rewards = [result.reward for result in group.results]
        lit = [float(result.passed or False) for result in group.results]
        assert rewards == [offsets[group.sequence] + on for on in lit]
        mean = sum(lit) / len(lit)
        deviation = math.sqrt(sum((on - mean) ** 2 for on in lit) / (len(lit) - 1))
        expected = [(on - mean) / (deviation + 1e-6) if deviation else 0.0 for on in lit]
        assert [result.advantage for result in group.results] == expected
        assert dealt[group.sequence] == expected
        mixed += 0 < sum(lit) < len(lit)
    assert mixed > GROUPS / 2, "groups in which all did the same show nothing"
    assert len(set(offsets)) > GROUPS / 2
