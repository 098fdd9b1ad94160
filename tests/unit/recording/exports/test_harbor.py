"""Harbor's trial folders."""

from pathlib import Path

import pytest

from agent_runtime.export.harbor import _write_verdict
from rollout_api.records import Verdict


@pytest.mark.parametrize(("reward", "written"), [(0.1, "0.1\n"), (1.0, "1\n"), (1 / 3, "0.3333333333333333\n")])
def test_reward_file_has_the_shortest_text_of_the_reward(tmp_path: Path, reward: float, written: str) -> None:
    _write_verdict(tmp_path / "verifier", Verdict(reward=reward, passed=False))
    assert (tmp_path / "verifier" / "reward.txt").read_text() == written
