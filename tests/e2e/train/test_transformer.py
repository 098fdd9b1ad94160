"""A real transformer, served by vLLM itself, learns from what rollouts record."""

import json
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.vllm_environment import run_with_vllm

UPWARD = 0.4
"""Share of episodes that reach the goal after a first step upward. An untrained policy reaches it in 13 of 100."""
UPDATES = 12

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


def curve(folder: Path, seed: int, updates: int, enough: float, trainer: str = "Trainer") -> list[float]:
    arguments = (folder, free_port(), seed, updates, enough, trainer)
    found: list[float] = json.loads(run_with_vllm("tests.support.transformer_lake", *arguments).splitlines()[-1])
    return found


def test_transformer_on_vllm_learns_and_with_wrong_rewards_does_not(tmp_path: Path) -> None:
    found = curve(tmp_path / "right", 0, UPDATES, UPWARD)
    assert found[0] < UPWARD - 0.15, "it begins with a policy that knows nothing"
    assert found[-1] >= UPWARD
    wrong = curve(tmp_path / "wrong", 0, len(found), 0, "DealtToOthers")
    assert max(wrong) < UPWARD
