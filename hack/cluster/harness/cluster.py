"""Starts, stops and describes a whole cluster."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import build, certificates, components, configs, images, nodes
from .api import Api, ApiError
from .archives import write_archive
from .layout import (
    INTERNET,
    INTERNET_NAME,
    MAX_NODES,
    S3_ACCESS_KEY,
    S3_BUCKET,
    S3_SECRET_KEY,
    STATE,
    Layout,
    LayoutError,
    Node,
    State,
    choose_slot,
    parse_state,
)

Say = Callable[[str], None]


class ClusterError(Exception):
    """A cluster could not be started or used; the text has the reason and a remedy."""


def up(name: str, node_count: int, say: Say) -> Layout:
    """Starts a cluster, unless a healthy one of that name runs. Raises ClusterError, BuildError, LayoutError and
    NodeError.
    """
    if os.geteuid() != 0:
        raise ClusterError("the cluster needs root (namespaces, mounts, nftables); run this with sudo")
    programs = build.build_all(say)
    with _lock():
        state = read_state(name)
        if state is not None and is_healthy(state):
            say(f"cluster {name} is already running")
        else:
            if (STATE / name).exists():
                say(f"removing the remains of cluster {name}")
                _clear(name)
            taken = [other.layout.slot for other in all_states()]
            state = State(Layout(name, choose_slot(taken, nodes.routes())), (0,))
            try:
                _start(state, programs, say)
            except BaseException:
                say(f"the start failed; logs: {state.layout.state / 'logs'}")
                raise
        while len(state.nodes) < node_count:
            state = _add_node(state, programs, say)
    return state.layout


def down(name: str, say: Say) -> None:
    """Stops a cluster and removes all of it. Raises NodeError."""
    if not STATE.exists():
        return
    with _lock():
        started = time.monotonic()
        if (STATE / name).exists():
            _clear(name)
            say(f"cluster {name} was removed in {time.monotonic() - started:.1f} s")


def add_node(name: str, say: Say) -> Node:
    """Adds a node to a running cluster. Raises ClusterError, LayoutError and NodeError."""
    programs = build.build_all(say)
    with _lock():
        state = _add_node(existing(name), programs, say)
    return state.layout.node(state.nodes[-1])


def kill_node(name: str, index: int) -> None:
    """Kills a node with all its processes, like a power failure. Kubernetes keeps its Node object until it is deleted.

    Raises ClusterError and NodeError.
    """
    with _lock():
        state = existing(name)
        if index == 0 or index not in state.nodes:
            expected = ", ".join(str(other) for other in state.nodes if other) or "none: add one first"
            raise ClusterError(
                f"node {index} cannot be killed; expected one of {expected} (node 0 is the control plane)"
            )
        node = state.layout.node(index)
        nodes.kill(node)
        nodes.remove(node)
        shutil.rmtree(node.state)
        _write_state(State(state.layout, tuple(other for other in state.nodes if other != index)))


def existing(name: str) -> State:
    """Returns the state of a started cluster. Raises ClusterError if there is none."""
    state = read_state(name)
    if state is None:
        raise ClusterError(f"there is no cluster {name!r}; start it with `hack/cluster/up --name {name}`")
    return state


def read_state(name: str) -> State | None:
    """Returns a cluster's stored state; None if there is none, or if a start was interrupted before it was written."""
    with contextlib.suppress(FileNotFoundError, LayoutError):
        return parse_state((STATE / name / "state.json").read_text())
    return None


def all_states() -> list[State]:
    found = (read_state(folder.name) for folder in sorted(STATE.iterdir()) if folder.is_dir()) if STATE.exists() else ()
    return [state for state in found if state is not None]


def is_healthy(state: State) -> bool:
    """Whether every component of every node runs and the API server is ready."""
    for index in state.nodes:
        node = state.layout.node(index)
        if not nodes.is_up(node) or None in nodes.running(node).values():
            return False
    if not (state.layout.state / "started").exists():
        return False
    try:
        return bool(admin(state.layout).request("GET", "/readyz", seconds=5) == "ok")
    except (OSError, ApiError):
        return False


