"""The chart on a real cluster: a second release beside the one that all tests use, for one namespace alone."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.support.chart import CHART, tool
from tests.support.cluster import OPERATOR_NAMESPACE, Cluster, Object, eventually

KINDS = "pods,services,deployments,replicasets,configmaps,serviceaccounts,roles,rolebindings,networkpolicies"
CRDS = ("rolloutjobs.rollout.dev", "sandboxes.rollout.dev", "modelservers.rollout.dev")


@dataclass(frozen=True)
class Release:
    """A release named `second` in a namespace, with an operator that watches that namespace alone."""

    cluster: Cluster
    namespace: str

    def helm(self, *arguments: str) -> str:
        """helm in the release's namespace."""
        command = [
            tool("helm"),
            "--kubeconfig",
            str(self.cluster.kubeconfig),
            "--namespace",
            self.namespace,
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def upgrade(self, *settings: str) -> str:
        """helm upgrade --install, until the operator is Ready; what it printed."""
        installed = self.cluster.get("deployment", "agent-rollouts", OPERATOR_NAMESPACE)
        assert installed is not None, "the chart is not installed: `make cluster` does it"
        image = installed["spec"]["template"]["spec"]["containers"][0]["image"]
        values = [
            "crds.install=false",
            "userRoles=false",
            f"watch.namespaces={{{self.namespace}}}",
            f"images.operator={image}",
        ]
        options = [part for value in (*values, *settings) for part in ("--set", value)]
        return self.helm("upgrade", "--install", "second", str(CHART), "--wait", "--timeout", "3m", *options)

    def pods(self) -> list[Object]:
        """The operator's pods that are not going away."""
        found = self.cluster.list("pods", self.namespace, "app.kubernetes.io/instance=second")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def left(self) -> list[str]:
        """What there is of the release, terminating pods included."""
        found = self.cluster.list(
            "pods,services,deployments,replicasets,configmaps,serviceaccounts,roles,rolebindings,networkpolicies",
            self.namespace,
        )
        names = [thing["metadata"]["name"] for thing in found]
        return [name for name in names if name.startswith("second")]

    def holder(self) -> str:
        """The pod that works, from the Lease."""
        lease = self.cluster.get("lease", "second", self.namespace) or {"spec": {}}
        return str(lease["spec"].get("holderIdentity") or "").partition("_")[0]

    def wait_leader(self) -> str:
        """The pod that works, once one of those that are there does."""
        names = {pod["metadata"]["name"] for pod in self.pods()}
        return eventually(lambda: found if (found := self.holder()) in names else None, 60, self.holder)


@pytest.fixture
def release(cluster: Cluster, new_namespace: Callable[..., str]) -> Iterator[Release]:
    made = Release(cluster, new_namespace("restricted"))
    yield made
    # Gone before the next test looks at what is installed, not some time after its namespace.
    made.helm("uninstall", "second", "--wait", "--timeout", "1m", "--ignore-not-found")
    cluster.kubectl("delete", "clusterrole,clusterrolebinding", f"{made.namespace}-second", "--ignore-not-found")


def test_an_operator_comes_up_restricted_with_rights_in_one_namespace_is_upgraded_and_goes(release: Release) -> None:
    assert f"in {release.namespace}" in release.upgrade()
    first = release.wait_leader()
    logs = release.cluster.kubectl("logs", first, "-n", release.namespace).stdout
    assert "cache is complete" in logs
    assert "forbidden" not in logs.lower()

    release.upgrade("workers=3")
    second = release.wait_leader()
    assert second != first, "a changed configuration must reach the operator"

    release.helm("uninstall", "second", "--wait", "--timeout", "1m")
    eventually(lambda: not release.left() or None, 60, lambda: str(release.left()))
    assert all(release.cluster.kubectl("get", "crd", name).returncode == 0 for name in CRDS)


def test_another_replica_takes_over_from_one_that_is_deleted(release: Release) -> None:
    release.upgrade("replicas=2", "podDisruptionBudget.enabled=true")
    first = release.wait_leader()
    release.cluster.kubectl("delete", "pod", first, "-n", release.namespace, "--wait=false")
    assert release.wait_leader() != first
    budget = json.loads(release.cluster.kubectl("get", "pdb", "second", "-n", release.namespace, "-o", "json").stdout)
    assert budget["status"]["expectedPods"] == 2


def test_installed_definitions_outlive_the_release_and_are_upgraded_with_it(cluster: Cluster) -> None:
    for name in CRDS:
        definition = json.loads(cluster.kubectl("get", "crd", name, "-o", "json").stdout)
        annotations = definition["metadata"]["annotations"]
        assert annotations["helm.sh/resource-policy"] == "keep"
        assert annotations["meta.helm.sh/release-name"] == "agent-rollouts"
        assert "finalizers" not in definition["metadata"]
