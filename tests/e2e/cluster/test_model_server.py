"""A ModelServer on real nodes, with the stand-in in vLLM's place: it comes up, is found, is walled off, and goes without a
trace."""

import asyncio
import itertools
import json
from collections.abc import Sequence

import pytest

from agent_runtime.recording.store import Store
from agent_runtime.serving import routes
from rollout_api.cluster import MODEL_CONTROL_PORT, MODEL_PORT, MODEL_SERVER_LABEL, ROLE_LABEL, RUNNER_ROLE
from tests.support.cluster import QUICKSTART_IMAGE, STORAGE_SECRET, Cluster, Object, eventually
from tests.support.sandboxes import ByHand

STANDIN_IMAGE = "agent-rollouts-vllm-standin:test"
NAME = "policy"

# Asks for every route on every address. Prints [method, address and path, status], the status 0 where nobody answers.
ASK = r"""
import json, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
def ask(call):
    method, url, headers = call
    request = urllib.request.Request(url, b"{}" if method == "POST" else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return [method, url, response.status]
    except urllib.error.HTTPError as error:
        return [method, url, error.code]
    except OSError:
        return [method, url, 0]
with ThreadPoolExecutor(32) as pool:
    print(json.dumps(list(pool.map(ask, json.loads(sys.argv[1])))))
"""


