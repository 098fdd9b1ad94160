"""The state that the plan of a ModelServer needs, read from the operator's cache. No I/O."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollout_api.cluster import MODEL_CONTROL_PORT, MODEL_PORT, MODEL_SERVER_UID_LABEL, POLICY_LOADED
from rollout_api.conditions import true_conditions
from rollout_api.model_server import ModelServer, ModelServerStatus, Policy, PolicySource
from rollout_api.on_cluster.model_server_problems import Parsed, parse
from rollout_api.on_cluster.objects import EXCESS, Manifest
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.rollout_job import RunnerState
from rollout_operator.actions import Fact, Ref
from rollout_operator.cache import controller_of, read_as, reports_of, uid_of, users
from rollout_operator.conditions import end_of_job, start_problem
from rollout_operator.model_server.control import LOAD_SECONDS
from rollout_operator.model_server.objects import (
    OPTIONAL_KINDS,
    REFUSABLE_KINDS,
    WORKLOAD_KINDS,
    api_name,
    claim_name,
    download_name,
)
from rollout_operator.model_server.pod import ENGINE, GATEWAY
from rollout_operator.model_server.policy import load_limit
from rollout_operator.model_server.update_state import AdapterWanted, Runner, Seen
from rollout_operator.server_contact import Server, ServerContact
from rollout_operator.world import World

MOST_SERVERS = 256
"""Upper bound of `spec.replicas`."""
_ENDED = ("Succeeded", "Failed")
_AT_WORK = (RunnerState.RUNNING, RunnerState.DRAINING)


def secret_fact(uid: str) -> Fact:
    """Fact: the Secret of a ModelServer's control ports was checked recently."""
    return ("control-secret-exists", uid)


def refused(uid: str, kind: str) -> Fact:
    """Fact: the API server refused to create the ModelServer's object of that kind."""
    return ("object-refused", f"{uid} {kind}")


@dataclass(frozen=True)
class Download:
    """State of the Job that downloads the model's weights."""

    done: bool
    failed: str | None = None
    """Why the Job failed."""
    trouble: tuple[str, str] | None = None
    """Why its pod does not start, as reason and message."""
    has_pod: bool = False


@dataclass(frozen=True)
class Observed:
    """A ModelServer and all its objects."""

    ref: Ref
    uid: str
    generation: int | None
    is_deleted: bool
    server: Parsed
    is_partial: bool
    """Whether the cache lacks the spec because it is too large."""
    status: ModelServerStatus
    token: str | None = field(repr=False)
    """Token of its control ports; None if the Secret was not read yet."""
    secret_checked: bool
    objects: Mapping[tuple[str, str], Manifest]
    """Objects that the ModelServer controls, by kind and name."""
    download: Download | None
    servers: tuple[Server, ...]
    """Servers in existing pods, by name."""
    start_problems: Mapping[str, tuple[str, str]]
    """Why pods do not start, as reason and message, by name of the pod."""
    runners: tuple[Runner, ...]
    """Active runners that use it."""
    refusals: Mapping[str, str]
    """The API server's messages when it refused to create objects, by kind."""
    config: OperatorConfig
    now: datetime

    def policy(self, server: ModelServer) -> Seen:
        """Return the inputs of a policy update."""
        spec = server.spec
        push, pull = spec.weight_transfer.push, spec.weight_transfer.pull
        return Seen(
            wanted=_source(spec.policy),
            asleep=spec.asleep,
            mode=spec.weight_transfer.mode,
            min_ready=spec.min_ready,
            load_limit=load_limit(push.timeout_seconds if push else pull.timeout_seconds + LOAD_SECONDS),
            status=self.status,
            servers=self.servers,
            runners=self.runners,
            now=self.now,
            adapters={
                name: AdapterWanted(_source(adapter), spec.min_ready_of(adapter))
                for name, adapter in spec.adapters.items()
            },
        )


def _source(policy: Policy) -> PolicySource:
    return PolicySource(version=policy.version, uri=policy.uri, digest=policy.digest)


