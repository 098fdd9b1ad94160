"""Invented RolloutJobs and objects of a cluster, and a small cluster that carries out plans."""

import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from rollout_api.cluster import JOB_LABEL, MANAGED_BY, shard_name
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_operator.actions import Action, Create, Delete, EnsureKey, Event, Patch, Plan, Remember
from rollout_operator.cache import Cache
from rollout_operator.rollout_job import observe, plan
from rollout_operator.rollout_job.observe import Observed
from rollout_operator.world import Memory, World

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
UID = "5f0c2c1e-0000-4000-8000-000000000001"
CONFIG = OperatorConfig.model_validate(
    {"images": {"runtime": "runtime:1", "executor": "executor:1"}, "lease": {"namespace": "operator"}}
)


def config(**changes: Any) -> OperatorConfig:
    """Return the operator's configuration with some fields in their wire format."""
    return OperatorConfig.model_validate(CONFIG.wire() | changes)


def manifest(**spec: Any) -> dict[str, Any]:
    """Return a RolloutJob as the API server has it; two tasks of four rollouts."""
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {
            "name": "sums",
            "namespace": "team",
            "uid": UID,
            "generation": 1,
            "creationTimestamp": "2026-03-01T12:00:00Z",
        },
        "spec": {
            "groupSize": 4,
            "agent": {"type": "Nop"},
            "tasks": {"inline": [task("one"), task("two")]},
            "sandbox": {"image": "tasks:1"},
            "output": {"uri": "s3://bucket/runs"},
            **spec,
        },
    }


def task(name: str, **changes: Any) -> dict[str, Any]:
    """Return a task that is graded with `true`."""
    return {"name": name, "prompt": "add them up", "verifier": {"commands": ["true"]}, **changes}


def report(index: int, state: str = "Running", **changes: Any) -> dict[str, Any]:
    """Return a runner's report."""
    return {"index": index, "state": state, "sealed": 0, "running": 0, "outcomes": {}, **changes}


