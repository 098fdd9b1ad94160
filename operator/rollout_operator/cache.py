"""Cache of the objects that the watches delivered, indexed by name, by controller and (pods) by node; and the operator's
writes that the watches have not delivered yet. A plan from a cache without them would repeat them.

Objects are the API server's JSON without the fields that the operator does not read (`prune.py`). They are not copied, so
readers must not change them. `affected_by` returns which objects have to be planned again after a change.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from rollout_api.cluster import JOB_LABEL, MODEL_SERVER_LABEL, ROLE_LABEL, RUNNER_ROLE, own_model_server_name
from rollout_api.on_cluster.nodes import NodeCounts, is_ready
from rollout_api.on_cluster.objects import Manifest
from rollout_api.rollout_job import RunnerReport
from rollout_operator.actions import Ref

K = TypeVar("K", bound=Hashable)

EXPIRY_SECONDS = 30.0
"""Longest wait for a write. It is longer than a watch takes to reconnect. If it expires too early, a plan repeats the
write and gets status 409, because names are deterministic.
"""

ObjectName = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass
class _Pending:
    versions: dict[ObjectName, int] = field(default_factory=dict)
    expires: float = 0.0


class Expectations(Generic[K]):
    """For each key, the written objects and the resourceVersion at which the watch will show each write.

    Resource versions of one kind grow with every write, in the order in which a watch delivers them.
    """

    def __init__(self) -> None:
        self._pending: dict[K, _Pending] = {}
        self._waiting: dict[ObjectName, set[K]] = {}

    def expect(self, key: K, written: ObjectName, version: int, now: float) -> None:
        """Record a write for `key` that produced that version. Plans for the key wait until the watch shows it."""
        pending = self._pending.setdefault(key, _Pending())
        pending.versions[written] = max(version, pending.versions.get(written, 0))
        pending.expires = now + EXPIRY_SECONDS
        self._waiting.setdefault(written, set()).add(key)

    def saw(self, obj: ObjectName, version: int) -> list[K]:
        """Record that the watch shows an object, or its deletion, at a version. Returns the keys that no longer wait."""
        free = []
        for key in tuple(self._waiting.get(obj, ())):
            pending = self._pending[key]
            if pending.versions[obj] <= version:
                del pending.versions[obj]
                self._drop(obj, key)
                if not pending.versions:
                    del self._pending[key]
                    free.append(key)
        return free

    def hold(self, key: K, now: float) -> float:
        """Return how many seconds at most the key's next plan must wait; 0 if it need not wait."""
        pending = self._pending.get(key)
        if pending is None:
            return 0.0
        if now >= pending.expires:
            self.forget(key)
            return 0.0
        return pending.expires - now

    def forget(self, key: K) -> None:
        pending = self._pending.pop(key, None)
        for obj in pending.versions if pending else ():
            self._drop(obj, key)

    def _drop(self, obj: ObjectName, key: K) -> None:
        waiting = self._waiting[obj]
        waiting.discard(key)
        if not waiting:
            del self._waiting[obj]


NodeName = str
_Name = tuple[str, str]  # namespace, name
_K = TypeVar("_K")
_Model = TypeVar("_Model", bound=BaseModel)


def uid_of(obj: Manifest) -> str:
    uid: str = obj["metadata"]["uid"]
    return uid


def controller_of(obj: Manifest) -> Mapping[str, Any] | None:
    """Return the owner reference of the object's controller."""
    for reference in obj["metadata"].get("ownerReferences", ()):
        if reference.get("controller"):
            found: Mapping[str, Any] = reference
            return found
    return None


