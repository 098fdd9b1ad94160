"""A control plane for all tests of the operator's core, and operator processes on it."""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.operator_core.control_plane import REPOSITORY, WAIT_SECONDS, ControlPlane, running, until
from tests.support.ports import free_ports

OPERATOR_ACCOUNT = "system:serviceaccount:rights:rollout-operator"
"""The account that the chart would create in the namespace `rights`."""
RUNNER_ACCOUNT = "system:serviceaccount:rights:job-runner"
"""The account of the runners of the RolloutJob `job` in the namespace `rights`."""
USERS = ("first", "second", OPERATOR_ACCOUNT, RUNNER_ACCOUNT)


class Replica:
    """One operator process, as a user of its own."""

    def __init__(self, plane: ControlPlane, namespace: str, user: str, folder: Path) -> None:
        self.user = user
        self._metrics, self._health = free_ports(2)
        config = {
            "images": {"runtime": "localhost/runtime:1", "executor": "localhost/executor:1"},
            "lease": {"namespace": namespace, "durationSeconds": 8, "renewDeadlineSeconds": 3, "retrySeconds": 0.5},
            "watch": {"namespaces": [namespace]},
            "metricsPort": self._metrics,
            "healthPort": self._health,
        }
        path = folder / f"{user}.yaml"
        path.write_text(json.dumps(config))
        self.log = folder / f"{user}.log"
        environ = {
            **os.environ,
            "KUBECONFIG": str(plane.kubeconfig(user)),
            "ROLLOUT_OPERATOR_CONFIG": str(path),
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'operator'}",
        }
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "rollout_operator"]
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def metric(self, name: str) -> float:
        """Return the value of a metric, with its labels as they are written; -1 while the process does not answer."""
        for line in self._read(self._metrics, "/metrics").splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return -1.0

    def leads(self) -> bool:
        """Whether the replica holds the lease."""
        return self.metric("rollout_leader") == 1

    def until_it_leads(self) -> None:
        """Wait until it holds the lease. The test fails with the process's log when it never does."""
        end = time.monotonic() + WAIT_SECONDS
        while not self.leads():
            waits = self.process.poll() is None and time.monotonic() < end
            assert waits, f"{self.log.read_text()}\nit does not lead"
            time.sleep(0.2)

    def ready(self) -> bool:
        """Whether the replica reports that its cache is complete."""
        return self._read(self._metrics, "/readyz") == "ok\n"

    def healthy(self) -> bool:
        """Whether the replica passes the kubelet's liveness probe."""
        return "ok" in self._read(self._health, "/healthz")

    def stop(self) -> int:
        """End the replica as the kubelet would. Returns its exit status."""
        self.process.terminate()
        return self.process.wait(30)

    @staticmethod
    def _read(port: int, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
                body: bytes = response.read()
                return body.decode()
        except (urllib.error.URLError, OSError):
            return ""


StartReplica = Callable[[str], Replica]


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    yield from running(tmp_path_factory.mktemp("control-plane"), USERS)


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    name = f"operator-{secrets.token_hex(3)}"
    plane.kubectl("create", "namespace", name)
    return name


@pytest.fixture
def start(plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[StartReplica]:
    """Starts operator processes that watch the test's namespace; they end with the test."""
    started: list[Replica] = []

    def begin(user: str) -> Replica:
        replica = Replica(plane, namespace, user, tmp_path)
        started.append(replica)
        until(replica.ready, f"replica {user} is ready")
        return replica

    yield begin
    for replica in started:
        replica.process.kill()
        replica.process.wait()
