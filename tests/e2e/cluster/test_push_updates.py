"""A trainer's pod pushes its weights into a ModelServer's engines over the port that `weightTransfer.push` opens, while
a job runs, and is killed in the middle.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_api.cluster import MODEL_CONTROL_PORT, MODEL_PORT, ROLE_LABEL, RUNNER_ROLE, SANDBOX_ROLE
from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Job, Object, eventually
from tests.support.model_server import NAME, Server
from tests.support.served_jobs import (
    MEMBERS,
    Truth,
    endless_model,
    let_end,
    remember,
    results_of,
    served_job,
    versions_in,
    wait_tokens,
)

pytestmark = [pytest.mark.long, pytest.mark.full]

PROGRAM = Path(__file__).parents[2] / "support" / "pushing_trainer.py"
HOOK_PORT, MASTER_PORT, TENSOR_PORT, OTHER_PORT = 9000, 29500, 29600, 29601
LABELS = {"app": "trainer"}

# Asks the trainer from its own pod. Prints the answer.
ASK = """
import sys, urllib.request
path, body = sys.argv[1:]
request = urllib.request.Request("http://127.0.0.1:9000" + path, body.encode() or None)
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""
# Listens on these ports until it is killed, and says when it does.
LISTEN = """
import socket, sys, time
servers = [socket.create_server(("0.0.0.0", int(port)), backlog=64) for port in sys.argv[1:]]
print("ready", flush=True)
time.sleep(600)
"""
# Prints which of the ports of an address can be connected to.
CONNECT = """
import json, socket, sys
reached = []
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=3).close()
        reached.append(port)
    except OSError:
        pass
print(json.dumps(reached))
"""


class Trainer:
    """A Deployment of one pod, which is created again when it is killed."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def apply(self) -> "Trainer":
        """Apply the trainer, and wait until it answers."""
        metadata = {"name": "trainer", "namespace": self.namespace}
        address = {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        container = {
            "name": "trainer",
            "image": QUICKSTART_IMAGE,
            "command": ["python3", "/program/trainer.py", "$(ADDRESS)", str(HOOK_PORT), str(MASTER_PORT)],
            "env": [address],
            "readinessProbe": {"tcpSocket": {"port": HOOK_PORT}, "periodSeconds": 1},
            "volumeMounts": [{"name": "program", "mountPath": "/program"}],
        }
        pod = {
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "program", "configMap": {"name": "trainer"}}],
        }
        template = {"metadata": {"labels": LABELS}, "spec": pod}
        ports = [{"port": HOOK_PORT}]
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": metadata,
                "data": {"trainer.py": PROGRAM.read_text()},
            },
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"selector": LABELS, "ports": ports}},
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": metadata,
                "spec": {"selector": {"matchLabels": LABELS}, "template": template},
            },
        )
        self.wait()
        return self

    def wait(self) -> None:
        """Wait until it answers."""
        self.cluster.kubectl("rollout", "status", "deployment/trainer", "-n", self.namespace, "--timeout=120s")

    def ask(self, path: str, body: object = None) -> list[Object]:
        """Return its pod's answer."""
        text = "" if body is None else json.dumps(body)
        command = ("exec", "deployment/trainer", "-n", self.namespace, "--", "python3", "-c", ASK, path, text)
        answer: list[Object] = json.loads(self.cluster.kubectl(*command).stdout)
        return answer

    def kill(self) -> None:
        """Kill its pod at once; another pod replaces it."""
        pods = ("delete", "pods", "-l", "app=trainer", "-n", self.namespace, "--force", "--grace-period=0")
        self.cluster.kubectl(*pods)


def push_fields(namespace: str) -> Object:
    """Return fields of a ModelServer to which the trainer pushes."""
    push = {
        "hook": f"http://trainer.{namespace}.svc:{HOOK_PORT}/hook",
        "timeoutSeconds": 60,
        "peers": {"matchLabels": LABELS},
        "ports": [TENSOR_PORT],
    }
    return {"weightTransfer": {"mode": "Push", "push": push}}


