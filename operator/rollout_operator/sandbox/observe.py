"""The state of one Sandbox, read from the operator's cache and memory. No I/O."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from rollout_api.cluster import EXECUTOR_ANNOTATION, PARKING_ANNOTATION, POD_ANNOTATION, by_hand_name
from rollout_api.on_cluster.nodes import NodeCounts
from rollout_api.on_cluster.objects import EXCESS, Manifest
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.sandbox import SandboxSpec, SandboxStatus, Security, WorkspaceMode
from rollout_operator.actions import Fact, Ref
from rollout_operator.cache import controller_of, read_as, uid_of
from rollout_operator.conditions import end_of_job, parse_time
from rollout_operator.executor_contact import ExecutorReport
from rollout_operator.sandbox.reasons import waiting_for
from rollout_operator.sandbox.validate import Owner, parse_spec
from rollout_operator.world import World

VARIANTS = tuple((mode, volume) for mode in (WorkspaceMode.OVERLAY, WorkspaceMode.PLAIN) for volume in (True, False))
Variant = tuple[WorkspaceMode, bool]
"""How a pod is created: its mode, and whether it mounts the executor as an image volume."""


GONE = "gone"
"""Marks a Sandbox whose owner was deleted."""


def overlay_refused(namespace: str) -> Fact:
    """Return the fact that a namespace admits Plain pods but no Overlay pods."""
    return ("overlay-refused", namespace)


def image_volumes_refused(namespace: str) -> Fact:
    """Return the fact that pods with image volumes are refused. A tenant can fake it, by changing a template between two
    tries, so the fact applies only to that namespace.
    """
    return ("image-volumes-refused", namespace)


def trial_failed_on(namespace: str, image: str) -> Fact:
    """Return the fact that an Overlay trial of an image failed on a node. Its message is the name of the node.

    A tenant can fake such a failure, so the fact applies only to that namespace and image.
    """
    return ("trial-failed-on", namespace, image)


def trials_fail(namespace: str, image: str) -> Fact:
    """Return the fact that Overlay trials of an image failed on two nodes, or on the only node."""
    return ("trials-fail", namespace, image)


def exec_failed(namespace: str) -> Fact:
    """Return the fact that the executor could not be executed from its image volume in a namespace."""
    return ("exec-failed", namespace)


def pod_refused(sandbox_uid: str, variant: Variant) -> Fact:
    """Return the fact that the API server refused this variant of a Sandbox's pod."""
    mode, image_volume = variant
    return ("pod-refused", sandbox_uid, mode.value, "ImageVolume" if image_volume else "InitContainer")


def restoring_pauses(sandbox_uid: str) -> Fact:
    """Return the fact that a pod of a parked Sandbox has just failed, so that the next one is not created yet."""
    return ("restoring-pauses", sandbox_uid)


NO_POD_AFTER = timedelta(seconds=10)
"""Time after which a Job without a pod needs attention."""
CONTAINER = "parking"
"""Name of the container of a Job that stores the files of a Sandbox, or brings them back."""


@dataclass(frozen=True)
class ParkingJob:
    """A Job that stores the files of a Sandbox, or brings them back."""

    name: str
    uid: str
    pod_uid: str | None
    """The pod of the Sandbox for which it was created."""
    parking: str | None
    """The number of the parking for which it was created."""
    state: Literal["Running", "Succeeded", "Failed"]
    message: str
    """The last words of its newest pod that has ended; of one that succeeded, if the Job has. Empty if none can be read."""
    has_begun: bool
    """Whether a pod of it has run."""
    problem: str
    """Why it has not begun, if that will not end by itself soon. Empty if nothing is known."""


@dataclass(frozen=True)
class Observed:
    """All inputs of `plan`."""

    name: str
    namespace: str
    uid: str
    version: str
    """Its `resourceVersion`."""
    generation: int | None
    created: datetime
    is_deleted: bool
    """Whether the Sandbox or its owner is being deleted. Garbage collection then deletes its objects."""
    spec: SandboxSpec | list[str]
    """The spec, or its problems."""
    status: SandboxStatus
    owner: Owner | None
    """None for a Sandbox that a person created."""
    keep: bool
    """Whether to keep the Sandbox after it has finished (`whenFinished: Retain`)."""
    pod: Manifest | None
    node: Manifest | None
    """Node of its current or former pod."""
    nodes: NodeCounts
    trial_failed_on: str | None
    """Node on which an Overlay trial of its namespace and image failed before."""
    trial_failure: str | None
    """The executor's message when Overlay trials of its namespace and image failed on more than one node."""
    exec_failure: str | None
    """The runtime's message when the executor's image volume could not be executed in its namespace."""
    refusals: Mapping[Variant, str]
    """The API server's messages when it refused the pod."""
    overlay_refusal: str | None
    """The API server's message when it refused Overlay in the namespace."""
    image_volumes_refusal: str | None
    """The API server's message when it refused image volumes anywhere."""
    key: str | None
    policies: frozenset[str]
    """Names of its owner's existing NetworkPolicies."""
    jobs: tuple[ParkingJob, ...]
    """Its Jobs for parking that are not being deleted."""
    restoring_pauses: bool
    report: ExecutorReport | None
    """The last answer of its executor; None unless it is parked when idle."""
    last_error: str | None
    config: OperatorConfig
    now: datetime

    @property
    def owner_uid(self) -> str:
        """Uid of the owner of its key and NetworkPolicy."""
        return self.owner.uid if self.owner else self.uid

    @property
    def key_secret(self) -> Ref:
        return Ref("Secret", self.namespace, self.owner.secret_name if self.owner else by_hand_name(self.name))


