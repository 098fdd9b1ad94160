"""Shows that tokens, masks, log probabilities, advantages and policy updates are right: a policy learns from them, and
learns nothing if one of them is wrong.
"""

import asyncio
import functools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from examples.train import lake
from examples.train.laptop import learn, server_process
from examples.train.trainer import Settings, Trainer
from tests.support.bare_lake import bare_curve
from tests.support.wrong_trainers import DealtToOthers, MaskInverted

FEW = Settings(groups=8, enough=0.5)
"""A training with a quarter of the groups, which ends at half of the possible reward."""
WHOLE = Settings()
# Even the best possible player mostly fails on slippery ice, so each group teaches less.
SLIPPERY = Settings(slippery=True, updates=40, learning_rate=40.0)
WHOLE_TRAININGS = [(WHOLE, 0), (WHOLE, 1), (WHOLE, 2), (SLIPPERY, 0)]
TRAININGS = [(FEW, 0), *(pytest.param(*training, marks=pytest.mark.full) for training in WHOLE_TRAININGS)]
LAST = 5
"""Number of last updates over which a curve is averaged, because the members of one update's groups slip alike."""
NEAR = 0.1


@functools.cache
def curve(settings: Settings, seed: int, trainer: type[Trainer] = Trainer) -> list[float]:
    """Train in a separate run; return the learning curve."""

    async def train(folder: Path) -> list[float]:
        async with server_process() as url:
            return await learn(url, folder, settings, seed, trainer)

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(train(Path(folder)))


def wanted(settings: Settings) -> float:
    """Return the share of episodes that must reach the goal at the end."""
    return settings.enough or lake.best_possible(slippery=settings.slippery) - NEAR


@pytest.mark.parametrize(("settings", "seed"), TRAININGS)
def test_policy_is_trained_from_recorded_rollouts(settings: Settings, seed: int) -> None:
    found = curve(settings, seed)
    assert found[0] < 0.05, "it begins with a policy that knows nothing"
    assert (found[-1] if settings.enough else statistics.fmean(found[-LAST:])) >= wanted(settings)


@pytest.mark.parametrize(("settings", "seed"), TRAININGS)
def test_server_mode_matches_local_run(settings: Settings, seed: int) -> None:
    found = curve(settings, seed)
    assert found == bare_curve(settings, seed, len(found))


@pytest.mark.full
@pytest.mark.parametrize("broken", [DealtToOthers, MaskInverted])
def test_nothing_is_learned_from_wrong_rewards_or_masks(broken: Callable[..., Trainer]) -> None:
    settings, seed = WHOLE_TRAININGS[0]
    needed = next(number for number, share in enumerate(curve(settings, seed), 1) if share >= wanted(settings))
    assert max(curve(replace(settings, updates=needed, enough=None), seed, broken)) < 0.2