def test_job_continues_during_pushes_and_after_the_trainer_dies(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job]
) -> None:
    trainer = Trainer(cluster, namespace).apply()
    fields = endless_model(cluster, namespace, f"--transfer-port {TENSOR_PORT}")
    server = Server(cluster, namespace).apply(replicas=2, **fields, **push_fields(namespace)).wait_ready(2)
    uids = [entry["uid"] for entry in server.ready]
    job = new_job(served_job("pushed", {"serverRef": NAME}, tasks=2, runners=1)).apply()
    wait_tokens(server, 2 * MEMBERS)

    server.patch(policy={"version": 1})
    server.wait_policy(1)
    [question] = trainer.ask("/asked")
    assert [(to["name"], to["uid"]) for to in question["servers"]] == [(e["name"], e["uid"]) for e in server.ready]
    for entry in server.ready:
        state = server.ask_engine(entry["name"], "/_standin/state")
        assert (state["version"], {load["how"] for load in state["loads"]}) == (1, {"update_weights"})

    trainer.ask("/pause", {"seconds": 600})
    server.patch(policy={"version": 2})

    def halves() -> list[Any]:
        return [server.ask_engine(uid, "/_standin/state")["updating"] for uid in (f"{NAME}-0", f"{NAME}-1")]

    eventually(lambda: all(halves()) or None, 60, server.describe)
    trainer.kill()
    server.wait_policy(1)
    assert server.policy["failed"] == 2
    assert "update_weights" in server.condition("PolicyLoaded")["message"], server.condition("PolicyLoaded")
    assert [entry["uid"] for entry in server.wait_ready(2).ready] == uids, "no engine was restarted for it"

    server.patch(policy={"version": 3})
    server.wait_policy(3)
    truth: Truth = {}
    let_end(server)
    job.wait("Succeeded")
    for entry in server.ready:
        remember(server, entry["name"], truth)
    reader, results = results_of(job)
    assert [result.index for result in results] == list(range(2 * MEMBERS))
    for result in results:
        assert set(versions_in(reader, result, truth)) == {0, 1, 3}
        assert result.failed_attempts == []


@contextmanager
def listening(server: Server, pod: str) -> Iterator[None]:
    """Listen on both ports of a server's pod, so that only a NetworkPolicy can prevent connections."""
    command = ["exec", pod, "-n", server.namespace, "-c", "engine", "--", "python3", "-c", LISTEN]
    kubectl = [server.cluster.program("kubectl"), "--kubeconfig", str(server.cluster.kubeconfig)]
    ports = [str(TENSOR_PORT), str(OTHER_PORT)]
    with subprocess.Popen([*kubectl, *command, *ports], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.kill()


def test_tensor_port_admits_only_the_trainer_and_the_trainer_no_other_port(
    cluster: Cluster, namespace: str, new_namespace: Callable[[], str]
) -> None:
    # No policy is pushed in this test, so the trainer of the hook need not exist.
    server = Server(cluster, namespace).apply(replicas=1, **push_fields(namespace)).wait_ready(1)
    [entry] = server.ready
    address = entry["url"].removeprefix("http://").rpartition(":")[0]
    ports = [MODEL_PORT, MODEL_CONTROL_PORT, TENSOR_PORT, OTHER_PORT]

    def reached(name: str, labels: Object, place: str = namespace) -> list[int]:
        said = server.run_in_pod(name, labels, CONNECT, address, *map(str, ports), namespace=place)
        found: list[int] = json.loads(said)
        return found

    with listening(server, entry["name"]):
        # The trainer is checked first: it shows that the ports are listening.
        assert reached("trainer", LABELS) == [TENSOR_PORT]
        assert reached("runner", {ROLE_LABEL: RUNNER_ROLE}) == [MODEL_PORT]
        assert reached("stranger", {"app": "other"}) == []
        assert reached("sandbox", {**LABELS, ROLE_LABEL: SANDBOX_ROLE}) == []
        assert reached("elsewhere", LABELS, new_namespace()) == []
