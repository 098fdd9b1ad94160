"""Sandboxes applied by hand: commands in their workspaces, and in their containers beside them."""

import asyncio
import base64
import contextlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from kubernetes.client import CoreV1Api
from kubernetes.config import new_client_from_config

from rollout_api.cluster import EXECUTOR_PORT, executor_token
from rolloutctl.cluster_access import forwarded_port
from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Object, eventually

WORKSPACE_SECONDS = 120
"""Time limit of one command. A busy machine of two cores may need a minute for one second of work."""


@dataclass(frozen=True)
class ByHand:
    """A Sandbox without a job."""

    cluster: Cluster
    namespace: str
    name: str

    def apply(self, **spec: object) -> "ByHand":
        """Apply the Sandbox by kubectl."""
        self.cluster.apply(
            {
                "apiVersion": "rollout.dev/v1alpha1",
                "kind": "Sandbox",
                "metadata": {"name": self.name, "namespace": self.namespace},
                "spec": {"image": QUICKSTART_IMAGE, **spec},
            }
        )
        return self

    @property
    def object(self) -> Object:
        """Return the Sandbox as the API server has it now."""
        found = self.cluster.get("sandbox", self.name, self.namespace)
        assert found is not None, f"Sandbox {self.name} is gone"
        return found

    @property
    def pod(self) -> Object:
        """Return its pod as the API server has it now."""
        found = self.cluster.get("pod", self.name, self.namespace)
        assert found is not None, f"pod {self.name} is gone"
        return found

    def condition(self, kind: str) -> Object:
        """Return a condition; empty if it does not exist."""
        conditions = self.object.get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def wait_finished(self) -> Object:
        """Wait until it has ended; return its condition Finished."""
        return eventually(lambda: self.condition("Finished") or None, 120, self.describe)

    def wait_ready(self) -> "ByHand":
        """Wait until it is ready."""
        eventually(lambda: self.condition("Ready").get("status") == "True" or None, 120, self.describe)
        return self

    @property
    def address(self) -> str:
        """Return its pod's address."""
        return str(self.object["status"]["podIP"])

    def copy_in(self, source: Path, target: str, workspace: str = "main") -> None:
        """Copy a file into a workspace."""
        done = self.cluster.rolloutctl(
            *("sandbox", "cp", "-n", self.namespace, "--workspace", workspace, str(source), f"{self.name}:{target}")
        )
        assert done.returncode == 0, done.stderr + self.describe()

    def try_to_run(self, *command: str, workspace: str = "main") -> subprocess.CompletedProcess[str]:
        """Run a command in a workspace; return how it ended."""
        return self.cluster.rolloutctl(
            *("sandbox", "exec", "-n", self.namespace, "--workspace", workspace, self.name),
            *("--deadline-seconds", str(WORKSPACE_SECONDS), "--", *command),
        )

    def run(self, *command: str, workspace: str = "main") -> str:
        """Return the output of a command in a workspace."""
        done = self.try_to_run(*command, workspace=workspace)
        assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}{self.describe()}"
        return done.stdout

    def run_in_container(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command as the container's user, beside the executor and outside of every workspace."""
        return self.cluster.kubectl(
            "exec", "-i", self.name, "-n", self.namespace, "--", *command, text=text, check=False
        )

    def token_by(self, key: str) -> str:
        """Return the token that its executor would have with that key."""
        return executor_token(key, self.name, self.object["metadata"]["uid"])

    def assert_unharmed(self) -> None:
        """Check that its executor was never restarted. The container never restarts, so the executor would be gone."""
        assert self.run("echo", "fine") == "fine\n"
        (container,) = self.pod["status"]["containerStatuses"]
        assert ("running" in container["state"], container["restartCount"]) == (True, 0), self.describe()

    def describe(self) -> str:
        """Return what helps to understand a failed test."""
        done = self.cluster.kubectl(
            "describe", f"sandbox/{self.name}", f"pod/{self.name}", "-n", self.namespace, check=False
        )
        return done.stdout[-6000:]


def secret_value(cluster: Cluster, namespace: str, name: str, key: str) -> str:
    """Return the content of a Secret."""
    secret = cluster.get("secret", name, namespace)
    assert secret is not None
    return base64.b64decode(secret["data"][key]).decode()


def answer_of_executor(cluster: Cluster, namespace: str, pod: str, token: str) -> int:
    """Return the status with which a pod's executor answers a caller with this token."""

    async def ask() -> int:
        client = new_client_from_config(str(cluster.kubeconfig))
        async with forwarded_port(CoreV1Api(client), namespace, pod, EXECUTOR_PORT) as port:
            headers = {"Authorization": f"Bearer {token}"}
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
                # A Ready pod's executor may still be on its way up.
                for _ in range(50):
                    with contextlib.suppress(aiohttp.ClientConnectionError, TimeoutError):
                        async with session.get(f"http://127.0.0.1:{port}/v1/health", headers=headers) as response:
                            return response.status
                    await asyncio.sleep(0.2)
        raise AssertionError(f"the executor of {pod} does not answer")

    return asyncio.run(ask())
