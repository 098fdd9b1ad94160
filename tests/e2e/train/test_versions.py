"""A server that does not serve the policy that it was given is detected before anything is learned from it."""

from pathlib import Path

import numpy as np
import pytest

from examples.train import policy
from examples.train.server import Engine
from examples.train.trainer import WrongPolicy
from tests.support.lake import opened


class KeepsOldWeights(Engine):
    """Loads nothing, but takes the new version's name."""

    def reload(self, folder: Path | None) -> None:
        policy.load(folder or Path())


class LiesAboutThem(KeepsOldWeights):
    """Also reports the checksums of the weights that it should have loaded."""

    def reload(self, folder: Path | None) -> None:
        self._claimed = policy.load(folder or Path())

    def checksums(self) -> dict[str, str]:
        return {"table": policy.checksum(self._claimed)}


def other_weights() -> policy.Weights:
    return np.random.default_rng(1).normal(size=(policy.ROWS, policy.VOCABULARY))


async def test_a_server_that_keeps_old_weights_and_claims_the_new_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, KeepsOldWeights(None)) as (trainer, _):
        trainer.weights = other_weights()
        with pytest.raises(WrongPolicy, match="was given policy 0, but its weights have other checksums"):
            await trainer.run(lambda number, share: None)


async def test_server_with_false_checksums_is_refused_by_its_samples(tmp_path: Path) -> None:
    async with opened(tmp_path, LiesAboutThem(None)) as (trainer, _):
        trainer.weights = other_weights()
        with pytest.raises(WrongPolicy, match="other log probabilities than its weights give"):
            await trainer.run(lambda number, share: None)


async def test_every_token_has_the_version_of_the_weights_that_sampled_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (trainer, _):
        seen = []
        known = trainer.samples

        async def watched(group: object) -> list[object]:
            samples = await known(group)  # type: ignore[arg-type]
            for sample in samples:
                versions = {v for v, m in zip(sample.branch.policy_versions, sample.branch.mask, strict=True) if m}
                seen.append((trainer.version, versions))
            return list(samples)

        trainer.samples = watched  # type: ignore[method-assign, assignment]
        await trainer.run(lambda number, share: None)
    assert {(0, "0"), (1, "1")} == {(version, *versions) for version, versions in seen}
    assert len(seen) == 2 * 2 * 8
