"""Small pods for tests of the harness: servers that report the caller, and clients that try to connect."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.cluster import REPOSITORY, Cluster, eventually

IMAGE = "localhost/agent-rollouts-base:bookworm"
PORT = 8000
SERVER = f"""
import socketserver
class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(self.client_address[0].encode())
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(("0.0.0.0", {PORT}), Handler).serve_forever()
"""
# Prints, for each address of its arguments, what the server there answered; null for one that cannot be reached.
CLIENT = """
import concurrent.futures, json, socket, sys
def answer(target):
    host, port = target.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), 2) as connection:
            connection.settimeout(2)
            return connection.recv(64).decode(errors="replace") if port == "8000" else "open"
    except OSError:
        return None
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    print(json.dumps(dict(zip(sys.argv[1:], pool.map(answer, sys.argv[1:])))))
"""


def run_harness(*command: str) -> str:
    """Run a command of hack/cluster; return its output."""
    done = subprocess.run(
        [str(REPOSITORY / "hack" / "cluster" / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def base_archive() -> str:
    """Return the archive of the image of these pods."""
    done = subprocess.run([REPOSITORY / "hack" / "images" / "base"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()
    return done.stdout.strip()


def pod(name: str, namespace: str, command: Sequence[str] = ("python3", "-c", SERVER), **spec: Any) -> dict[str, Any]:
    """Return a pod that serves, or runs another command; labelled `app: NAME`."""
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command),
        "ports": [{"name": "echo", "containerPort": PORT}],
    }
    container.update(spec.pop("container", {}))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], **spec},
    }


def run_pods(cluster: Cluster, *pods: dict[str, Any]) -> dict[str, str]:
    """Apply pods and wait until all run. Returns their addresses by name."""
    cluster.apply(*pods)
    addresses = {}
    for manifest in pods:
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]

        def address(name: str = name, namespace: str = namespace) -> str | None:
            found = cluster.get("pod", name, namespace)
            assert found is not None
            return found["status"]["podIP"] if found["status"].get("phase") == "Running" else None

        def described(name: str = name, namespace: str = namespace) -> str:
            return cluster.kubectl("describe", "pod", name, "-n", namespace).stdout

        addresses[name] = eventually(address, 120, described)
    return addresses


def reach(cluster: Cluster, namespace: str, name: str, *targets: str) -> dict[str, str | None]:
    """Return what a pod gets from each `host:port`: the address that the server saw, `open` for another port, None
    without an answer.
    """
    done = cluster.kubectl("exec", "-n", namespace, name, "--", "python3", "-c", CLIENT, *targets)
    answers: dict[str, str | None] = json.loads(done.stdout)
    return answers
