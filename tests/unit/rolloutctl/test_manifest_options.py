"""Options of the command line that change a manifest."""

from typing import Any

from rollout_api.rollout_job import RolloutJob
from rolloutctl.manifest import with_options


def test_options_of_the_model_replace_only_where_it_is() -> None:
    kept: dict[str, Any] = {"prices": {"prompt": 1.0, "completion": 2.0}, "maxPolicyLag": 3}
    job = RolloutJob.model_validate(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "a"},
            "spec": {
                "mode": "Eval",
                "tasks": {"inline": [{"name": "t", "prompt": "p"}]},
                "model": {"serverRef": "policy", "adapter": "a", **kept},
                "agent": {"type": "Nop"},
                "output": {"uri": "out"},
            },
        }
    )
    changed = with_options(job, model_url="http://h/v1", model_name="m").spec.model
    assert changed is not None
    wire = changed.wire()
    assert "serverRef" not in wire
    assert "adapter" not in wire
    assert wire["endpoint"]["name"] == "m"
    assert {name: wire.get(name) for name in kept} == {**kept, "prices": {**kept["prices"], "currency": "USD"}}
