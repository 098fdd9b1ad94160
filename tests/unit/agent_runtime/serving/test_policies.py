"""Which folders of policies a gateway keeps."""

from pathlib import Path

import pytest

from agent_runtime.serving.fetching import SUMS, FetchError
from agent_runtime.serving.policies import Policies, PolicyRequest


async def test_fetches_that_failed_take_no_room_from_later_versions(tmp_path: Path) -> None:
    good, bad, folder = tmp_path / "good", tmp_path / "bad", tmp_path / "policies"
    for source in (good, bad):
        source.mkdir()
        (source / "model.safetensors").write_bytes(b"weights")
    (bad / SUMS).write_text(f"{'0' * 64}  model.safetensors\n")
    other_writer = folder / ".1.another-pod"
    other_writer.mkdir(parents=True)
    policies = Policies(folder, dict)
    for version in (1, 2, 3):
        with pytest.raises(FetchError, match="expected 0000"):
            await policies.fetch(PolicyRequest(version=version, uri=bad.as_uri()))
    assert len(list(folder.iterdir())) == 2, "the last one, which may be continued, and the other writer's"
    await policies.fetch(PolicyRequest(version=4, uri=good.as_uri()))
    assert sorted(path.name for path in folder.iterdir()) == [".1.another-pod", "4"]
