"""ModelServers of the stand-in on a real cluster: created, updated and called as by a user."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from kubernetes.aio import client, config

from agent_runtime.recording.store import Store
from rollout_api.cluster import MODEL_ENGINE_PORT, MODEL_SERVER_LABEL
from rolloutctl.policy import ServedPolicy
from tests.support.cluster import QUICKSTART_IMAGE, STORAGE_SECRET, Cluster, Object, eventually

STANDIN_IMAGE = "agent-rollouts-vllm-standin:test"
NAME = "policy"

# Asks the engine of its own pod, whose port is on the loopback. Prints the answer.
ASK_ENGINE = """
import sys, urllib.request
method, url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"Content-Type": "application/json"}, method=method)
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""


def upload_weights(cluster: Cluster, namespace: str, folder: str, version: int) -> str:
    """Upload weights of the stand-in; return their URI."""
    uri = f"s3://{cluster.bucket}/{namespace}/{folder}"
    store = Store.open(uri, cluster.environ, patience_seconds=30)
    asyncio.run(store.put("version.json", json.dumps({"version": version}).encode()))
    return uri


def small_containers() -> list[Object]:
    """Return small requests for init containers of a pod template, so that many pods fit on a test's node."""
    small = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    return [{"name": name, "resources": small} for name in ("download", "gateway")]