class Cache:
    """Objects by kind and name, and by the uid of their controller."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[_Name, Manifest]] = {}
        self._owned: dict[tuple[str, str, str], dict[_Name, Manifest]] = {}
        self._pods_by_node: dict[NodeName, dict[_Name, Manifest]] = {}
        self.nodes = NodeCounts()

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return one object; None if it does not exist or was not seen yet."""
        return self._objects.get(kind, {}).get((namespace, name))

    def all(self, kind: str) -> Iterable[Manifest]:
        return self._objects.get(kind, {}).values()

    def owned(self, kind: str, namespace: str, owner_uid: str) -> tuple[Manifest, ...]:
        """Return the objects of a kind in a namespace whose controller has that uid.

        Objects in other namespaces are ignored: any user can write any uid into an object there.
        """
        return tuple(self._owned.get((kind, namespace, owner_uid), {}).values())

    def pods_on(self, node: NodeName) -> tuple[Manifest, ...]:
        return tuple(self._pods_by_node.get(node, {}).values())

    def put(self, kind: str, obj: Manifest) -> None:
        metadata = obj["metadata"]
        name = (metadata.get("namespace", ""), metadata["name"])
        self.remove(kind, *name)
        self._objects.setdefault(kind, {})[name] = obj
        if owner := controller_of(obj):
            self._owned.setdefault((kind, name[0], owner["uid"]), {})[name] = obj
        if kind == "Pod" and (node := obj["spec"].get("nodeName")):
            self._pods_by_node.setdefault(node, {})[name] = obj
        if kind == "Node":
            self.nodes.add(obj)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Remove an object if it is cached."""
        key = (namespace, name)
        old = self._objects.get(kind, {}).pop(key, None)
        if old is None:
            return
        if owner := controller_of(old):
            _drop(self._owned, (kind, namespace, owner["uid"]), key)
        if kind == "Pod" and (node := old["spec"].get("nodeName")):
            _drop(self._pods_by_node, node, key)
        if kind == "Node":
            self.nodes.remove(old)


def _drop(index: dict[_K, dict[_Name, Manifest]], entry: _K, name: _Name) -> None:
    members = index[entry]
    del members[name]
    if not members:
        del index[entry]


def read_as(model: type[_Model], found: Any) -> _Model | None:
    """Parse a value with an API type. Returns None if it is malformed, as one from another version may be."""
    try:
        return model.model_validate(found)
    except ValidationError:
        return None


def report_of(shard: Manifest) -> RunnerReport | None:
    """Return the report in a RolloutShard; None before the first report."""
    return read_as(RunnerReport, shard.get("status"))


def reports_of(cache: Cache, namespace: str, job_uid: str) -> Iterator[RunnerReport]:
    """Return the reports of a job's runners, unordered."""
    for shard in cache.owned("RolloutShard", namespace, job_uid):
        if report := report_of(shard):
            yield report


PRIMARY = ("Sandbox", "SandboxPool", "RolloutJob", "ModelServer")
"""Kinds that users and runners write. All other kinds are derived from them."""


def affected_by(kind: str, old: Manifest | None, new: Manifest | None, cache: Cache) -> list[Ref]:
    """Return the objects to plan again, given an object before and after a change (None: it does not exist)."""
    obj = new or old
    assert obj is not None
    if kind in PRIMARY:
        itself = Ref.of(kind, obj)
        if kind == "RolloutJob":  # A policy update waits for the job's runners only until the job has ended.
            server = model_server_of(obj)
            return [itself, server] if server else [itself]
        if kind == "ModelServer":
            return [itself, *(Ref.of("RolloutJob", job) for job in users(itself, cache))]
        if kind == "Sandbox" and (pool := controller_of(obj)) and pool["kind"] == "SandboxPool":
            return [itself, Ref("SandboxPool", itself.namespace, pool["name"])]
        return [itself]
    if kind == "Node":
        itself = Ref.of(kind, obj)
        same = old is not None and new is not None and is_ready(old) == is_ready(new)
        pods = () if same else cache.pods_on(itself.name)
        return [itself, *(ref for pod in pods for ref in affected_by("Pod", None, pod, cache))]
    namespace = obj["metadata"]["namespace"]
    labels = obj["metadata"].get("labels", {})
    if kind == "Pod" and labels.get(ROLE_LABEL) == RUNNER_ROLE:  # Its controller is the Job.
        return [Ref("RolloutJob", namespace, labels[JOB_LABEL])] if JOB_LABEL in labels else []
    if kind == "Pod" and MODEL_SERVER_LABEL in labels:  # Its controller is a StatefulSet, a LeaderWorkerSet's or a Job.
        return [Ref("ModelServer", namespace, labels[MODEL_SERVER_LABEL])]
    owner = controller_of(obj)
    if owner is None or owner["kind"] not in PRIMARY:
        return []
    owners = [Ref(owner["kind"], namespace, owner["name"])]
    if kind == "NetworkPolicy" and new is None:  # A job owns the NetworkPolicies of its Sandboxes.
        sandboxes = cache.owned("Sandbox", namespace, owner["uid"])
        owners += (Ref.of("Sandbox", sandbox) for sandbox in sandboxes)
    if kind == "RolloutShard" and (job := cache.get("RolloutJob", namespace, owner["name"])):
        owners += filter(None, [model_server_of(job)])  # Policy updates wait for the runners' acknowledgements.
    if kind == "RolloutShard":
        # What a runner no longer wants is free for others, so the earlier report counts too.
        reports = [report_of(shard) for shard in (old, new) if shard is not None]
        pools = {name for report in reports if report is not None for name in report.pools}
        owners += (Ref("SandboxPool", namespace, name) for name in sorted(pools))
    return owners


def model_server_of(job: Manifest) -> Ref | None:
    """Return the ModelServer that a RolloutJob uses: its own, or the one it names."""
    model = job["spec"].get("model") or {}
    metadata = job["metadata"]
    name = own_model_server_name(metadata["name"]) if model.get("server") else model.get("serverRef")
    return Ref("ModelServer", metadata["namespace"], name) if name else None


def users(server: Ref, cache: Cache) -> list[Manifest]:
    return [job for job in cache.all("RolloutJob") if model_server_of(job) == server]