class Server:
    """A ModelServer of the stand-in."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.weights = f"s3://{cluster.bucket}/{namespace}"

    def upload(self, folder: str, version: int) -> str:
        """Weights of the stand-in, in the storage."""
        uri = f"{self.weights}/{folder}"
        store = Store.open(uri, self.cluster.environ, patience_seconds=30)
        asyncio.run(store.put("version.json", json.dumps({"version": version}).encode()))
        return uri

    def apply(self, **spec: object) -> "Server":
        """kubectl apply."""
        self.cluster.apply(
            {
                "apiVersion": "rollout.dev/v1alpha1",
                "kind": "ModelServer",
                "metadata": {"name": NAME, "namespace": self.namespace},
                "spec": {
                    "model": {"name": NAME, "uri": self.upload("model", 0), "secretRef": STORAGE_SECRET},
                    "engine": {"image": STANDIN_IMAGE, "version": "0.26.0"},
                    "accelerator": {"count": 0},
                    "resources": {"cpu": "50m", "sharedMemory": "64Mi"},
                    "toolCallParser": "hermes",
                    "weightTransfer": {"pull": {"secretRef": STORAGE_SECRET}},
                    "podDisruptionBudget": {},
                    "podTemplate": {
                        "spec": {
                            "initContainers": [
                                {"name": name, "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
                                for name in ("download", "gateway")
                            ]
                        }
                    },
                    **spec,
                },
            }
        )
        return self

    @property
    def status(self) -> Object:
        """Its status, empty before the operator has seen it."""
        found = self.cluster.get("modelserver", NAME, self.namespace) or {}
        status: Object = found.get("status", {})
        return status

    @property
    def ready(self) -> Sequence[Object]:
        """Its servers that may be called."""
        return [server for server in self.status.get("servers", []) if server["ready"]]

    def wait_ready(self, count: int) -> "Server":
        """Until so many servers are ready, and no other is listed."""
        eventually(
            lambda: True if [len(self.ready), len(self.status.get("servers", []))] == [count] * 2 else None,
            240,
            self.describe,
        )
        return self

    def addresses(self) -> Sequence[str]:
        """Of the pods."""
        return [server["url"].removeprefix("http://").rpartition(":")[0] for server in self.ready]

    def calls(self, asked: frozenset[routes.Route]) -> Sequence[Object]:
        """Every route on both ports of every server, with a token that somebody made up."""
        headers = {"Authorization": "Bearer guessed", "Content-Type": "application/json"}
        return [
            [method, f"http://{address}:{port}{path}", headers]
            for address in self.addresses()
            for port in (MODEL_PORT, MODEL_CONTROL_PORT)
            for method, path in sorted(asked)
        ]

    def describe(self) -> str:
        """All that a failed test wants to know."""
        kinds = "modelservers,statefulsets,jobs,pods,services,events"
        found = [self.cluster.kubectl("get", kinds, "-n", self.namespace, check=False).stdout]
        found.append(self.cluster.kubectl("describe", "modelserver", "-n", self.namespace, check=False).stdout)
        options = ("logs", f"{NAME}-0", "-n", self.namespace, "--all-containers", "--tail=30")
        found.append(self.cluster.kubectl(*options, check=False).stdout)
        return "\n".join(found)[-12_000:]


@pytest.fixture
def server(cluster: Cluster, namespace: str) -> Server:
    return Server(cluster, namespace)


def run_pod(server: Server, name: str, labels: Object, *arguments: str) -> str:
    """What a pod with these labels prints."""
    container = {"name": "main", "image": QUICKSTART_IMAGE, "command": ["python3", "-c", *arguments]}
    server.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": server.namespace, "labels": labels},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
    )
    ended = "--for=jsonpath={.status.phase}=Succeeded"
    done = server.cluster.kubectl("wait", ended, f"pod/{name}", "-n", server.namespace, "--timeout=120s", check=False)
    said = server.cluster.kubectl("logs", name, "-n", server.namespace).stdout
    assert done.returncode == 0, said + server.describe()
    return said


def test_servers_come_up_and_are_found_by_all_and_each_by_its_own_address(server: Server) -> None:
    server.apply(replicas=2).wait_ready(2)
    status = server.status
    assert status["url"] == f"http://{NAME}-api.{server.namespace}.svc:{MODEL_PORT}"
    assert [entry["name"] for entry in status["servers"]] == [f"{NAME}-0", f"{NAME}-1"]
    assert {entry["policyVersion"] for entry in status["servers"]} == {0}
    urls = [status["url"], *(entry["url"] for entry in status["servers"])]
    calls = [["GET", f"{url}/v1/models", {}] for url in urls]
    runner = {ROLE_LABEL: RUNNER_ROLE}
    tries = itertools.count()

    def answers() -> list[int]:
        said = run_pod(server, f"asks-{next(tries)}", runner, ASK, json.dumps(calls))
        return [status for _, _, status in json.loads(said)]

    # A Service takes a moment to lead to a pod that has just become ready.
    eventually(lambda: answers() == [200, 200, 200] or None, 60, lambda: str(answers()))


def test_no_control_route_opens_to_a_runner_or_a_sandbox(server: Server, cluster: Cluster, namespace: str) -> None:
    server.apply(replicas=1).wait_ready(1)
    control = routes.CONTROL - routes.READ_ONLY | {routes.FETCH_POLICY}
    calls = json.dumps(server.calls(control))
    from_runner = json.loads(run_pod(server, "runner", {ROLE_LABEL: RUNNER_ROLE}, ASK, calls))
    assert len(from_runner) == 2 * len(control)
    for method, url, status in from_runner:
        # Where no network policy is enforced, the control port would answer 401.
        assert status == (404 if f":{MODEL_PORT}/" in url else 0), (method, url, status)

    # It lists the ports, so nothing but the model server's own policy is in its way.
    [address] = server.addresses()
    listed = [f"{address}:{MODEL_PORT}", f"{address}:{MODEL_CONTROL_PORT}"]
    sandbox = ByHand(cluster, namespace, "curious")
    sandbox.apply(workspaces={"mode": "Plain"}, network={"setup": listed, "agent": listed, "verifier": listed})
    sandbox.wait_ready()
    everything = json.dumps(server.calls(routes.DATA | control))
    done = sandbox.run_in_container("python3", "-c", ASK, everything)
    assert done.returncode == 0, done.stderr
    assert {status for _, _, status in json.loads(done.stdout)} == {0}
    assert server.status["policy"]["gate"] == "Open"
    assert len(server.ready) == 1


def test_servers_are_scaled_and_given_a_policy_without_a_restart(server: Server) -> None:
    server.apply(replicas=1).wait_ready(1)
    uid = server.ready[0]["uid"]
    server.cluster.kubectl("scale", "modelserver", NAME, "-n", server.namespace, "--replicas=2")
    server.wait_ready(2)
    policy = {"version": 1, "uri": server.upload("policy-1", 1)}
    patch = json.dumps({"spec": {"policy": policy}})
    server.cluster.kubectl("patch", "modelserver", NAME, "-n", server.namespace, "--type=merge", "-p", patch)
    eventually(
        lambda: True if {entry.get("policyVersion") for entry in server.ready} == {1} else None, 120, server.describe
    )
    server.cluster.kubectl("scale", "modelserver", NAME, "-n", server.namespace, "--replicas=1")
    server.wait_ready(1)
    assert server.ready[0]["uid"] == uid, "the server that was there first has not been restarted"
    assert server.status["replicas"] == 1


def test_a_policy_version_never_falls(server: Server) -> None:
    server.apply(replicas=0, policy={"version": 3, "uri": f"{server.weights}/3"})
    patch = ("patch", "modelserver", NAME, "-n", server.namespace, "--type=merge", "-p")
    done = server.cluster.kubectl(*patch, '{"spec":{"policy":{"version":2}}}', check=False)
    assert done.returncode != 0
    assert "cannot fall" in done.stderr


def test_nothing_is_left_of_a_server_that_is_deleted(server: Server) -> None:
    server.apply(replicas=1).wait_ready(1)
    server.cluster.kubectl("delete", "modelserver", NAME, "-n", server.namespace)
    kinds = "statefulsets,services,networkpolicies,poddisruptionbudgets,secrets,jobs,persistentvolumeclaims,pods"
    selector = f"{MODEL_SERVER_LABEL}={NAME}"
    eventually(
        lambda: None if server.cluster.list(kinds, server.namespace, selector) else True,
        180,  # its pods finish what runs
        server.describe,
    )
