"""Runner pods and the engines in them (and the memory of any of our pods), accessed by `kubectl exec`."""

import contextlib
import subprocess
from collections.abc import Iterator

from tests.support.cluster import Cluster, Job, Object, eventually

# The supervisor is PID 1; the engine is its one child that runs the runner's module.
_SIGNAL_ENGINE = """
import os, signal, sys
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        parent = int(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1])
        is_engine = parent == 1 and b"agent_runtime" in open(f"/proc/{name}/cmdline", "rb").read()
    except OSError:
        continue
    if is_engine:
        os.kill(int(name), signal.Signals["SIG" + sys.argv[1]])
        break
else:
    sys.exit("no engine runs")
"""


def live_runner(job: Job, index: int = 0) -> Object:
    """Return the pod that runs a shard now."""

    def found() -> Object | None:
        for pod in job.pods("runner"):
            if shard(pod) == str(index) and is_live(pod):
                return pod
        return None

    return eventually(found, 120, job.describe)


def kill_engine(cluster: Cluster, pod: Object, signal: str = "KILL") -> None:
    """Send its engine a signal; between two engines, wait for the next one."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]

    def sent() -> bool | None:
        command = ("exec", name, "-n", namespace, "--", "python3", "-c", _SIGNAL_ENGINE, signal)
        return cluster.kubectl(*command, check=False).returncode == 0 or None

    eventually(sent, 60, lambda: f"no engine in {name} could be sent SIG{signal}")


@contextlib.contextmanager
def ending(cluster: Cluster, pod: Object) -> Iterator[list[int]]:
    """Watch a pod that the caller deletes in the block, until it is gone. Yields a list for its container's exit code."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    # Watched: between the container's end and the pod's there is no time to look.
    show = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode} "
    command = ["get", "pod", name, "-n", namespace, "--watch", "-o", show]
    codes: list[int] = []
    with subprocess.Popen(
        [cluster.program("kubectl"), "--kubeconfig", str(cluster.kubeconfig), *command],
        stdout=subprocess.PIPE,
        text=True,
    ) as watch:
        try:
            yield codes
            eventually(lambda: cluster.get("pod", name, namespace) is None or None, 120)
        finally:
            watch.terminate()
            codes += map(int, watch.communicate()[0].split()[-1:])


def resident_mebibytes(cluster: Cluster, pod: Object) -> dict[int, float]:
    """Return the memory of each process of one of our pods, by process id; empty if it cannot be read any more."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    look = "cat /proc/[0-9]*/status 2>/dev/null"
    told = cluster.kubectl("exec", name, "-n", namespace, "--", "sh", "-c", look, check=False).stdout
    sizes = {}
    for process in told.split("Name:")[1:]:
        fields = dict(line.split(":\t", 1) for line in process.splitlines()[1:] if ":\t" in line)
        if "VmRSS" in fields and not process.startswith(("\tcat", "\tsh")):
            sizes[int(fields["Pid"])] = int(fields["VmRSS"].split()[0]) / 1024
    return sizes


def second_runner(pod: Object, name: str) -> Object:
    """Return another runner pod of the same shard, as Kubernetes starts one when it believes that the first is lost."""
    labels = {key: value for key, value in pod["metadata"]["labels"].items() if key.startswith("rollout.dev/")}
    keep = (
        "automountServiceAccountToken",
        "containers",
        "volumes",
        "restartPolicy",
        "serviceAccountName",
        "securityContext",
        "enableServiceLinks",
    )
    spec = {key: pod["spec"][key] for key in keep if key in pod["spec"]}
    # The API server puts the token's volume in anew.
    spec["volumes"] = [volume for volume in spec["volumes"] if not volume["name"].startswith("kube-api-access")]
    for container in spec["containers"]:
        container["volumeMounts"] = [
            m for m in container["volumeMounts"] if not m["name"].startswith("kube-api-access")
        ]
        index = {"name": "JOB_COMPLETION_INDEX", "value": shard(pod)}
        container["env"] = [e for e in container["env"] if e["name"] != "JOB_COMPLETION_INDEX"] + [index]
    metadata = {"name": name, "namespace": pod["metadata"]["namespace"], "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def shard(pod: Object) -> str | None:
    """Return the number of its shard; None for a pod that no Job created."""
    index: str | None = pod["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index")
    return index


def is_live(pod: Object) -> bool:
    """Whether the pod runs, none of its containers waits for a restart, and it is not being deleted."""
    states = [status["state"] for status in pod["status"].get("containerStatuses", [])]
    is_going = "deletionTimestamp" in pod["metadata"]
    return pod["status"].get("phase") == "Running" and not is_going and all("running" in state for state in states)
