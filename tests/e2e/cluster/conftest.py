"""Fixtures of a real cluster, which `make cluster` starts and in which it installs the chart."""

import contextlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from hack.cluster.harness.archives import write_archive
from tests.support.cluster import Cluster, Job, Object, find_cluster, storage_secret
from tests.support.images import OnNodes, build, require_compilers
from tests.support.outages import Outages
from tests.support.release import InstalledRelease, Release

numbers = itertools.count()
# One word for all namespaces of a test run, so that a second run on the same cluster does not meet the first.
RUN = secrets.token_hex(3)


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster, with the chart installed."""
    found = find_cluster()
    if found is None:
        pytest.fail("there is no cluster: `make cluster` brings one up, ROLLOUT_TEST_KUBECONFIG names another")
    return found


@pytest.fixture(scope="session")
def on_nodes(cluster: Cluster) -> OnNodes:
    """Build an image that is built only on request, load it into every node of the harness, and return its name. Another
    cluster has to have it, built by `hack/images/build --tag test TARGET`."""

    def load(target: str) -> str:
        if cluster.details:
            [archive] = build("--tag", "test", target)
            cluster.node_process("load-image", str(archive))
        return f"agent-rollouts-{target}:test"

    return load


@pytest.fixture(scope="session")
def mini_swe_agent_image(on_nodes: OnNodes) -> str:
    """An image with mini-swe-agent and the openai package."""
    return on_nodes("mini-swe-agent")


Namespaces = Callable[..., str]


@pytest.fixture
def new_namespace(cluster: Cluster) -> Iterator[Namespaces]:
    """Create namespaces with the storage Secret, which are deleted after the test. `level` is the level of Pod
    Security.
    """
    made: list[str] = []

    def make(level: str = "privileged", admission: bool = True) -> str:
        name = f"e2e-{RUN}-{next(numbers)}"
        label = {"pod-security.kubernetes.io/enforce": level}
        if not admission:
            label["rollout.dev/admission"] = "off"
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": label}})
        made.append(name)
        cluster.apply(storage_secret(cluster, name))
        return name

    yield make
    if "ROLLOUT_TEST_KEEP" not in os.environ:
        for name in made:
            with contextlib.suppress(AssertionError):
                cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def namespace(new_namespace: Namespaces) -> str:
    """A namespace that admits both workspace modes."""
    return new_namespace()


@pytest.fixture
def unasked_namespace(new_namespace: Namespaces) -> str:
    """A namespace without the admission webhook: `kubectl apply` accepts objects that the operator sets to Invalid."""
    return new_namespace(admission=False)


@pytest.fixture
def new_job(cluster: Cluster, namespace: str) -> Callable[[Object], Job]:
    """Make a job of the test's namespace from a manifest, with results in the cluster's storage. It is not applied yet."""

    def make(manifest: Object, to: str = namespace) -> Job:
        manifest["spec"]["output"] = {"uri": f"s3://{cluster.bucket}/{to}", "secretRef": "storage"}
        return Job(cluster, to, manifest)

    return make


@pytest.fixture
def outages(cluster: Cluster) -> Iterator[Outages]:
    """Stop parts of the cluster; all of them run again after the test."""
    if not cluster.details:
        pytest.skip("this test stops parts of the cluster itself, which only the harness (hack/cluster) lets it do")
    found = Outages(cluster)
    yield found
    found.restore()


@pytest.fixture
def installed(cluster: Cluster, tmp_path: Path) -> InstalledRelease:
    """The chart as all tests use it, which is installed again after a test that changed it."""
    return InstalledRelease(cluster, tmp_path)


@pytest.fixture
def release(cluster: Cluster, new_namespace: Namespaces) -> Iterator[Release]:
    made = Release(cluster, new_namespace("restricted"))
    yield made
    # Deleted before the next test checks what is installed, without waiting for the deletion of its namespace.
    made.helm("uninstall", "second", "--wait", "--timeout", "1m", "--ignore-not-found")
    cluster.kubectl("delete", "clusterrole,clusterrolebinding", f"{made.namespace}-second", "--ignore-not-found")


@pytest.fixture(scope="session")
def load_image(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`load_image(name, files, modes)` loads an image with these files, by absolute path, into the nodes. Returns its
    full name.
    """
    if not cluster.details:
        pytest.skip(
            "this test brings images of its own to the nodes, which it can do on the harness (hack/cluster) only"
        )
    require_compilers()

    def load(name: str, files: Mapping[str, Path], modes: Mapping[str, int] | None = None) -> str:
        archive, reference = tmp_path_factory.mktemp("image") / "archive.tar", f"localhost/agent-rollouts-{name}:test"
        write_archive(archive, reference, files, modes)
        cluster.node_process("load-image", str(archive))
        return reference

    return load


@pytest.fixture
def chart_values(cluster: Cluster, installed: InstalledRelease) -> Iterator[Callable[..., None]]:
    """Set values of the installed chart by Helm's options. The earlier values are restored after the test."""

    def upgrade(*options: str) -> None:
        installed.install(*options)
        cluster.wait_for_operator()

    yield upgrade
    upgrade()
