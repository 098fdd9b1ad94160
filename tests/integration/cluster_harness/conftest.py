import secrets
from collections.abc import Iterator

import pytest

from tests.integration.cluster_harness.pods import base_archive, run_harness
from tests.support.cluster import Cluster, find_cluster


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    found = find_cluster()
    assert found is not None, "no cluster runs; start one with hack/cluster/up"
    run_harness("load-image", base_archive())
    return found


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    name = f"harness-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
