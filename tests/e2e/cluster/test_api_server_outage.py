"""Outages of the API server, which rollouts do not need, and of the object storage, for which they wait."""

import time
from collections.abc import Callable

import pytest

from tests.support.cluster import Job, Object, assert_undisturbed, slow_quickstart
from tests.support.outages import Outages

pytestmark = pytest.mark.alone


def test_no_rollout_is_lost_while_the_api_server_and_then_object_storage_is_away(
    outages: Outages, new_job: Callable[[Object], Job]
) -> None:
    job = new_job(slow_quickstart(4, runners={"concurrency": 6})).apply()
    job.wait_stored(1)
    runners = [pod["metadata"]["uid"] for pod in job.pods("runner")]

    # The controllers too: after so long without an answer they would ask again only after a minute.
    with outages.without("controller-manager"), outages.without("apiserver"):
        before = job.sealed()
        time.sleep(20)
        assert job.sealed() > before, "rollouts stood still while the API server was away"

    assert job.sealed() < 24, "the job was over before the storage went; give it more to do"
    with outages.without("s3"):
        time.sleep(20)
        assert job.condition("Failed")["status"] == "False"

    job.wait("Succeeded")
    assert_undisturbed(job)
    assert [pod["metadata"]["uid"] for pod in job.pods("runner")] == runners
