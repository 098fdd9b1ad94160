"""Releases of the chart on a real cluster: the one that all tests use, and a second one for a single namespace."""

from dataclasses import dataclass
from pathlib import Path

from tests.support.chart import CHART
from tests.support.cluster import OPERATOR_NAMESPACE, Cluster, Object, eventually


class InstalledRelease:
    """The release that all tests use, with its original values and namespace."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._release = ("agent-rollouts", "--namespace", OPERATOR_NAMESPACE)
        self._values = folder / "values.yaml"
        self._values.write_text(cluster.helm("get", "values", *self._release, "--output", "yaml"))
        namespace = cluster.get("namespace", OPERATOR_NAMESPACE, "")
        assert namespace is not None
        self._labels = namespace["metadata"]["labels"]

    def install(self, *settings: str, chart: Path = CHART) -> None:
        """Install or upgrade a chart with those values, and more. A missing namespace is created again."""
        metadata = {"name": OPERATOR_NAMESPACE, "labels": self._labels}
        self._cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        options = ("--values", str(self._values), "--wait", "--timeout", "3m", *settings)
        self._cluster.helm("upgrade", "--install", *self._release, str(chart), *options)

    def uninstall(self) -> None:
        """Uninstall the release if it is installed."""
        self._cluster.helm("uninstall", *self._release, "--ignore-not-found", "--wait", "--timeout", "60s")


@dataclass(frozen=True)
class Release:
    """A release named `second` in a namespace, with an operator that watches only that namespace."""

    cluster: Cluster
    namespace: str

    def helm(self, *arguments: str) -> str:
        """Run helm in the release's namespace."""
        return self.cluster.helm("--namespace", self.namespace, *arguments)

    def upgrade(self, *settings: str) -> str:
        """Install or upgrade, and wait until the operator is ready. Returns Helm's output."""
        installed = self.cluster.get("deployment", "agent-rollouts", OPERATOR_NAMESPACE)
        assert installed is not None, "the chart is not installed: `make cluster` does it"
        image: str = installed["spec"]["template"]["spec"]["containers"][0]["image"]
        values = [
            "crds.install=false",
            "userRoles=false",
            f"watch.namespaces={{{self.namespace}}}",
            f"images.operator={image}",
            f"images.runtime={image.replace('-operator:', '-runtime:')}",
        ]
        options = [part for value in (*values, *settings) for part in ("--set", value)]
        return self.helm("upgrade", "--install", "second", str(CHART), "--wait", "--timeout", "3m", *options)

    def pods(self) -> list[Object]:
        """Return the operator's pods that are not being deleted."""
        found = self.cluster.list("pods", self.namespace, "app.kubernetes.io/instance=second")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def left(self) -> list[str]:
        """Return the release's objects, terminating pods included."""
        found = self.cluster.list(
            "pods,services,deployments,replicasets,configmaps,serviceaccounts,roles,rolebindings,networkpolicies",
            self.namespace,
        )
        names = [thing["metadata"]["name"] for thing in found]
        return [name for name in names if name.startswith("second")]

    def holder(self) -> str:
        """Return the pod that leads, from the Lease."""
        lease = self.cluster.get("lease", "second", self.namespace) or {"spec": {}}
        return str(lease["spec"].get("holderIdentity") or "").partition("_")[0]

    def wait_leader(self) -> str:
        """Wait until one of the existing pods leads; return it."""
        names = {pod["metadata"]["name"] for pod in self.pods()}
        return eventually(lambda: found if (found := self.holder()) in names else None, 60, self.holder)