def admin(layout: Layout) -> Api:
    return Api(layout.server, layout.state / "pki", "admin")


def describe(name: str) -> dict[str, Any]:
    """Returns everything that a test needs to know about a cluster, for `status --json`."""
    state = read_state(name)
    if state is None:
        return {"name": name, "healthy": False}
    layout = state.layout
    return {
        "name": name,
        "healthy": is_healthy(state),
        "kubeconfig": str(layout.kubeconfig),
        "server": layout.server,
        "auditLog": str(layout.audit_log),
        "logs": str(layout.state / "logs"),
        "bin": str(build.programs_folder()),
        "s3": {
            "endpoint": layout.s3_endpoint,
            "bucket": S3_BUCKET,
            "accessKey": S3_ACCESS_KEY,
            "secretKey": S3_SECRET_KEY,
            "folder": str(layout.state / "s3"),
        },
        "hostAddress": layout.host,
        "internet": {"address": INTERNET, "name": INTERNET_NAME},
        "podRange": layout.pod_range,
        "serviceRange": layout.service_range,
        "nodes": [
            {
                "name": layout.node(index).name,
                "index": index,
                "address": layout.node(index).address,
                "components": nodes.running(layout.node(index)),
            }
            for index in state.nodes
        ],
    }


def _start(state: State, programs: Path, say: Say) -> None:
    layout = state.layout
    with _timed("certificates, configuration, namespaces", say):
        _write_state(state)
        _write_control_plane_files(layout)
        first = layout.node(0)
        _make_node(first)
        _prepare(first, programs)
        # Bound to the state folder: versitygw keeps a bucket as a folder.
        (layout.state / "s3" / S3_BUCKET).mkdir(parents=True)
    api = admin(layout)
    with _timed("etcd, API server, S3, containerd", say):
        etcd, apiserver, *managers, s3 = components.control_plane(layout, programs)
        container_runtime, *rest = components.node_components(first, programs)
        for component in (etcd, apiserver, container_runtime, s3):
            nodes.start(first, component)
        _load_own_images(first, programs)
        wait("the API server", lambda: api.request("GET", "/readyz") == "ok", nodes.log_file(first, "apiserver"))
    with _timed("controllers, scheduler, kubelet, kube-proxy, network policies", say):
        for component in (*managers, *rest):
            nodes.start(first, component)
        for manifest in configs.cluster_objects(layout):
            api.apply(manifest)
        _wait_for_node(api, first)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        log = nodes.log_file(first, "controller-manager")
        wait("the first service account", lambda: bool(api.request("GET", account)), log)
    with _timed("DNS", say):
        deployment = "/apis/apps/v1/namespaces/kube-system/deployments/coredns"
        ready = lambda: api.request("GET", deployment)["status"].get("readyReplicas") == 1  # noqa: E731
        wait("CoreDNS", ready, nodes.log_file(first, "kubelet"))
    (layout.state / "started").touch()


def _add_node(state: State, programs: Path, say: Say) -> State:
    free = [index for index in range(MAX_NODES) if index not in state.nodes]
    if not free:
        raise ClusterError(f"cluster {state.layout.name} has {MAX_NODES} nodes; that is the maximum")
    node = state.layout.node(free[0])
    with _timed(f"node {node.name}", say):
        _make_node(node)
        state = State(state.layout, (*state.nodes, node.index))
        _write_state(state)
        _prepare(node, programs)
        container_runtime, *rest = components.node_components(node, programs)
        nodes.start(node, container_runtime)
        _wait_for_containerd(node, programs)
        images.copy(state.layout.node(0), node, programs)
        for component in rest:
            nodes.start(node, component)
        _wait_for_node(admin(state.layout), node)
    return state


