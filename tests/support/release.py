"""A second release of the chart on a real cluster, beside the one that all tests use, for one namespace alone."""

import subprocess
from dataclasses import dataclass

from tests.support.chart import CHART, tool
from tests.support.cluster import OPERATOR_NAMESPACE, Cluster, Object, eventually


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