def time_of(moment: datetime) -> str:
    """Return a time as Kubernetes writes it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Scene:
    """A RolloutJob and its cluster, which handles the runners' Job as Kubernetes would."""

    job: dict[str, Any]
    config: OperatorConfig = CONFIG
    now: datetime = START
    cache: Cache = field(default_factory=Cache)
    memory: Memory = field(default_factory=Memory)
    keys: dict[str, str] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    """Return the kinds of all created objects, in order."""
    events: list[Event] = field(default_factory=list)
    status_writes: int = 0
    gone: bool = False

    def observe(self) -> Observed:
        """Return the current observation for the plan."""
        return observe(World(self.cache, self.config, self.now, self.memory, self.keys), self.job)

    def plan(self) -> Plan:
        """Return the current plan without carrying it out."""
        return plan(self.observe())

    def settle(self, rounds: int = 5) -> Plan:
        """Plan and carry out until nothing is left to do; return the last plan."""
        for _ in range(rounds):
            step = self.plan()
            if (not step.actions and step.status is None) or self.gone:
                return step
            self.carry_out(step)
        raise AssertionError(f"still something to do after {rounds} rounds: {self.plan()}")

    def carry_out(self, step: Plan) -> None:
        """Carry out a plan as the loop does."""
        for action in step.actions:
            self._do(action)
        if step.status is not None:
            self.job["status"] = copy.deepcopy(dict(step.status))
            self.status_writes += 1
        self.events += step.events

    def _do(self, action: Action) -> None:
        match action:
            case EnsureKey(body):
                self.made.append("Secret")
                self.keys[body["metadata"]["ownerReferences"][0]["uid"]] = "0" * 64
            case Create(body):
                self.made.append(body["kind"])
                if body["kind"] == "Job":
                    assert self.batch_job is None, "two Jobs for one RolloutJob"
                    metadata = {
                        **copy.deepcopy(body["metadata"]),
                        "uid": "job-uid",
                        "creationTimestamp": time_of(self.now),
                    }
                    self.cache.put("Job", {**copy.deepcopy(dict(body)), "metadata": metadata, "status": {}})
                    self.kubernetes_follows()
                if body["kind"] == "RolloutShard":
                    metadata = {**copy.deepcopy(body["metadata"]), "creationTimestamp": time_of(self.now)}
                    self.cache.put("RolloutShard", {**copy.deepcopy(dict(body)), "metadata": metadata})
                if body["kind"] == "NetworkPolicy":
                    self.cache.put("NetworkPolicy", copy.deepcopy(dict(body)))
                if body["kind"] == "ModelServer":
                    assert self.model_server is None, "two ModelServers for one RolloutJob"
                    metadata = {**copy.deepcopy(body["metadata"]), "uid": "server-uid"}
                    self.cache.put("ModelServer", {**copy.deepcopy(dict(body)), "metadata": metadata})
            case Patch(ref, change) if ref.kind == "ModelServer":
                assert self.model_server is not None
                self.model_server["spec"] |= change["spec"]
            case Patch(ref, change):
                assert ref.kind == "Job"
                assert self.batch_job is not None
                self.batch_job["spec"] |= change["spec"]
                if "metadata" in change:
                    self.batch_job["metadata"]["annotations"] = dict(change["metadata"]["annotations"])
                self.kubernetes_follows()
            case Delete(ref, uid):
                if ref.kind == "RolloutJob":
                    assert uid == UID
                    self.gone = True
                elif action.foreground and self.runners:
                    assert self.batch_job is not None  # which Kubernetes removes after its pods
                else:
                    self.cache.remove(ref.kind, ref.namespace, ref.name)
            case Remember():
                self.memory.learn(action, self.now.timestamp())
            case _:
                raise AssertionError(f"a RolloutJob has no need of {action}")

    @property
    def model_server(self) -> dict[str, Any] | None:
        """Return the job's own ModelServer."""
        found = self.cache.get("ModelServer", "team", "sums-model")
        return found if found is None else dict(found)

    def model_server_says(self, kind: str, status: str, message: str = "") -> None:
        """Give its status one condition."""
        assert self.model_server is not None
        condition = {"type": kind, "status": status, "reason": "Because", "message": message}
        self.cache.put("ModelServer", {**self.model_server, "status": {"conditions": [condition]}})

    @property
    def status(self) -> dict[str, Any]:
        """Return the status."""
        found: dict[str, Any] = self.job.setdefault("status", {})
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition as it was last written."""
        return next(c for c in self.status["conditions"] if c["type"] == kind)

    def told(self) -> list[str]:
        """Return the reasons of all Events, in order."""
        return [event.reason for event in self.events]

    @property
    def batch_job(self) -> dict[str, Any] | None:
        """Return the Indexed Job."""
        found = self.cache.get("Job", "team", "sums-runner")
        return None if found is None else dict(found)

    @property
    def runners(self) -> list[dict[str, Any]]:
        """Return the running runner pods."""
        return [dict(pod) for pod in self.cache.all("Pod") if pod["status"]["phase"] in ("Pending", "Running")]

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)

    def reports(self, *entries: dict[str, Any]) -> None:
        """Have runners write their reports."""
        owner = {"kind": "RolloutJob", "name": "sums", "uid": UID, "controller": True}
        for entry in entries:
            name = shard_name("sums", UID, entry["index"])
            metadata = {
                "name": name,
                "namespace": "team",
                "ownerReferences": [owner],
                "creationTimestamp": time_of(self.now),
            }
            self.cache.put("RolloutShard", {"kind": "RolloutShard", "metadata": metadata, "status": entry})

    @property
    def reported(self) -> list[dict[str, Any]]:
        """Return the reports by runner."""
        found = (shard.get("status") for shard in self.cache.all("RolloutShard"))
        return sorted((dict(entry) for entry in found if entry), key=lambda entry: entry["index"])

    def kubernetes_follows(self) -> None:
        """Act as the Job controller and the kubelet: create pods for indexes without one, or delete all when suspended."""
        job = self.batch_job
        if job is None:
            return
        job["status"] = status = dict(job.get("status") or {})
        status.setdefault("failed", 0)
        if status.get("completed"):
            return  # whatever its spec says then
        if job["spec"]["suspend"]:
            status |= {"active": 0, "conditions": [{"type": "Suspended", "status": "True"}]}
            for pod in self.runners:
                self.cache.remove("Pod", "team", pod["metadata"]["name"])
        else:
            status["conditions"] = []
            running = {pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] for pod in self.runners}
            for index in range(job["spec"]["completions"]):
                if str(index) not in running and index not in status.get("done", ()):
                    self.cache.put("Pod", runner_pod(index, f"sums-runner-{index}-{status['failed']}", job))
            status["active"] = len(self.runners)
        self.cache.put("Job", job)

    def another_manager_suspends(self, suspend: bool) -> None:
        """Suspend or resume the runners' Job as another manager, for example Kueue."""
        job = self.batch_job
        assert job is not None
        self.cache.put("Job", {**job, "spec": {**job["spec"], "suspend": suspend}})
        self.kubernetes_follows()

    def runner_fails(self, index: int = 0, message: str = "storage is away") -> None:
        """End a runner pod with an error; Kubernetes starts another one."""
        for pod in self.runners:
            if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == str(index):
                ended = {"reason": "Error", "exitCode": 4, "message": message, "finishedAt": time_of(self.now)}
                status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}
                self.cache.put("Pod", {**pod, "status": status})
                job = self.batch_job
                assert job is not None
                self.cache.put("Job", {**job, "status": {**job["status"], "failed": job["status"]["failed"] + 1}})
        self.kubernetes_follows()

    def runner_is_evicted(self, index: int = 0) -> None:
        """The node of a runner pod is drained; Kubernetes starts another pod."""
        for pod in self.runners:
            if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == str(index):
                condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
                self.cache.put("Pod", {**pod, "status": {"phase": "Failed", "conditions": [condition]}})
                job = self.batch_job
                assert job is not None
                self.cache.put("Job", {**job, "status": {**job["status"], "failed": job["status"]["failed"] + 1}})
        self.kubernetes_follows()

    def runner_ends(self, index: int, state: str, **changes: Any) -> None:
        """Have a runner write its verdict, and end its pod successfully."""
        self.reports(report(index, state, **changes))
        self._pod_ends_well(index)

    def all_pods_end_well(self) -> None:
        """End each runner pod successfully, without a report."""
        job = self.batch_job
        assert job is not None
        for index in range(job["spec"]["completions"]):
            self._pod_ends_well(index)

    def _pod_ends_well(self, index: int) -> None:
        job = self.batch_job
        assert job is not None
        done = sorted({*job["status"].get("done", ()), index})
        for pod in self.runners:
            if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == str(index):
                self.cache.put("Pod", {**pod, "status": {"phase": "Succeeded"}})
        status = {**job["status"], "done": done, "succeeded": len(done)}
        if len(done) == job["spec"]["completions"]:
            complete = {"type": "Complete", "status": "True", "lastTransitionTime": time_of(self.now)}
            status |= {"conditions": [complete], "completed": True, "active": 0}
        self.cache.put("Job", {**job, "status": status})

    def has_sandbox(self, name: str) -> None:
        """Create a sandbox of a runner."""
        owner = {"kind": "RolloutJob", "name": "sums", "uid": UID, "controller": True}
        metadata = {"name": name, "namespace": "team", "uid": f"uid-of-{name}", "ownerReferences": [owner]}
        self.cache.put("Sandbox", {"kind": "Sandbox", "metadata": metadata, "spec": {}})

    @property
    def sandboxes(self) -> list[str]:
        """Return the names of the sandboxes."""
        return [sandbox["metadata"]["name"] for sandbox in self.cache.all("Sandbox")]


def runner_pod(index: int, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Return a running runner pod."""
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-of-{name}",
            "labels": {**MANAGED_BY, JOB_LABEL: "sums", "batch.kubernetes.io/job-completion-index": str(index)},
            "ownerReferences": [{"kind": "Job", "uid": job["metadata"]["uid"], "controller": True}],
        },
        "spec": {},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }
