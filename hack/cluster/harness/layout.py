"""The layout of a cluster: addresses, folders and names, all derived from its name and slot."""

import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STATE = Path("/var/lib/agent-rollouts")
SLOTS = 50
MAX_NODES = 4
API_PORT = 6443
S3_PORT = 7070
S3_BUCKET = "rollouts"
S3_ACCESS_KEY = "test"
S3_SECRET_KEY = "test-secret"
# An address of the documentation range (RFC 5737) on the host: it acts as a public address for the NetworkPolicies
# under test.
INTERNET = "203.0.113.1"
INTERNET_NAME = "internet.test"


class LayoutError(ValueError):
    """Invalid name or location of a cluster; the text has the reason and the valid form."""


@dataclass(frozen=True)
class Layout:
    """A cluster's layout. The slot is a number in its address ranges, so that two clusters never share one."""

    name: str
    slot: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", self.name):
            raise LayoutError(
                f"cluster name {self.name!r}: expected 1 to 20 lower-case letters, digits and dashes, a letter first"
            )
        if not 0 <= self.slot < SLOTS:
            raise LayoutError(f"slot {self.slot}: expected 0 to {SLOTS - 1}")

    @property
    def state(self) -> Path:
        return STATE / self.name

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """Returns the audit log: one JSON object per line with the metadata of every write, except leases and events."""
        return self.state / "logs" / "audit.log"

    @property
    def pod_range(self) -> str:
        """Returns the address range of all pods and nodes; the host's own address is in it too."""
        return f"10.{100 + self.slot}.0.0/16"

    @property
    def service_range(self) -> str:
        return f"10.{200 + self.slot}.0.0/16"

    @property
    def api_service(self) -> str:
        """Returns the address of the Service `kubernetes`: the API server takes the first of the range."""
        return f"10.{200 + self.slot}.0.1"

    @property
    def dns_service(self) -> str:
        """Returns the address of the Service `kube-dns`."""
        return f"10.{200 + self.slot}.0.10"

    @property
    def host(self) -> str:
        return f"10.{100 + self.slot}.255.1"

    @property
    def link(self) -> str:
        """Returns the name of the host's end of the link to the first node (the kernel allows 15 characters)."""
        return f"rollouts{self.slot}"

    @property
    def server(self) -> str:
        return f"https://{self.node(0).address}:{API_PORT}"

    @property
    def s3_endpoint(self) -> str:
        return f"http://{self.node(0).address}:{S3_PORT}"

    def node(self, index: int) -> "Node":
        """Returns the node of this number; the first one has the control plane and S3."""
        if not 0 <= index < MAX_NODES:
            raise LayoutError(f"node {index}: expected 0 to {MAX_NODES - 1}")
        return Node(self, index)


@dataclass(frozen=True)
class Node:
    """A node: a set of namespaces on this machine, with a folder for its state."""

    cluster: Layout
    index: int

    @property
    def name(self) -> str:
        return f"{self.cluster.name}-{self.index}"

    @property
    def state(self) -> Path:
        return self.cluster.state / "nodes" / str(self.index)

    @property
    def pod_range(self) -> str:
        """Returns the addresses of its pods: 1,021, more than the kubelet ever starts at once."""
        return f"10.{100 + self.cluster.slot}.{4 * self.index}.0/22"

    @property
    def address(self) -> str:
        return f"10.{100 + self.cluster.slot}.{4 * self.index}.1"

    @property
    def link(self) -> str:
        return f"node{self.index}"

    @property
    def cgroup(self) -> str:
        """Returns the parent of its pods' cgroups, relative to the root of each hierarchy."""
        return f"/agent-rollouts-{self.name}"


def choose_slot(taken: Iterable[int], routes: Iterable[str]) -> int:
    """Returns the first slot that no cluster has and whose ranges overlap none of the host's routes (destinations of
    `ip route`).

    Raises LayoutError if there is none.
    """
    used = set(taken)
    networks = [ipaddress.ip_network(route, strict=False) for route in routes if route != "default"]
    for slot in range(SLOTS):
        layout = Layout("any", slot)
        ranges = [ipaddress.ip_network(text) for text in (layout.pod_range, layout.service_range)]
        if slot not in used and not any(a.overlaps(b) for a in ranges for b in networks if a.version == b.version):
            return slot
    raise LayoutError(
        f"no free address range among 10.100.0.0/16 to 10.{99 + SLOTS}.0.0/16; "
        "stop a cluster with `hack/cluster/down --name NAME`"
    )


@dataclass(frozen=True)
class State:
    """A cluster's stored state in `state.json`; everything else derives from it."""

    layout: Layout
    nodes: tuple[int, ...]

    def to_json(self) -> str:
        return (
            json.dumps({"name": self.layout.name, "slot": self.layout.slot, "nodes": list(self.nodes)}, indent=2) + "\n"
        )


def parse_state(text: str) -> State:
    """Parses `state.json`. Raises LayoutError, whose text says what is wrong."""
    try:
        value = json.loads(text)
        nodes = tuple(int(index) for index in value["nodes"])
        return State(Layout(str(value["name"]), int(value["slot"])), nodes)
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError(
            f"state.json cannot be read ({error!r}); `hack/cluster/down --name NAME` removes it"
        ) from error
