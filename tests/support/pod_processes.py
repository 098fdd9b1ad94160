"""Processes and memory of a sandbox pod's container, read from inside it, which works on any cluster."""

from tests.support.cluster import Cluster, Object

# Sends a signal to all processes with exactly this command line, and prints their number. Processes in workspaces are
# included: the user of `kubectl exec` created their namespaces.
_SIGNAL = """
import os, sys
found = 0
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        command = open(f"/proc/{name}/cmdline", errors="replace").read().replace("\\0", " ").strip()
        if command == sys.argv[1]:
            os.kill(int(name), int(sys.argv[2]))
            found += 1
    except (FileNotFoundError, ProcessLookupError):
        continue
print(found)
"""
# The container's own cgroup, by version 2 or 1 of cgroups.
_MEMORY = """
cd /sys/fs/cgroup
cat memory.peak memory.max 2>/dev/null || cat memory/memory.max_usage_in_bytes memory/memory.limit_in_bytes
"""


def running(cluster: Cluster, pod: Object, command: str) -> int:
    """Return how many processes have this command line; 0 also if the container cannot be read."""
    return _signal(cluster, pod, command, 0)


def kill(cluster: Cluster, pod: Object, command: str) -> int:
    """SIGKILL those processes; return their number."""
    return _signal(cluster, pod, command, 9)


def memory_peak(cluster: Cluster, pod: Object) -> tuple[int, int] | None:
    """Return the container's peak memory in bytes, and its limit; None if the container cannot be read."""
    told = _exec(cluster, pod, "sh", "-c", _MEMORY).split()
    return (int(told[0]), int(told[1])) if len(told) == 2 else None


def _signal(cluster: Cluster, pod: Object, command: str, number: int) -> int:
    return int(_exec(cluster, pod, "python3", "-c", _SIGNAL, command, str(number)) or 0)


def _exec(cluster: Cluster, pod: Object, *command: str) -> str:
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    done = cluster.kubectl("exec", name, "-n", namespace, "--", *command, check=False)
    return done.stdout if done.returncode == 0 else ""
