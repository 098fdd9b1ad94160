"""Nodes as namespaces of the host: each has its own mounts, process ids and network, kept open by one process.

When that process is killed, the kernel kills all processes of the node, pods included, and removes mounts and links.
"""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

from . import enter, processes
from .components import Component
from .layout import INTERNET, Node

CGROUPS = Path("/sys/fs/cgroup")
# Folders that Kubernetes, containerd and CNI cannot relocate, and the node's own folder for each.
FOLDERS = ("/var/lib/containerd", "/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers")


class NodeError(Exception):
    """A node could not be created or used; the text says what failed."""


def create(node: Node, programs: Path) -> None:
    """Creates the namespaces and cgroups of a node, without a network. Raises NodeError."""
    for place in (*map(Path, FOLDERS), *(_node_folder(node, folder) for folder in FOLDERS), *_cgroup_folders(node)):
        place.mkdir(parents=True, exist_ok=True)
    pid = enter.start(None, [str(programs / "pause"), f"node {node.name}"], node.state / "init.log")
    processes.save(processes.current(pid), _init_file(node))
    mounts = [
        "mount --make-rprivate /",
        "mount -t proc proc /proc",
        "mount -t tmpfs -o mode=755 tmpfs /run",
        *(f"mount --bind {_node_folder(node, folder)} {folder}" for folder in FOLDERS),
        "mount --make-rshared /",
    ]
    network = [
        "ip link set lo up",
        # A bridge without its own MAC address changes it with its ports, and peers' ARP entries become stale.
        f"ip link add pods address {_mac(node)} type bridge",
        f"ip address add {node.address}/22 dev pods",
        "ip link set pods up",
        "sysctl -qw net.ipv4.ip_forward=1",
        # So that policies also apply between pods of one bridge.
        "sysctl -qw net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1",
    ]
    run_in(node, ["sh", "-ec", "\n".join(mounts + network)])