def observe(world: World, sandbox: Manifest) -> Observed:
    """Return the state of an existing Sandbox."""
    metadata, cache = sandbox["metadata"], world.cache
    name, namespace, uid = metadata["name"], metadata["namespace"], uid_of(sandbox)
    owner = _owner_of(world, sandbox)
    status = read_as(SandboxStatus, sandbox.get("status")) or SandboxStatus()
    pod = cache.get("Pod", namespace, name)
    if pod is not None and (controller_of(pod) or {}).get("uid") != uid:
        pod = None
    node_name = pod["spec"].get("nodeName") if pod else status.node_name
    node = cache.get("Node", "", node_name) if node_name else None
    image = str((sandbox.get("spec") or {}).get("image"))
    owner_uid = owner.uid if isinstance(owner, Owner) else uid
    refused = {variant: world.recall(pod_refused(uid, variant)) for variant in VARIANTS}
    return Observed(
        name=name,
        namespace=namespace,
        uid=uid,
        version=metadata["resourceVersion"],
        generation=metadata.get("generation"),
        created=parse_time(metadata["creationTimestamp"]),
        is_deleted="deletionTimestamp" in metadata or owner == GONE,
        spec=[f"spec: {why}"] if (why := sandbox.get(EXCESS)) else parse_spec(sandbox.get("spec") or {}),
        status=status,
        owner=owner if isinstance(owner, Owner) else None,
        keep=(sandbox.get("spec") or {}).get("whenFinished") == "Retain",
        pod=pod,
        node=node,
        nodes=cache.nodes,
        trial_failed_on=world.recall(trial_failed_on(namespace, image)),
        trial_failure=world.recall(trials_fail(namespace, image)),
        exec_failure=world.recall(exec_failed(namespace)),
        refusals={variant: words for variant, words in refused.items() if words is not None},
        overlay_refusal=world.recall(overlay_refused(namespace)),
        image_volumes_refusal=world.recall(image_volumes_refused(namespace)),
        key=world.keys.get(owner_uid),
        policies=frozenset(policy["metadata"]["name"] for policy in cache.owned("NetworkPolicy", namespace, owner_uid)),
        jobs=tuple(_parking_jobs(world, namespace, uid)),
        restoring_pauses=world.recall(restoring_pauses(uid)) is not None,
        report=world.executors.get(uid),
        last_error=world.last_error,
        config=world.config,
        now=world.now,
    )


def _parking_jobs(world: World, namespace: str, uid: str) -> Iterator[ParkingJob]:
    for job in world.cache.owned("Job", namespace, uid):
        if "deletionTimestamp" in job["metadata"]:
            continue
        succeeded, failed = end_of_job(job)
        pods = list(world.cache.owned("Pod", namespace, uid_of(job)))
        states = [
            container.get("state", {})
            for pod in pods
            for container in pod["status"].get("containerStatuses", ())
            # Webhooks may add others.
            if container["name"] == CONTAINER
        ]
        ended = [state["terminated"] for state in states if "terminated" in state]
        waits = [waiting_for(pod, world.now, CONTAINER) for pod in pods]
        problems = [f"{wait.reason}: {wait.message}" for wait in waits if wait.is_problem]
        if not pods and world.now - parse_time(job["metadata"]["creationTimestamp"]) >= NO_POD_AFTER:
            problems = ["it has no pod, for example because a quota refuses it; its Events say why"]
        if succeeded:
            ended = [state for state in ended if state.get("exitCode") == 0]
        last: Mapping[str, Any] = max(ended, key=lambda state: str(state.get("finishedAt")), default={})
        annotations = job["metadata"].get("annotations") or {}
        yield ParkingJob(
            name=job["metadata"]["name"],
            uid=uid_of(job),
            pod_uid=annotations.get(POD_ANNOTATION),
            parking=annotations.get(PARKING_ANNOTATION),
            state="Succeeded" if succeeded else "Failed" if failed else "Running",
            message=str(last.get("message") or (failed or {}).get("message") or "").strip(),
            has_begun=bool((job.get("status") or {}).get("failed"))
            or any(not {"running", "terminated"}.isdisjoint(state) for state in states),
            problem="; ".join(problems),
        )


def _owner_of(world: World, sandbox: Manifest) -> Owner | str | None:
    """Return its RolloutJob or SandboxPool; GONE if that was deleted; None if it has none."""
    reference = controller_of(sandbox)
    if reference is None or reference["kind"] not in ("RolloutJob", "SandboxPool"):
        return None
    kind, namespace = reference["kind"], sandbox["metadata"]["namespace"]
    owner = world.cache.get(kind, namespace, reference["name"])
    if owner is None or uid_of(owner) != reference["uid"] or "deletionTimestamp" in owner["metadata"]:
        return GONE
    spec: Mapping[str, Any] = owner["spec"]
    template: Mapping[str, Any] = spec.get("sandbox") or {}
    # A pool's sandboxes have the operator's own executor, and are replaced with it.
    runners = next(iter(world.cache.owned("Job", namespace, reference["uid"])), None)
    annotations = {} if runners is None else runners["metadata"].get("annotations") or {}
    return Owner(
        kind=kind,
        name=reference["name"],
        uid=reference["uid"],
        pod_template=template.get("podTemplate") or {},
        security=Security((template if kind == "SandboxPool" else spec).get("security", Security.STANDARD)),
        executor_image=annotations.get(EXECUTOR_ANNOTATION),
    )
