"""What `rolloutctl validate` finds beyond the form of a manifest."""

from pathlib import Path

from agent_runtime.engine.validation import wrong_fields
from rollout_api.rollout_job import RolloutJob


class Unlicensed:
    def __init__(self) -> None:
        raise KeyError("licence")

    async def run(self, context: object) -> None:
        """Do nothing."""


async def test_an_agent_whose_constructor_raises_is_found(tmp_path: Path) -> None:
    job = RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "own"},
            "spec": {
                "tasks": {"inline": [{"name": "one", "prompt": "Do it."}]},
                "agent": {"type": f"{__name__}:Unlicensed"},
                "model": {"endpoint": {"baseURL": "http://127.0.0.1:9/v1", "name": "m"}},
                "output": {"uri": str(tmp_path)},
            },
        }
    )
    ((place, why),) = await wrong_fields(job, tmp_path, {}, offline=True)
    assert place == ("spec", "agent", "type")
    assert f"creating it failed in {__file__}:" in why
    assert why.endswith("with KeyError: 'licence'")
