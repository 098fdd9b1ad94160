"""A real cluster for end-to-end tests: objects through kubectl, as a user accesses them, and results from object
storage.
"""

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml

from agent_runtime.recording.store import Store
from tests.support.cluster_reader import ClusterReader
from tests.support.preloaded import run_rolloutctl
from tests.support.quickstart import REWARDS

REPOSITORY = Path(__file__).parents[2]
OPERATOR_NAMESPACE = "agent-rollouts"
OPERATOR, OPERATOR_LABEL = "deployment/agent-rollouts", "app.kubernetes.io/name=agent-rollouts"
STORAGE_SECRET = "storage"
QUICKSTART_IMAGE = "agent-rollouts-quickstart:test"

Object = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """A cluster with the chart installed. `environ` are the settings of its object storage, the same for pods."""

    kubeconfig: Path
    environ: Mapping[str, str]
    bucket: str
    details: Mapping[str, Any]
    """Output of `hack/cluster/status --json`; empty for another cluster."""

    def program(self, name: str) -> str:
        """Return kubectl or helm: the harness's own, else the one on PATH."""
        return str(Path(self.details["bin"]) / name) if self.details else name

    def kubectl(self, *arguments: str, text: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl with these arguments, and `text` as standard input."""
        done = subprocess.run(
            [self.program("kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done

    def apply(self, *objects: Object) -> None:
        """Apply objects by kubectl."""
        self.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(objects))

    def evict(self, pod: str, namespace: str) -> bool:
        """Evict a pod like `kubectl drain`, by the eviction API, which obeys PodDisruptionBudgets. False: refused for
        now.
        """
        metadata = {"name": pod, "namespace": namespace}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        done = self.kubectl("create", "--raw", path, "-f", "-", text=json.dumps(eviction), check=False)
        assert done.returncode == 0 or "disruption budget" in done.stderr, done.stderr
        return done.returncode == 0

    @cached_property
    def _reader(self) -> ClusterReader:
        return ClusterReader(self.kubeconfig)

    def get(self, kind: str, name: str, namespace: str) -> Object | None:
        """Return an object; None if it does not exist."""
        return self._reader.get(kind, name, namespace)

    def list(self, kinds: str, namespace: str, selector: str = "") -> Sequence[Object]:
        """Return the objects of these kinds (separated by commas), by label. Without a namespace, those of all
        namespaces.
        """
        return self._reader.list(kinds, namespace, selector)

    def helm(self, *arguments: str) -> str:
        """Run helm with these arguments; return its output."""
        command = [self.program("helm"), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def wait_for_operator(self) -> None:
        """Wait until the wanted operators work, and none with an earlier configuration runs."""
        self.kubectl("rollout", "status", OPERATOR, "-n", OPERATOR_NAMESPACE, "--timeout=120s")

        def ended() -> bool | None:
            pods = self.list("pods", OPERATOR_NAMESPACE, OPERATOR_LABEL)
            return not any("deletionTimestamp" in pod["metadata"] for pod in pods) or None

        eventually(ended, 60, lambda: "the operator that was replaced does not end")

    def rolloutctl(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run rolloutctl like a user with this kubeconfig and the credentials of the storage."""
        environ = dict(self.environ) | {"KUBECONFIG": str(self.kubeconfig), "COLUMNS": "200"}
        return run_rolloutctl(*arguments, folder=Path.cwd(), environ=environ, text=text, timeout=300)

    def node_process(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the harness, such as `component kill apiserver`."""
        done = subprocess.run(
            [str(REPOSITORY / "hack" / "cluster" / command[0]), *command[1:], *_name()],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"hack/cluster/{' '.join(command)}: {done.stderr}"
        return done


class Job:
    """A RolloutJob in a namespace. Its results are below a storage prefix of that namespace."""

    def __init__(self, cluster: Cluster, namespace: str, manifest: Object) -> None:
        self.cluster, self.namespace, self.manifest = cluster, namespace, manifest
        self.name: str = manifest["metadata"]["name"]
        manifest["metadata"]["namespace"] = namespace

    def apply(self) -> "Job":
        """kubectl apply."""
        self.cluster.apply(self.manifest)
        return self

    @property
    def object(self) -> Object:
        """Return the job as the API server has it now."""
        found = self.cluster.get("rolloutjob", self.name, self.namespace)
        assert found is not None, f"RolloutJob {self.name} is gone"
        return found

    @cached_property
    def uid(self) -> str:
        """Return the uid of its first object."""
        return str(self.object["metadata"]["uid"])

    @property
    def status(self) -> Object:
        """Return its status; empty before the operator has processed it."""
        status: Object = self.object.get("status", {})
        return status

    def condition(self, kind: str) -> Object:
        """Return a condition; empty if it does not exist."""
        return next((c for c in self.status.get("conditions", []) if c["type"] == kind), {})

    def pods(self, role: str) -> Sequence[Object]:
        """Return the pods of its runners or sandboxes."""
        return self.cluster.list("pods", self.namespace, f"rollout.dev/job-uid={self.uid},rollout.dev/role={role}")

    def sandboxes(self) -> Sequence[Object]:
        """Return its Sandboxes."""
        return self.cluster.list("sandboxes", self.namespace, f"rollout.dev/job-uid={self.uid}")

    @property
    def reports(self) -> list[Object]:
        """Return the reports of its runners."""
        shards = self.cluster.list("rolloutshards", self.namespace, f"rollout.dev/job-uid={self.uid}")
        return [shard["status"] for shard in shards if "status" in shard]

    def wait(self, condition: str, seconds: float = 600) -> Object:
        """Wait until a condition is true. Fails with a description of the job at the time limit, and when another end
        came.
        """
        ends = {"Succeeded", "Failed", "Invalid"} - {condition}

        def true() -> Object | None:
            job = self.object
            status = job.get("status", {})
            if status.get("observedGeneration") != job["metadata"]["generation"]:
                return None  # it speaks of an earlier spec
            for found in status.get("conditions", []):
                if found["type"] == condition and found["status"] == "True":
                    return dict(found)
                assert not (found["type"] in ends and found["status"] == "True"), found
            return None

        return eventually(true, seconds, lambda: f"{condition} of {self.name}: {self.describe()}")

    def wait_sealed(self, count: int, seconds: float = 600) -> None:
        """Wait until this many rollouts are sealed, by the status."""
        eventually(lambda: self.status.get("sealed", 0) >= count or None, seconds, self.describe)

    def wait_stored(self, count: int, seconds: float = 600) -> None:
        """Wait until this many rollouts are sealed, by the storage, which also works without operator or API server."""
        eventually(lambda: self.sealed() >= count or None, seconds, self.describe)

    def results(self) -> list[Object]:
        """Return the lines of results.jsonl."""
        return [json.loads(line) for line in self.read("results.jsonl").decode().splitlines()]

    def read(self, key: str) -> bytes:
        """Return an object of its run's folder."""
        data = asyncio.run(self.store().get(key))
        assert data is not None, f"{key} of {self.name} is not in storage"
        return data

    def keys(self, prefix: str) -> Sequence[str]:
        """Return the keys of its run's folder below a prefix."""
        return [meta.key for meta in asyncio.run(self.store().list(prefix))]

    def sealed(self) -> int:
        """Return the number of sealed rollouts in its storage."""
        return len(self.keys("seals"))

    def store(self) -> Store:
        """Return the store of its run's folder."""
        uri = self.manifest["spec"]["output"]["uri"]
        return Store.open(f"{uri}/{self.name}-{self.uid[:8]}", self.cluster.environ, patience_seconds=30)

    def patch(self, spec: Object) -> None:
        """Patch fields of its spec by kubectl."""
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "rolloutjob", self.name, "-n", self.namespace, "--type=merge", "-p", patch)

    def suspend(self, suspend: bool) -> None:
        """Suspend or resume it."""
        self.patch({"suspend": suspend})

    def delete(self, *options: str) -> None:
        """Delete the job by kubectl."""
        self.cluster.kubectl("delete", "rolloutjob", self.name, "-n", self.namespace, *options)

    def columns(self, *options: str) -> dict[str, str]:
        """Return the columns of `kubectl get` by their headings; a column without a value is empty."""
        told = self.cluster.kubectl("get", "rolloutjobs", self.name, "-n", self.namespace, *options).stdout
        header, row = told.splitlines()
        return {name.group().strip(): row[name.start() : name.end()].strip() for name in re.finditer(r"\S+\s*", header)}

    def describe(self) -> str:
        """Return what helps to understand a failed test."""
        found = [
            self.cluster.kubectl("get", "rolloutjobs,sandboxes,jobs,pods", "-n", self.namespace, check=False).stdout,
            self.cluster.kubectl("describe", "rolloutjob", self.name, "-n", self.namespace, check=False).stdout[-6000:],
        ]
        for pod in self.pods("runner"):
            logs = self.cluster.kubectl(
                "logs", pod["metadata"]["name"], "-n", self.namespace, "--tail=40", check=False
            ).stdout
            found.append(logs)
        return "\n".join(found)


def eventually(found: Callable[[], T | None], seconds: float, describe: Callable[[], str] = str) -> T:
    """Return the first value that is not None. At the time limit the test fails with a description of the current
    state.
    """
    until = time.monotonic() + seconds
    while (value := found()) is None:
        assert time.monotonic() < until, describe()
        time.sleep(0.2)
    return value


def storage_secret(cluster: Cluster, namespace: str) -> Object:
    """Return the Secret with the settings of the object storage."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": STORAGE_SECRET, "namespace": namespace},
        "stringData": dict(cluster.environ),
    }


def quickstart_manifest() -> Object:
    """Return examples/quickstart/job.yaml."""
    manifest: Object = yaml.safe_load((REPOSITORY / "examples/quickstart/job.yaml").read_text())
    return manifest


def small_job(name: str, tasks: int = 1, **spec: object) -> Object:
    """Return a job that takes seconds. Its Oracle solves every task, so each reward is 1."""
    task = {"prompt": "p", "solution": ["touch solved"], "verifier": {"commands": ["test -e solved"]}}
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {
            "agent": {"type": "Oracle"},
            "sandbox": {"image": QUICKSTART_IMAGE},
            "tasks": {"inline": [{"name": f"task-{number}"} | task for number in range(tasks)]},
            **spec,
        },
    }


def slow_quickstart(turn_seconds: float, **spec: object) -> Object:
    """Return the quickstart's job with slower answers of its model, so that a test has time to disturb it."""
    manifest = quickstart_manifest()
    manifest["spec"]["sandbox"]["image"] = QUICKSTART_IMAGE
    manifest["spec"] |= spec
    for task in manifest["spec"]["model"]["scripted"]["tasks"]:
        for turn in (turn for member in task["members"] for turn in member["turns"]):
            turn["delaySeconds"] = turn_seconds
    return manifest


def assert_rewards(job: Job) -> Sequence[Object]:
    """Check that a quickstart's results are those of a run on a laptop, each rollout once. Returns them."""
    results = job.results()
    assert [result["index"] for result in results] == list(range(24))
    rewards: dict[str, list[float]] = {}
    for result in results:
        assert result["outcome"] == "Completed", result
        rewards.setdefault(result["task"], []).append(result["reward"])
    assert rewards == REWARDS
    return results


def assert_undisturbed(job: Job) -> None:
    """Like `assert_rewards`, and check that no rollout needed a second attempt."""
    for result in assert_rewards(job):
        assert (result["attempt"], result["failedAttempts"]) == (0, []), result


def _name() -> list[str]:
    """Return the option that selects the harness's cluster."""
    name = os.environ.get("ROLLOUT_TEST_CLUSTER")
    return ["--name", name] if name else []


def find_cluster() -> Cluster | None:
    """Return the harness's cluster, or the one that ROLLOUT_TEST_KUBECONFIG names, with its storage in
    ROLLOUT_TEST_S3_*.
    """
    if kubeconfig := os.environ.get("ROLLOUT_TEST_KUBECONFIG"):
        environ = {
            "AWS_ACCESS_KEY_ID": os.environ["ROLLOUT_TEST_S3_KEY"],
            "AWS_SECRET_ACCESS_KEY": os.environ["ROLLOUT_TEST_S3_SECRET"],
            "AWS_ENDPOINT_URL": os.environ["ROLLOUT_TEST_S3_ENDPOINT"],
            "AWS_REGION": "us-east-1",
        }
        return Cluster(Path(kubeconfig), environ, os.environ["ROLLOUT_TEST_S3_BUCKET"], {})
    status = subprocess.run(
        [str(REPOSITORY / "hack/cluster/status"), "--json", *_name()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if status.returncode != 0:
        return None
    details = json.loads(status.stdout)
    s3 = details["s3"]
    environ = {
        "AWS_ACCESS_KEY_ID": s3["accessKey"],
        "AWS_SECRET_ACCESS_KEY": s3["secretKey"],
        "AWS_ENDPOINT_URL": s3["endpoint"],
        "AWS_REGION": "us-east-1",
    }
    return Cluster(Path(details["kubeconfig"]), environ, s3["bucket"], details)
