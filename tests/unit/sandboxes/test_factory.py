"""Selection of a job's provider."""

from pathlib import Path

from agent_runtime.sandboxes.factory import open_provider
from rollout_api.rollout_job import RolloutJobSpec


def test_open_provider_does_not_create_the_output_folder(tmp_path: Path) -> None:
    job = RolloutJobSpec.model_validate(
        {"tasks": {"inline": [{"name": "t", "prompt": "p"}]}, "agent": {"type": "Nop"}, "output": {"uri": "./out"}}
    )
    open_provider(job, tmp_path / "run", base_dir=tmp_path)
    assert not (tmp_path / "out").exists()
