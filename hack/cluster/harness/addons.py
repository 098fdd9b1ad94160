"""Optional additions of a cluster, for the tests that need them."""

import contextlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import build, cluster, components, images, nodes
from .api import Api, ApiError
from .archives import write_archive
from .cluster import Say
from .layout import Layout, State
from .recipes import AGENT_SANDBOX, CONTOUR, ENDPOINT_PICKER

LWS_IMAGE, LWS_NAMESPACE = "localhost/lws:1", "lws-system"
SANDBOX_IMAGE, SANDBOX_NAMESPACE = "localhost/agent-sandbox:1", "agent-sandbox-system"
# As its own documentation recommends for many sandboxes at once.
SANDBOX_WORKERS = {
    "sandboxConcurrentWorkers": 1000,
    "sandboxClaimConcurrentWorkers": 1000,
    "sandboxWarmPoolConcurrentWorkers": 100,
    "sandboxTemplateConcurrentWorkers": 1000,
    "sandboxWarmPoolMaxBatchSize": 1000,
}
# They spare writes, memory and waiting.
SANDBOX_FLAGS = (
    "--disable-claim-events",
    "--disable-claim-observability-annotations",
    "--cache-label-selectors",
    "--separate-watch-connection",
    "--api-connections=4",
)
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
    # The chart runs the program at this path.
    _load(state, LWS_IMAGE, "/manager", programs / "lws")
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
    _install(layout, "lws", chart, LWS_NAMESPACE, settings)
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
    _uninstall(layout, "lws", LWS_NAMESPACE)


def _start_agent_sandbox(state: State, say: Say) -> None:
    layout, program = state.layout, build.build_one(AGENT_SANDBOX.name, say)
    _load(state, SANDBOX_IMAGE, "/agent-sandbox-controller", program)
    repository, _, tag = SANDBOX_IMAGE.rpartition(":")
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "namespace.create": False,
        "controller.extensions": True,
        # One replica needs no election, and loses its lease when the machine is busy.
        "controller.leaderElect": False,
        "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}},
        **{f"controller.{name}": number for name, number in SANDBOX_WORKERS.items()},
        "controller.extraArgs": list(SANDBOX_FLAGS),
    }
    chart = _sandbox_chart()
    _kubectl(layout, "apply", "--server-side", "--force-conflicts", "-f", str(chart / "crds"))
    settings = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    _install(layout, "agent-sandbox", str(chart), SANDBOX_NAMESPACE, ["--skip-crds", *settings])
    # The probe's limit of a second restarts the controller when the machine is busy.
    probe = [{"op": "remove", "path": "/spec/template/spec/containers/0/livenessProbe"}]
    deployment = ("deployment/agent-sandbox-controller", "-n", SANDBOX_NAMESPACE)
    _kubectl(layout, "patch", *deployment, "--type=json", "-p", json.dumps(probe))
    _kubectl(layout, "rollout", "status", *deployment, "--timeout=3m")


def _stop_agent_sandbox(layout: Layout) -> None:
    chart = _sandbox_chart()
    if chart.exists():
        # While the controller runs, which removes the finalizers of its objects.
        _kubectl(layout, "delete", "-f", str(chart / "crds"), "--ignore-not-found", "--wait=true", "--timeout=3m")
    _uninstall(layout, "agent-sandbox", SANDBOX_NAMESPACE)


def _sandbox_chart() -> Path:
    return build.CACHE / AGENT_SANDBOX.folder / "share" / AGENT_SANDBOX.name / "helm"


def _load(state: State, image: str, target: str, program: Path) -> None:
    """Loads an image into all nodes that has only a program, at the path `target`."""
    layout, programs = state.layout, build.programs_folder()
    archive = layout.state / "addon.tar"
    write_archive(archive, image, {target: program})
    for index in state.nodes:
        images.load(layout.node(index), programs, archive)
    archive.unlink()


def _install(layout: Layout, release: str, chart: str, namespace: str, settings: list[str]) -> None:
    options = ["--create-namespace", "--wait", "--timeout=3m", *settings]
    _helm(layout, namespace, "upgrade", "--install", release, chart, *options)


def _uninstall(layout: Layout, release: str, namespace: str) -> None:
    _helm(layout, namespace, "uninstall", release, "--ignore-not-found", "--wait", "--timeout=3m")
    with contextlib.suppress(ApiError):
        cluster.admin(layout).request("DELETE", f"/api/v1/namespaces/{namespace}")


def _helm(layout: Layout, namespace: str, *arguments: str) -> None:
    place = [f"--kubeconfig={layout.kubeconfig}", f"--namespace={namespace}"]
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
    "agent-sandbox": Addon(_start_agent_sandbox, _stop_agent_sandbox),
}
