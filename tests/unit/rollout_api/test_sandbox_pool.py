"""Which jobs may use a SandboxPool."""

from typing import Any

import pytest

from rollout_api.sandbox import SandboxSpec, SandboxTemplate, Security
from rollout_api.sandbox_pool import PoolSandbox, why_unfit

SPREAD = {
    "metadata": {"labels": {"app": "warm"}},
    "spec": {"topologySpreadConstraints": [], "priorityClassName": "low"},
}
FAST = {"spec": {"nodeSelector": {"disk": "fast"}}}
VOLUME = {"spec": {"nodeSelector": {}, "volumes": [{"name": "keys", "secret": {"secretName": "keys"}}]}}


@pytest.mark.parametrize(
    ("pools", "jobs", "fits"),
    [
        (None, None, True),
        ({}, None, True),
        (SPREAD, None, True),
        (FAST, None, True),
        (VOLUME, None, False),
        ({"spec": {"hostNetwork": True}}, None, False),
        (VOLUME, VOLUME, True),
        (FAST, FAST, True),
        (SPREAD, FAST, False),
        (None, FAST, False),
        (None, VOLUME, False),
    ],
)
def test_pool_may_place_pods_of_jobs_that_say_nothing_of_it(
    pools: dict[str, Any] | None, jobs: dict[str, Any] | None, fits: bool
) -> None:
    pool = PoolSandbox.model_validate({"image": "base", "podTemplate": pools})
    job = SandboxTemplate.model_validate({"podTemplate": jobs})
    why = why_unfit(pool, SandboxSpec(image="base"), job, Security.STANDARD)
    assert (not why) == fits
    assert fits or "podTemplate differs" in why
