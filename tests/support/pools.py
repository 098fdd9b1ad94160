"""A SandboxPool of the quickstart's image, and jobs for it."""

from typing import Any

from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Object, eventually, small_job


class Pool:
    """The SandboxPool `warm` of a namespace."""

    def __init__(self, cluster: Cluster, namespace: str, **spec: Any) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.body: Object = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "SandboxPool",
            "metadata": {"name": "warm", "namespace": namespace},
            "spec": {"sandbox": {"image": QUICKSTART_IMAGE, "perSandbox": 4}, **spec},
        }
        cluster.apply(self.body)

    @property
    def status(self) -> Object:
        found = self.cluster.get("sandboxpool", "warm", self.namespace)
        status: Object = (found or {}).get("status", {})
        return status

    def sandboxes(self) -> dict[str, Object]:
        listed = self.cluster.list("sandboxes", self.namespace, "rollout.dev/pool=warm")
        return {sandbox["metadata"]["name"]: sandbox for sandbox in listed}

    def until(self, seconds: float = 90, **wanted: object) -> None:
        """Wait until these fields of the status have these values; those of `places` too."""

        def is_so() -> bool | None:
            flat = {"readyReplicas": 0, "draining": 0, **self.status.get("places", {}), **self.status}
            return all(flat.get(field) == value for field, value in wanted.items()) or None

        eventually(is_so, seconds, lambda: f"{wanted}: {self.status}, {list(self.sandboxes())}")

    def executors_are_empty(self) -> None:
        self.until(used=0)


def pooled(name: str, tasks: int, seconds: float = 0, **spec: Any) -> Object:
    manifest = small_job(name, tasks, groupSize=2, **spec)
    for task in manifest["spec"]["tasks"]["inline"]:
        task["solution"] = [f"sleep {seconds}; touch solved"]
    manifest["spec"]["sandbox"]["workspaces"] = {"mode": "Overlay"}
    return manifest
