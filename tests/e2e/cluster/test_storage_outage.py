"""A job whose storage refuses it reports that and can be resumed. Outages of storage: test_api_server_outage.py."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Job, Object, assert_rewards, eventually, slow_quickstart
from tests.support.outages import Outages


@pytest.fixture
def bucket(cluster: Cluster, outages: Outages) -> Iterator[Path]:
    """Create a bucket for one test, which is a folder of the cluster's S3 server."""
    folder = Path(cluster.details["s3"]["folder"]) / f"e2e-{secrets.token_hex(4)}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.full
@pytest.mark.long
def test_job_with_a_missing_bucket_fails_clearly_and_resumes_later(
    outages: Outages, new_job: Callable[[Object], Job], bucket: Path
) -> None:
    manifest = slow_quickstart(2, runners={"concurrency": 8, "replicas": 3})
    job = new_job(manifest)
    manifest["spec"]["output"]["uri"] = f"s3://{bucket.name}/runs"
    job.apply()
    job.wait_stored(1)

    forgotten = 0

    def failed_for_good() -> Object | None:
        nonlocal forgotten
        pods = job.pods("runner")
        if len(pods) > forgotten and all(pod["status"]["phase"] == "Failed" for pod in pods):
            # Ten failures would take Kubernetes' back-off 20 min; a controller that starts anew has forgotten it.
            with outages.without("controller-manager"):
                forgotten = len(pods)
        failed = job.condition("Failed")
        return failed if failed["status"] == "True" else None

    lost = bucket.rename(bucket.parent.parent / bucket.name)
    try:
        failed = eventually(failed_for_good, 400, job.describe)
    finally:
        lost.rename(bucket)
    assert failed["reason"] == "RunnersFail"
    assert bucket.name in failed["message"]

    job.suspend(True)
    job.wait("Suspended")
    job.suspend(False)
    job.wait("Succeeded")
    assert_rewards(job)
