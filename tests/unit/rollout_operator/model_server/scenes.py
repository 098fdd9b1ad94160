"""ModelServers and a small cluster that carries out plans, for the tests of this folder."""

import copy
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from rollout_api.cluster import MODEL_SERVER_LABEL, POLICY_LOADED
from rollout_api.model_server import ModelServer
from rollout_api.on_cluster.model_server_problems import parse
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_operator.actions import Ask, Create, Delete, EnsureKey, Patch, Plan, Remember, Replace, SetPodCondition
from rollout_operator.cache import Cache
from rollout_operator.model_server import observe, plan
from rollout_operator.model_server.observe import Observed
from rollout_operator.server_contact import ServerContact
from rollout_operator.world import Memory, World

Json = dict[str, Any]

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
NAMESPACE = "lab"
SPECS = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((Path(__file__).parent / "specs").glob("*.yaml"))
}
CONFIG = OperatorConfig.model_validate(
    {"images": {"runtime": "runtime:1", "executor": "executor:1"}, "lease": {"namespace": "operators"}}
)


def manifest(spec: Json, name: str = "qwen", uid: str = "uid-1") -> Json:
    """Return a ModelServer as the API server has it."""
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "ModelServer",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid, "generation": 1},
        "spec": copy.deepcopy(spec),
    }


def model_server(spec: Json, name: str = "qwen") -> ModelServer:
    """Return a valid ModelServer."""
    server, problems = parse(manifest(spec, name), [])
    assert server is not None, problems
    assert not problems
    return server


class Cluster:
    """One ModelServer, and an API server with the operator's objects for it."""

    def __init__(self, spec: Json) -> None:
        self.now = NOW
        self.server: Json = manifest(spec)
        self.objects: dict[tuple[str, str], Json] = {}
        self.memory, self.keys = Memory(), dict[str, str]()
        self.asked: dict[tuple[str, int], ServerContact] = {}
        self.refused_kinds: Sequence[str] = ()
        self.versions = 0

    # The operator

    def look(self) -> Plan:
        """Do one round of planning."""
        return plan(self.seen())

    def seen(self) -> Observed:
        """Return the observed state of a round."""
        cache = Cache()
        cache.put("ModelServer", copy.deepcopy(self.server))
        for (kind, _), obj in self.objects.items():
            cache.put(kind, copy.deepcopy(obj))
        return observe(World(cache, CONFIG, self.now, self.memory, self.keys, asked=self.asked), self.server)

    def carry_out(self, planned: Plan) -> None:
        """Do what the loop does: actions in order, up to the first that learns something, then the status."""
        for action in planned.actions:
            match action:
                case EnsureKey(body):
                    self.keys[self.server["metadata"]["uid"]] = "token"
                    self.objects["Secret", body["metadata"]["name"]] = self.stored(body)
                    return
                case Create(body):
                    kind = body["kind"]
                    if kind in self.refused_kinds:
                        assert action.if_refused is not None
                        self.memory.learn(action.if_refused, self.now.timestamp())
                        return
                    key = kind, body["metadata"]["name"]
                    assert key not in self.objects, f"{key} is made twice"
                    self.objects[key] = self.stored(body)
                case Replace(body):
                    old = self.objects[body["kind"], body["metadata"]["name"]]
                    assert body["metadata"]["resourceVersion"] == old["metadata"]["resourceVersion"]
                    self.objects[body["kind"], body["metadata"]["name"]] = self.stored(body) | {
                        "status": old.get("status", {})
                    }
                case Patch(ref, change):
                    self.objects[ref.kind, ref.name]["spec"] |= change["spec"]
                case Delete(ref, uid):
                    if self.objects.get((ref.kind, ref.name), {}).get("metadata", {}).get("uid") == uid:
                        del self.objects[ref.kind, ref.name]
                case SetPodCondition(ref, uid, condition):
                    pod = self.objects[ref.kind, ref.name]
                    if pod["metadata"]["uid"] == uid:
                        pod["status"]["conditions"] = [dict(condition)]
                case Remember():
                    self.memory.learn(action, self.now.timestamp())
        if planned.status is not None:
            self.server["status"] = dict(planned.status)

    def settle(self, rounds: int = 12) -> None:
        """Do rounds until nothing is left to do."""
        for _ in range(rounds):
            planned = self.look()
            if all(isinstance(action, Ask) for action in planned.actions) and planned.status == self.server.get(
                "status"
            ):
                return
            self.carry_out(planned)
        raise AssertionError(f"never comes to rest: {self.look().actions}, {self.look().status}")

    def stored(self, body: Mapping[str, Any]) -> Json:
        """Return an object as the API server keeps it."""
        self.versions += 1
        kept = copy.deepcopy(dict(body))
        kept["metadata"] = {"uid": f"uid-{self.versions}", **kept["metadata"], "resourceVersion": str(self.versions)}
        return kept

    # What else happens in a cluster

    def spec(self, **changes: Any) -> None:
        """Patch the spec."""
        self.server["spec"] |= changes
        self.server["metadata"]["generation"] += 1

    def download_ends(self, kind: str = "Complete") -> None:
        """End the download Job."""
        self.objects["Job", "qwen-download"]["status"] = {"conditions": [{"type": kind, "status": "True"}]}

    def start_pods(self) -> None:
        """Create missing pods as the controllers do, and let them run."""
        for kind in ("StatefulSet", "LeaderWorkerSet"):
            workload = self.objects.get((kind, "qwen"))
            if workload is None:
                continue
            spec = workload["spec"]
            template = spec["template"] if kind == "StatefulSet" else spec["leaderWorkerTemplate"]["leaderTemplate"]
            for index in range(spec["replicas"]):
                if ("Pod", f"qwen-{index}") not in self.objects:
                    self.objects["Pod", f"qwen-{index}"] = self.running(template, f"qwen-{index}")

    def running(self, template: Json, name: str) -> Json:
        """Return a running pod."""
        body = {
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": template["metadata"]["labels"]},
            "spec": {},
        }
        assert body["metadata"]["labels"][MODEL_SERVER_LABEL] == "qwen"
        up = {"running": {"startedAt": "2026-05-04T12:00:00Z"}}
        return self.stored(body) | {
            "status": {
                "phase": "Running",
                "podIP": f"10.0.0.{self.versions % 250}",
                "conditions": [],
                "initContainerStatuses": [{"name": "gateway", "restartCount": 0, "state": up}],
                "containerStatuses": [{"name": "engine", "started": True, "restartCount": 0, "state": up}],
            }
        }

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)

    def condition(self, kind: str) -> Json:
        """Return a condition of its status."""
        return next((c for c in self.server.get("status", {}).get("conditions", []) if c["type"] == kind), {})

    @property
    def gates(self) -> list[str]:
        """Return the status of the readiness gate of each pod; empty if it was never set."""
        pods = [obj for (kind, _), obj in sorted(self.objects.items()) if kind == "Pod"]
        return ["".join(c["status"] for c in pod["status"]["conditions"] if c["type"] == POLICY_LOADED) for pod in pods]
