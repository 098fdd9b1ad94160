"""A ModelServer on real nodes, with the stand-in instead of vLLM: its start, addresses, network rules and removal."""

import asyncio
import itertools
import json
from collections.abc import Sequence

import pytest

from agent_runtime.recording.store import Store
from agent_runtime.serving import routes
from rollout_api.cluster import MODEL_CONTROL_PORT, MODEL_PORT, MODEL_SERVER_LABEL, ROLE_LABEL, RUNNER_ROLE
from rollout_api.inference.description import Route
from rollout_api.inference.vllm import VLLM
from rolloutctl.policy import PolicyNotServed
from tests.support.cluster import Cluster, Object, eventually
from tests.support.model_server import NAME, Server, quick_pods, upload_weights
from tests.support.sandboxes import ByHand

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


@pytest.fixture
def server(cluster: Cluster, namespace: str) -> Server:
    return Server(cluster, namespace)


def addresses(server: Server) -> Sequence[str]:
    """Return the addresses of the pods."""
    return [entry["url"].removeprefix("http://").rpartition(":")[0] for entry in server.ready]


def calls_to(server: Server, asked: frozenset[Route]) -> Sequence[Sequence[object]]:
    """Return a call of every route on both ports of every server, with an invalid token."""
    headers = {"Authorization": "Bearer guessed", "Content-Type": "application/json"}
    return [
        [method, f"http://{address}:{port}{path}", headers]
        for address in addresses(server)
        for port in (MODEL_PORT, MODEL_CONTROL_PORT)
        for method, path in sorted(asked)
    ]


def test_servers_answer_at_the_shared_and_their_own_addresses_and_leave_no_object(server: Server) -> None:
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
        said = server.run_in_pod(f"asks-{next(tries)}", runner, ASK, json.dumps(calls))
        return [status for _, _, status in json.loads(said)]

    # A Service needs a moment until it forwards to a pod that has just become ready.
    eventually(lambda: answers() == [200, 200, 200] or None, 60, lambda: str(answers()))

    server.cluster.kubectl("delete", "modelserver", NAME, "-n", server.namespace)
    kinds = "statefulsets,services,networkpolicies,poddisruptionbudgets,secrets,jobs,persistentvolumeclaims,pods"
    selector = f"{MODEL_SERVER_LABEL}={NAME}"
    eventually(
        lambda: None if server.cluster.list(kinds, server.namespace, selector) else True,
        180,  # its pods finish what runs
        server.describe,
    )


def test_no_control_route_opens_to_a_runner_or_a_sandbox(server: Server, cluster: Cluster, namespace: str) -> None:
    server.apply(replicas=1).wait_ready(1)
    control = VLLM.routes.control - VLLM.routes.data | routes.OWN
    calls = json.dumps(calls_to(server, control))
    from_runner = json.loads(server.run_in_pod("runner", {ROLE_LABEL: RUNNER_ROLE}, ASK, calls))
    assert len(from_runner) == 2 * len(control)
    for method, url, status in from_runner:
        # Where no network policy is enforced, the control port would answer 401.
        assert status == (404 if f":{MODEL_PORT}/" in url else 0), (method, url, status)

    # The sandbox's own policy allows these ports, so only the model server's policy can block them.
    [address] = addresses(server)
    listed = [f"{address}:{MODEL_PORT}", f"{address}:{MODEL_CONTROL_PORT}"]
    sandbox = ByHand(cluster, namespace, "curious")
    sandbox.apply(workspaces={"mode": "Plain"}, network={"setup": listed, "agent": listed, "verifier": listed})
    sandbox.wait_ready()
    everything = json.dumps(calls_to(server, VLLM.routes.data | control))
    done = sandbox.run_in_container("python3", "-c", ASK, everything)
    assert done.returncode == 0, done.stderr
    assert {status for _, _, status in json.loads(done.stdout)} == {0}
    assert server.status["policy"]["gate"] == "Open"
    assert len(server.ready) == 1


def test_servers_are_scaled_and_given_a_policy_without_a_restart(server: Server, cluster: Cluster) -> None:
    server.apply(replicas=1).wait_ready(1)
    uid = server.ready[0]["uid"]
    server.cluster.kubectl("scale", "modelserver", NAME, "-n", server.namespace, "--replicas=2")
    server.wait_ready(2)
    server.update(1, upload_weights(cluster, server.namespace, "policy-1", 1))
    assert [entry["policyVersion"] for entry in server.ready] == [1, 1], "the client waits until it is served"
    server.cluster.kubectl("scale", "modelserver", NAME, "-n", server.namespace, "--replicas=1")
    server.wait_ready(1)
    assert server.ready[0]["uid"] == uid, "the server that was there first has not been restarted"
    eventually(lambda: server.status["replicas"] == 1 or None, 60, lambda: str(server.status))


@pytest.mark.full
def test_trainer_with_unloadable_weights_gets_an_error_and_the_old_ones_stay(server: Server, cluster: Cluster) -> None:
    server.apply(replicas=1, podTemplate={"spec": quick_pods()}).wait_ready(1)
    uri = f"s3://{cluster.bucket}/{server.namespace}/broken"
    asyncio.run(Store.open(uri, cluster.environ, patience_seconds=30).put("version.json", b"not weights"))
    with pytest.raises(PolicyNotServed, match=r"version 1 failed: .*; give a higher version to try again"):
        server.update(1, uri)
    server.wait_policy(0)
    server.update(2, upload_weights(cluster, server.namespace, "mended", 2))
    assert [entry["policyVersion"] for entry in server.ready] == [2]


@pytest.mark.full
def test_drains_take_one_server_at_a_time_within_the_budget(server: Server) -> None:
    pods = {"podTemplate": {"spec": quick_pods()}}
    server.apply(replicas=2, podDisruptionBudget={"maxUnavailable": 0}, **pods).wait_ready(2)
    first, second = (entry["name"] for entry in server.ready)
    uids = [entry["uid"] for entry in server.ready]

    def budget() -> Object:
        return server.cluster.get("poddisruptionbudget", NAME, server.namespace) or {}

    def settled(allowed: int) -> bool | None:
        status = budget().get("status", {})
        seen = status.get("observedGeneration") == budget()["metadata"]["generation"]
        # Pods that are not ready may always be evicted; the kubelet reports ready pods slightly later than the
        # ModelServer.
        return (seen and (status["currentHealthy"], status["disruptionsAllowed"]) == (2, allowed)) or None

    eventually(lambda: settled(0), 60, server.describe)
    assert not server.evict(first)

    server.patch(podDisruptionBudget={"maxUnavailable": 1})
    eventually(lambda: settled(1), 60, server.describe)
    assert server.evict(first)
    assert not server.evict(second), "the other one would be the last"

    def is_new(entry: Object) -> bool:
        return entry["uid"] not in uids

    eventually(lambda: [is_new(entry) for entry in server.ready] == [True, False] or None, 120, server.describe)
    eventually(lambda: settled(1), 60, server.describe)
    assert server.evict(second)
    eventually(lambda: [is_new(entry) for entry in server.ready] == [True, True] or None, 120, server.describe)


def test_a_policy_version_never_falls(server: Server) -> None:
    server.apply(replicas=0, policy={"version": 3, "uri": "s3://bucket/3"})
    patch = ("patch", "modelserver", NAME, "-n", server.namespace, "--type=merge", "-p")
    done = server.cluster.kubectl(*patch, '{"spec":{"policy":{"version":2}}}', check=False)
    assert done.returncode != 0
    assert "cannot decrease" in done.stderr
