"""Outages of parts of the harness's own cluster, all of which are restored."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import Cluster, Object, eventually


@dataclass(frozen=True)
class Write:
    """One write that the API server carried out."""

    verb: str
    resource: str
    """Resource with its subresource, as `rolloutjobs/status`."""
    namespace: str
    name: str
    user: str
    pod: str
    """Pod of the writer, if it was one."""
    time: str
    """Time of the request, RFC 3339 in UTC."""


class Outages:
    """Restores after a test what the test has stopped."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stopped: set[str] = set()
        self._added: list[str] = []

    @contextlib.contextmanager
    def without(self, component: str) -> Iterator[None]:
        """Kill a component of the first node during the block."""
        self._stopped.add(component)
        self._harness("component", "kill", component)
        yield
        self._start(component)

    def kill(self, pod: Object) -> None:
        """SIGKILL all processes of a pod's containers at once."""
        killed = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # The sandbox container (pause) stays: without it the pod would be made anew, not its containers.
                if f"/pod{pod['metadata']['uid']}/" in (folder / "cgroup").read_text() and not _is_pause(folder):
                    os.kill(int(folder.name), signal.SIGKILL)
                    killed += 1
        assert killed, f"pod {pod['metadata']['name']} has no process on this machine"

    def add_node(self) -> str:
        """Add a node, and wait until it is ready; return its name."""
        index = self._harness("node", "add").strip()
        name = next(node["name"] for node in self._status()["nodes"] if node["index"] == int(index))
        self._added.append(name)
        return str(name)

    def kill_node(self, name: str) -> None:
        """Kill an added node, as a power failure would."""
        self._harness("node", "kill", name.rpartition("-")[2])

    def writes(self, namespace: str) -> Sequence[Write]:
        """Return all writes of objects of a namespace so far, in the order of the requests."""
        found = []
        with Path(self._cluster.details["auditLog"]).open() as log:
            for line in log:
                # A cheap look first: the log is long. A dry run writes nothing.
                if f'"{namespace}"' not in line or "dryRun=" in line:
                    continue
                if (write := _write(json.loads(line))).namespace == namespace:
                    found.append(write)
        return sorted(found, key=lambda write: write.time)

    def restore(self) -> None:
        """Restore everything."""
        for component in self._stopped:
            self._start(component)
        for name in self._added:
            if any(node["name"] == name for node in self._status()["nodes"]):
                self.kill_node(name)
            self._cluster.kubectl("delete", "node", name, "--ignore-not-found")

    def _start(self, component: str) -> None:
        self._harness("component", "start", component)
        ready = lambda: self._cluster.kubectl("get", "--raw", "/readyz", check=False).returncode == 0 or None  # noqa: E731
        eventually(ready, 60, lambda: f"the API server is not ready after {component} was started again")

    def _status(self) -> Object:
        status: Object = json.loads(self._harness("status", "--json"))
        return status

    def _harness(self, *command: str) -> str:
        return self._cluster.node_process(*command).stdout


def _is_pause(process: Path) -> bool:
    return (process / "comm").read_text().strip() == "pause"


def _write(event: Object) -> Write:
    about, user = event.get("objectRef", {}), event["user"]
    return Write(
        verb=event["verb"] if event.get("responseStatus", {}).get("code", 500) < 400 else "refused",
        resource="/".join(filter(None, (about.get("resource", ""), about.get("subresource", "")))),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        user=user["username"],
        pod=next(iter(user.get("extra", {}).get("authentication.kubernetes.io/pod-name", [])), ""),
        time=event["requestReceivedTimestamp"],
    )