def connect(node: Node) -> None:
    """Links the first node to this machine, or another one to the first. Raises NodeError."""
    layout = node.cluster
    if node.index == 0:
        ends = (layout.link, "host", layout.host)
        _run(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", str(_init(node).pid)])
        _run(["ip", "address", "add", f"{layout.host}/32", "dev", layout.link])
        _run(["ip", "address", "add", f"{INTERNET}/32", "dev", layout.link])
        _run(["ip", "link", "set", layout.link, "up"])
        for destination in (layout.pod_range, layout.service_range):
            via = ["via", node.address, "dev", layout.link, "onlink", "src", layout.host]
            _run(["ip", "route", "add", destination, *via])
        _set_uplink(node, "host", layout.host)
    else:
        first = layout.node(0)
        on_first = ["nsenter", "--target", str(_init(first).pid), "--net", "--"]
        peer = ["peer", "name", "uplink", "netns", str(_init(node).pid)]
        _run([*on_first, "ip", "link", "add", node.link, "type", "veth", *peer])
        _run([*on_first, "ip", "link", "set", node.link, "up"])
        _run([*on_first, "ip", "route", "add", node.pod_range, "via", node.address, "dev", node.link, "onlink"])
        _set_uplink(node, "uplink", first.address)


def start(node: Node, component: Component) -> None:
    """Starts a component unless it runs. Raises NodeError if the node does not run."""
    if is_running(node, component.name):
        return
    log = log_file(node, component.name)
    pid = enter.start(_init(node).pid, list(component.argv), log, dict(component.environ) or None)
    processes.save(processes.current(pid), _process_file(node, component.name))


def stop(node: Node, component: str, number: signal.Signals = signal.SIGTERM) -> None:
    """Ends a component, if it runs, and waits for its end."""
    if (process := processes.running(_process_file(node, component))) is not None:
        processes.stop(process, number, grace_seconds=20)


def forget(node: Node, component: str) -> None:
    """Ends a component, and no longer counts it when the cluster's health is checked."""
    stop(node, component)
    _process_file(node, component).unlink(missing_ok=True)


def is_running(node: Node, component: str) -> bool:
    """Whether the component is alive."""
    return processes.running(_process_file(node, component)) is not None


def running(node: Node) -> dict[str, int | None]:
    """Returns the process id of each component ever started on the node, None for a dead one."""
    files = sorted((node.state / "processes").glob("*.json"))
    alive = {file.stem: processes.running(file) for file in files}
    return {component: None if process is None else process.pid for component, process in alive.items()}


def is_up(node: Node) -> bool:
    return processes.running(_init_file(node)) is not None


def kill(node: Node) -> None:
    """Kills all processes of the node at once, like a power failure; its folder is kept."""
    if (process := processes.running(_init_file(node))) is not None:
        processes.stop(process, signal.SIGKILL, grace_seconds=20)


def remove(node: Node) -> None:
    """Removes the remains of a killed node: its link and its cgroups. Raises NodeError."""
    if node.index == 0:
        subprocess.run(["ip", "link", "delete", node.cluster.link], capture_output=True, check=False)
    elif is_up(node.cluster.node(0)):
        first = str(_init(node.cluster.node(0)).pid)
        command = ["nsenter", "--target", first, "--net", "--", "ip", "link", "delete", node.link]
        subprocess.run(command, capture_output=True, check=False)
    for folder in _cgroup_folders(node):
        # The deepest first; a cgroup can be removed when the last of its processes has been reaped.
        for cgroup in sorted((p for p in folder.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts)):
            _remove_cgroup(cgroup)
        _remove_cgroup(folder)


def command_in(node: Node, argv: list[str]) -> list[str]:
    """Returns the command that runs `argv` on the node. Raises NodeError if the node does not exist."""
    return ["nsenter", "--target", str(_init(node).pid), "--mount", "--pid", "--net", "--", *argv]


def run_in(node: Node, argv: list[str], stdin: IO[bytes] | None = None) -> str:
    """Runs a command on the node; returns its output. Raises NodeError."""
    return _run(command_in(node, argv), stdin)


def log_file(node: Node, component: str) -> Path:
    return node.cluster.state / "logs" / f"{component}-{node.index}.log"


def routes() -> list[str]:
    return [str(route["dst"]) for route in json.loads(_run(["ip", "-json", "route"]) or "[]")]


def _set_uplink(node: Node, link: str, gateway: str) -> None:
    run_in(node, ["ip", "link", "set", link, "up"])
    run_in(node, ["ip", "route", "add", "default", "via", gateway, "dev", link, "onlink", "src", node.address])


def _node_folder(node: Node, folder: str) -> Path:
    return node.state / folder.strip("/").replace("/", "-")


def _mac(node: Node) -> str:
    # 02 marks a locally administered MAC address.
    return f"02:00:00:00:{node.cluster.slot:02x}:{node.index:02x}"


def _cgroup_folders(node: Node) -> list[Path]:
    if (CGROUPS / "cgroup.controllers").exists():  # version 2: one hierarchy
        return [CGROUPS / node.cgroup.lstrip("/")]
    hierarchies = {folder.resolve() for folder in CGROUPS.iterdir() if folder.is_dir()}
    return [folder / node.cgroup.lstrip("/") for folder in sorted(hierarchies)]


def _remove_cgroup(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while folder.exists():
        try:
            folder.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise NodeError(
                    f"cgroup {folder} could not be removed ({error}); something still runs in it"
                ) from error
            time.sleep(0.02)


def _init_file(node: Node) -> Path:
    return node.state / "init.json"


def _process_file(node: Node, component: str) -> Path:
    return node.state / "processes" / f"{component}.json"


def _init(node: Node) -> processes.Process:
    process = processes.running(_init_file(node))
    if process is None:
        raise NodeError(f"node {node.name} does not run; start it with `hack/cluster/up --name {node.cluster.name}`")
    return process


def _run(argv: list[str], stdin: IO[bytes] | None = None) -> str:
    done = subprocess.run(argv, stdin=stdin or subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()[-2000:]
        raise NodeError(f"`{' '.join(argv)}` failed with exit code {done.returncode}: {words}")
    return done.stdout.decode(errors="replace")