def quick_pods(**engine: object) -> Object:
    """Return `podTemplate.spec` of small pods that start and end within seconds. Further fields are those of the
    container `engine`.
    """
    quick = {"startupProbe": {"periodSeconds": 1}, "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}
    return {
        "initContainers": small_containers(),
        "containers": [{"name": "engine", **quick, **engine}],
        "terminationGracePeriodSeconds": 5,
    }


def standin_spec(cluster: Cluster, namespace: str, **spec: object) -> Object:
    """Return `spec` of a ModelServer, or `model.server` of a job."""
    weights = upload_weights(cluster, namespace, "model", 0)
    return {
        "model": {"name": NAME, "uri": weights, "secretRef": STORAGE_SECRET},
        "engine": {"image": STANDIN_IMAGE, "version": "0.27.0"},
        "accelerator": {"count": 0},
        "resources": {"cpu": "50m", "sharedMemory": "64Mi"},
        "toolCallParser": "hermes",
        "weightTransfer": {"pull": {"secretRef": STORAGE_SECRET}},
        "podDisruptionBudget": {},
        "podTemplate": {"spec": {"initContainers": small_containers()}},
        **spec,
    }


class Server:
    """A ModelServer of the stand-in."""

    def __init__(self, cluster: Cluster, namespace: str, name: str = NAME) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    def apply(self, **spec: object) -> "Server":
        """Apply the ModelServer by kubectl."""
        self.cluster.apply(
            {
                "apiVersion": "rollout.dev/v1alpha1",
                "kind": "ModelServer",
                "metadata": {"name": self.name, "namespace": self.namespace},
                "spec": standin_spec(self.cluster, self.namespace, **spec),
            }
        )
        return self

    def delete(self) -> None:
        """Delete the ModelServer by kubectl; return when its pods are gone."""
        self.cluster.kubectl("delete", "modelserver", self.name, "-n", self.namespace, "--ignore-not-found")

        def pods() -> Sequence[Object]:
            return self.cluster.list("pods", self.namespace, f"{MODEL_SERVER_LABEL}={self.name}")

        eventually(lambda: None if pods() else True, 120, self.describe)

    @property
    def found(self) -> Object | None:
        """Return the ModelServer as the API server has it now; None if it is gone."""
        return self.cluster.get("modelserver", self.name, self.namespace)

    @property
    def status(self) -> Object:
        """Return its status; empty before the operator has processed it."""
        status: Object = (self.found or {}).get("status", {})
        return status

    @property
    def policy(self) -> Object:
        """Return version and gate."""
        policy: Object = self.status.get("policy", {})
        return policy

    @property
    def ready(self) -> Sequence[Object]:
        """Return its servers that accept calls."""
        return [server for server in self.status.get("servers", []) if server["ready"]]

    def wait_ready(self, count: int, seconds: float = 240) -> "Server":
        """Wait until this many servers are ready, and no other is listed."""
        eventually(
            lambda: True if [len(self.ready), len(self.status.get("servers", []))] == [count] * 2 else None,
            seconds,
            self.describe,
        )
        return self

    def ask_for(self, version: int) -> None:
        """Set another policy, as kubectl patch does."""
        uri = upload_weights(self.cluster, self.namespace, f"policy-{version}", version)
        self.patch(policy={"version": version, "uri": uri})

    def update(self, version: int, uri: str) -> None:
        """Update the policy by the Python client, which waits for it. Raises PolicyNotServed."""

        async def update() -> None:
            async with await config.new_client_from_config(str(self.cluster.kubeconfig)) as api:
                policy = ServedPolicy(client.CustomObjectsApi(api), self.namespace, self.name, patience_seconds=180)
                await policy.update(version, uri)

        asyncio.run(update())

    def patch(self, **spec: object) -> None:
        """Patch fields of its spec by kubectl."""
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "modelserver", self.name, "-n", self.namespace, "--type=merge", "-p", patch)

    def wait_step(self, *steps: str) -> None:
        """Wait until a policy update is at one of these steps."""
        eventually(lambda: True if self.policy.get("step") in steps else None, 120, self.describe)

    def wait_policy(self, version: int) -> None:
        """Wait until the gate is open with this policy."""
        wanted = {"current": version, "gate": "Open"}
        eventually(lambda: True if wanted.items() <= self.policy.items() else None, 180, self.describe)

    def ask_engine(self, pod: str, path: str, body: object = None) -> Any:
        """Return the answer of the engine in a pod; a POST if there is a body."""
        return json.loads(self.engine_text(pod, path, body))

    def engine_text(self, pod: str, path: str, body: object = None) -> str:
        """Return the same as text."""
        method, data = ("GET", "") if body is None else ("POST", json.dumps(body))
        url = f"http://127.0.0.1:{MODEL_ENGINE_PORT}{path}"
        command = ("python3", "-c", ASK_ENGINE, method, url, data)
        done = self.cluster.kubectl("exec", pod, "-n", self.namespace, "-c", "engine", "--", *command)
        return done.stdout

    def evict(self, pod: str) -> bool:
        """Evict a pod by the eviction API. False: refused for now."""
        return self.cluster.evict(pod, self.namespace)

    def condition(self, kind: str) -> Object:
        """Return a condition; empty if it does not exist."""
        return next((c for c in self.status.get("conditions", []) if c["type"] == kind), {})

    def run_in_pod(self, name: str, labels: Object, *arguments: str, namespace: str = "") -> str:
        """Return the output of a pod with these labels that runs Python with these arguments, in the server's namespace
        or another.
        """
        place = namespace or self.namespace
        container = {"name": "main", "image": QUICKSTART_IMAGE, "command": ["python3", "-c", *arguments]}
        pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
        metadata = {"name": name, "namespace": place, "labels": labels}
        self.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
        ended = "--for=jsonpath={.status.phase}=Succeeded"
        done = self.cluster.kubectl("wait", ended, f"pod/{name}", "-n", place, "--timeout=120s", check=False)
        said = self.cluster.kubectl("logs", name, "-n", place).stdout
        assert done.returncode == 0, said + self.describe()
        return said

    def describe(self) -> str:
        """Return what helps to understand a failed test."""
        kinds = "modelservers,statefulsets,jobs,pods,services,events"
        found = [self.cluster.kubectl("get", kinds, "-n", self.namespace, check=False).stdout]
        found.append(self.cluster.kubectl("describe", "modelserver", "-n", self.namespace, check=False).stdout)
        options = ("logs", f"{self.name}-0", "-n", self.namespace, "--all-containers", "--tail=30")
        found.append(self.cluster.kubectl(*options, check=False).stdout)
        return "\n".join(found)[-12_000:]