def observe(world: World, obj: Manifest) -> Observed:
    metadata, uid = obj["metadata"], uid_of(obj)
    ref = Ref.of("ModelServer", obj)
    status = read_as(ModelServerStatus, obj.get("status")) or ModelServerStatus()
    objects = {(kind, found["metadata"]["name"]): found for kind, found in _owned_objects(world, ref, uid)}
    pods = list(_pods(world, ref, uid, max(_replicas(obj), len(status.servers), *map(_replicas, objects.values()))))
    return Observed(
        ref=ref,
        uid=uid,
        generation=metadata.get("generation"),
        is_deleted="deletionTimestamp" in metadata,
        server=parse(obj, world.config.privileged_namespaces),
        is_partial=EXCESS in obj and not obj["spec"],
        status=status,
        token=world.keys.get(uid),
        secret_checked=world.recall(secret_fact(uid)) is not None,
        objects=objects,
        download=_download(world, objects.get(("Job", download_name(ref.name)))),
        servers=tuple(server_of(pod, world.asked) for pod in pods),
        start_problems={
            pod["metadata"]["name"]: found for pod in pods if (found := start_problem(pod.get("status") or {}))
        },
        runners=tuple(_runners(world, ref)),
        refusals={kind: said for kind in REFUSABLE_KINDS if (said := world.recall(refused(uid, kind))) is not None},
        config=world.config,
        now=world.now,
    )


def server_of(pod: Manifest, contacts: Mapping[tuple[str, int], ServerContact]) -> Server:
    """Return the server in a pod with its last report."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    engine = _container(status, "containerStatuses", ENGINE)
    gateway = _container(status, "initContainerStatuses", GATEWAY)
    address = status.get("podIP") or ""
    host = f"[{address}]" if ":" in address else address
    uid, restarts = uid_of(pod), int(engine.get("restartCount", 0))
    return Server(
        **vars(contacts.get((uid, restarts), ServerContact())),
        name=metadata["name"],
        uid=uid,
        restarts=restarts,
        # An address belongs to this pod only. A name could resolve to an earlier pod through a DNS cache.
        url=f"http://{host}:{MODEL_PORT}" if host else "",
        control_url=f"http://{host}:{MODEL_CONTROL_PORT}" if host else "",
        up=bool(host) and bool(engine.get("started")) and _runs(engine) and _runs(gateway),
        leaving="deletionTimestamp" in metadata or status.get("phase") in _ENDED,
        loaded=POLICY_LOADED in true_conditions(status),
    )


def _owned_objects(world: World, ref: Ref, uid: str) -> Iterator[tuple[str, Manifest]]:
    names = {
        **dict.fromkeys((*WORKLOAD_KINDS, *OPTIONAL_KINDS), (ref.name,)),
        "Service": (ref.name, api_name(ref.name)),
        "NetworkPolicy": (ref.name, download_name(ref.name)),
        "PersistentVolumeClaim": (claim_name(ref.name),),
        "Job": (download_name(ref.name),),
    }
    for kind in names:
        for name in names[kind]:
            found = world.cache.get(kind, ref.namespace, name)
            if found is not None and (controller_of(found) or {}).get("uid") == uid:
                yield kind, found


def _pods(world: World, ref: Ref, uid: str, most: int) -> Iterator[Manifest]:
    """Return the serving pods by name. A StatefulSet and a LeaderWorkerSet both name them NAME-0, NAME-1 and so on."""
    for index in range(min(most, MOST_SERVERS)):
        pod = world.cache.get("Pod", ref.namespace, f"{ref.name}-{index}")
        if pod is not None and pod["metadata"].get("labels", {}).get(MODEL_SERVER_UID_LABEL) == uid:
            yield pod


def _replicas(obj: Manifest) -> int:
    return int(obj.get("spec", {}).get("replicas") or 0)


def _download(world: World, job: Manifest | None) -> Download | None:
    if job is None:
        return None
    succeeded, failed = end_of_job(job)
    pods = [pod.get("status") or {} for pod in world.cache.owned("Pod", job["metadata"]["namespace"], uid_of(job))]
    words = "; ".join(dict.fromkeys(word for status in pods if (word := _termination_message(status))))
    return Download(
        done=succeeded is not None,
        failed=None if failed is None else words or failed.get("message", "its pods failed"),
        trouble=next(
            (found for status in pods if status.get("phase") == "Pending" and (found := start_problem(status))), None
        ),
        has_pod=bool(pods),
    )


def _termination_message(status: Mapping[str, Any]) -> str:
    for container in status.get("containerStatuses") or ():
        if ended := container.get("state", {}).get("terminated"):
            return str(ended.get("message") or "").strip()
    return ""


def _runners(world: World, ref: Ref) -> Iterator[Runner]:
    for job in users(ref, world.cache):
        if not true_conditions(job.get("status") or {}).keys().isdisjoint(_ENDED):
            continue
        for report in reports_of(world.cache, ref.namespace, uid_of(job)):
            if report.state in _AT_WORK:
                yield Runner(f"{uid_of(job)}/{report.index}", report.policy_update)


def _container(status: Mapping[str, Any], field: str, name: str) -> Mapping[str, Any]:
    return next((found for found in status.get(field) or () if found["name"] == name), {})


def _runs(container: Mapping[str, Any]) -> bool:
    return "running" in (container.get("state") or {})
