"""Optional additions of a cluster, for the tests that need them."""

import contextlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import build, cluster, components, images, nodes
from .api import Api, ApiError
from .archives import write_archive
from .cluster import Say
from .layout import Layout, State
from .recipes import CONTOUR, ENDPOINT_PICKER

LWS_IMAGE, LWS_NAMESPACE = "localhost/lws:1", "lws-system"
POOLS = "inferencepools.inference.networking.k8s.io"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


class AddonError(Exception):
    """An addition could not be installed or removed; the text says what failed."""


@dataclass(frozen=True)
class Addon:
    """How an addition is installed and removed."""

    start: Callable[[State, Say], None]
    stop: Callable[[Layout], None]


def start(name: str, addon: str, say: Say) -> None:
    """Installs an addition if missing; it works when this returns. Raises AddonError, ClusterError and NodeError."""
    state = cluster.existing(name)
    try:
        ADDONS[addon].start(state, say)
    except BaseException:
        # Incomplete add-ons would make the cluster look unhealthy.
        ADDONS[addon].stop(state.layout)
        raise
    say(f"{addon} is installed")


def stop(name: str, addon: str, say: Say) -> None:
    """Removes an addition and its objects, if installed. Raises AddonError and ClusterError."""
    ADDONS[addon].stop(cluster.existing(name).layout)
    say(f"{addon} is removed")


def _start_devices(state: State, say: Say) -> None:
    layout = state.layout
    for index in state.nodes:
        node = layout.node(index)
        # The driver creates only the parent folder.
        nodes.run_in(node, ["mkdir", "-p", f"/var/lib/kubelet/plugins/{components.DRA_DRIVER_NAME}"])
        nodes.start(node, components.dra_driver(node, build.programs_folder()))
    log = nodes.log_file(layout.node(0), components.DRA_DRIVER)
    cluster.wait("the devices of all nodes", lambda: len(_slices(cluster.admin(layout))) >= len(state.nodes), log)


def _stop_devices(layout: Layout) -> None:
    for index in cluster.existing(layout.name).nodes:
        nodes.forget(layout.node(index), components.DRA_DRIVER)
    api = cluster.admin(layout)
    for found in _slices(api):
        # The kubelet also deletes them, half a minute after their driver has ended.
        with contextlib.suppress(ApiError):
            api.request("DELETE", f"{SLICES}/{found}")


def _slices(api: Api) -> list[str]:
    query = f"fieldSelector=spec.driver={components.DRA_DRIVER_NAME}"
    return [item["metadata"]["name"] for item in api.request("GET", f"{SLICES}?{query}")["items"]]


def _start_lws(state: State, say: Say) -> None:
    layout, programs = state.layout, build.programs_folder()
    archive = layout.state / "lws.tar"
    # The chart runs the program at this path.
    write_archive(archive, LWS_IMAGE, {"/manager": programs / "lws"})
    for index in state.nodes:
        images.load(layout.node(index), programs, archive)
    archive.unlink()
    repository, _, tag = LWS_IMAGE.rpartition(":")
    values = {
        "image.manager.repository": repository,
        "image.manager.tag": tag,
        "image.manager.pullPolicy": "IfNotPresent",
        # The image names no user, and the chart refuses root.
        "podSecurityContext.runAsUser": "65532",
        "resources.requests.cpu": "50m",
        "resources.requests.memory": "64Mi",
    }
    settings = [f"--set={key}={value}" for key, value in values.items()]
    chart = str(build.share_folder() / "lws" / "lws")
    _helm(layout, "upgrade", "--install", "lws", chart, "--create-namespace", "--wait", "--timeout=3m", *settings)
    log = nodes.log_file(layout.node(0), "kubelet")
    # Its pod is ready before the webhooks' certificate exists.
    cluster.wait("LeaderWorkerSet's webhook", lambda: _accepts_sets(cluster.admin(layout)), log, seconds=180)


def _accepts_sets(api: Api) -> bool:
    pod = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
    body = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "accepted", "namespace": LWS_NAMESPACE},
        "spec": {"leaderWorkerTemplate": {"workerTemplate": pod}},
    }
    path = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{LWS_NAMESPACE}/leaderworkersets"
    return bool(api.request("POST", f"{path}?dryRun=All", body))


def _stop_lws(layout: Layout) -> None:
    _helm(layout, "uninstall", "lws", "--ignore-not-found", "--wait", "--timeout=3m")
    with contextlib.suppress(ApiError):
        cluster.admin(layout).request("DELETE", f"/api/v1/namespaces/{LWS_NAMESPACE}")


def _helm(layout: Layout, *arguments: str) -> None:
    place = [f"--kubeconfig={layout.kubeconfig}", f"--namespace={LWS_NAMESPACE}"]
    _run([str(build.programs_folder() / "helm"), *arguments, *place], f"helm {arguments[0]}")


def _start_pools(state: State, say: Say) -> None:
    program = build.build_one(ENDPOINT_PICKER.name, say)
    _kubectl(state.layout, "apply", "-f", str(program.parent.parent / "share" / ENDPOINT_PICKER.name))
    _kubectl(state.layout, "wait", "--for=condition=Established", "--timeout=60s", f"crd/{POOLS}")


def _stop_pools(layout: Layout) -> None:
    _kubectl(layout, "delete", "crd", POOLS, "--ignore-not-found", "--wait=true")


def _start_contour(state: State, say: Say) -> None:
    program = build.build_one(CONTOUR.name, say)
    _kubectl(state.layout, "apply", "--server-side", "-f", str(_contour_objects()))
    say(f"{program} runs with the ClusterRole contour")


def _stop_contour(layout: Layout) -> None:
    if _contour_objects().exists():
        _kubectl(layout, "delete", "-f", str(_contour_objects()), "--ignore-not-found", "--wait=true")


def _contour_objects() -> Path:
    return build.CACHE / CONTOUR.folder / "share" / CONTOUR.name


def _kubectl(layout: Layout, *arguments: str) -> None:
    command = [str(build.programs_folder() / "kubectl"), f"--kubeconfig={layout.kubeconfig}", *arguments]
    _run(command, f"kubectl {arguments[0]}")


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AddonError(f"{name} failed with exit code {done.returncode}: {done.stderr[-2000:]}")


ADDONS = {
    "devices": Addon(_start_devices, _stop_devices),
    "leader-worker-set": Addon(_start_lws, _stop_lws),
    "inference-pools": Addon(_start_pools, _stop_pools),
    "contour": Addon(_start_contour, _stop_contour),
}