def _write_control_plane_files(layout: Layout) -> None:
    pki, config = layout.state / "pki", layout.state / "config"
    certificates.make_authority(pki)
    for identity in certificates.control_plane_identities(layout):
        certificates.sign(pki, identity)
    config.mkdir()
    (layout.state / "logs").mkdir(exist_ok=True)
    (config / "audit.json").write_text(configs.audit_policy())
    for user in ("controller-manager", "scheduler", "kube-proxy", "kwok"):
        (config / f"{user}.kubeconfig").write_text(configs.kubeconfig(layout, user))
    layout.kubeconfig.write_text(configs.kubeconfig(layout, "admin"))


def _make_node(node: Node) -> None:
    layout = node.cluster
    identity = certificates.node_identity(node)
    certificates.sign(layout.state / "pki", identity)
    (layout.state / "config" / f"{identity.file}.kubeconfig").write_text(configs.kubeconfig(layout, identity.file))
    (node.state / "cni").mkdir(parents=True)


def _prepare(node: Node, programs: Path) -> None:
    for file, text in (
        ("containerd.toml", configs.containerd(node, programs)),
        ("cni/pods.conflist", configs.cni(node)),
        ("kubelet.json", configs.kubelet(node)),
        ("kube-proxy.json", configs.kube_proxy(node)),
        ("resolv.conf", configs.resolv_conf(node)),
    ):
        (node.state / file).write_text(text)
    nodes.create(node, programs)
    nodes.connect(node)


def _load_own_images(node: Node, programs: Path) -> None:
    _wait_for_containerd(node, programs)
    for program, reference in (("pause", configs.PAUSE_IMAGE), ("coredns", configs.COREDNS_IMAGE)):
        archive = node.state / f"{program}.tar"
        write_archive(archive, reference, {f"/{program}": programs / program})
        images.load(node, programs, archive)
        archive.unlink()


def _wait_for_containerd(node: Node, programs: Path) -> None:
    def answers() -> bool:
        try:
            images.names(node, programs)
        except nodes.NodeError:
            return False
        return True

    wait("containerd", answers, nodes.log_file(node, "containerd"))


def _wait_for_node(api: Api, node: Node) -> None:
    def is_ready() -> bool:
        found = api.request("GET", f"/api/v1/nodes/{node.name}")
        taints = [taint["key"] for taint in found["spec"].get("taints", [])]
        ready = [c["status"] for c in found["status"].get("conditions", []) if c["type"] == "Ready"]
        return ready == ["True"] and "node.kubernetes.io/not-ready" not in taints

    wait(f"node {node.name}", is_ready, nodes.log_file(node, "kubelet"))


def wait(what: str, is_there: Callable[[], bool], log: Path, seconds: float = 90) -> None:
    """Waits until a condition holds. Raises ClusterError with the end of the relevant log."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, ApiError):
            if is_there():
                return
        if time.monotonic() > deadline:
            lines = log.read_text(errors="replace").splitlines()[-10:] if log.exists() else ["(no log)"]
            tail = "\n".join(line[:300] for line in lines)
            raise ClusterError(f"{what} was not ready after {seconds:.0f} s; the end of {log}:\n{tail}")
        time.sleep(0.1)


def _clear(name: str) -> None:
    state = read_state(name)
    if state is not None:
        # Every possible number, because an interrupted start has not stored all its nodes.
        for index in reversed(range(MAX_NODES)):
            node = state.layout.node(index)
            nodes.kill(node)
            nodes.remove(node)
    shutil.rmtree(STATE / name)


def _write_state(state: State) -> None:
    folder = state.layout.state
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json.new").write_text(state.to_json())
    (folder / "state.json.new").rename(folder / "state.json")


@contextlib.contextmanager
def _timed(what: str, say: Say) -> Iterator[None]:
    started = time.monotonic()
    yield
    say(f"{time.monotonic() - started:5.1f} s  {what}")


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    # One start or stop at a time on a machine, so that two clusters never choose the same slot.
    STATE.mkdir(parents=True, exist_ok=True)
    folder = os.open(STATE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
