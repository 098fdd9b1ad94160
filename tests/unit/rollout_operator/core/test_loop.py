"""The operator's loop with an API server in memory: every author of a manifest can read its result, whatever it
contains.
"""

import asyncio
import base64
import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import generate_latest

from rollout_api.cluster import SUSPEND_ANNOTATION, shard_name
from rollout_api.on_cluster.operator_config import Images
from rollout_operator import loop as loop_module
from rollout_operator.api import UNREACHABLE, ApiError
from rollout_operator.model_server import policy
from tests.support.memory_api import CONFIG, MemoryApi, operator_on, until

Json = dict[str, Any]
JOB_SPEC: Json = {
    "tasks": {"inline": [{"name": "a", "prompt": "p", "verifier": {"commands": ["true"]}}]},
    "sandbox": {"image": "i"},
    "model": {"endpoint": {"baseURL": "http://m.example/v1", "name": "m"}},
    "output": {"uri": "s3://b/x"},
}
SERVER_SPEC: Json = {"model": {"name": "m"}, "engine": {"image": "v", "version": "0.27.0"}, "accelerator": {"count": 0}}
QUOTA = "exceeded quota: q, requested: count/jobs.batch=1, used: count/jobs.batch=5, limited: count/jobs.batch=5"


def manifest(kind: str, name: str, spec: Mapping[str, Any]) -> Json:
    """Return an object as `kubectl apply` sends it."""
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "t"},
        "spec": copy.deepcopy(dict(spec)),
    }


def condition(obj: Json, kind: str) -> Json:
    """Return a condition of an object; empty if it does not exist."""
    found = (obj.get("status") or {}).get("conditions", ())
    return next((entry for entry in found if entry["type"] == kind), {})


def test_a_rollout_job_names_the_quota_that_refuses_its_job() -> None:
    api = MemoryApi()
    api.refuse = lambda verb, kind, body: (403, f"jobs.batch is forbidden: {QUOTA}") if kind == "Job" else None
    api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC))

    def job() -> Json:
        return api.objects["RolloutJob", "t", "j"]

    async def run() -> None:
        async with operator_on(api):
            failed = await until(lambda: condition(job(), "Reconciled"), "a condition")
            assert (failed["status"], failed["reason"]) == ("False", "Forbidden")
            assert "creating Job t/j-runner" in failed["message"]
            assert QUOTA in failed["message"]
            assert condition(job(), "Progressing")["status"] == "True"
            api.refuse = lambda verb, kind, body: None
            await until(lambda: api.of("Job") and not condition(job(), "Reconciled"), "the quota is raised")

    asyncio.run(run())


def test_objects_of_an_unreadable_namespace_wait_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "UNKNOWN_SECONDS", 0.01)
    api = MemoryApi()

    async def run() -> None:
        async with operator_on(api) as loop:
            loop.may_plan = lambda namespace: namespace != "t"
            api.put("Sandbox", manifest("Sandbox", "s", {"image": "i"}))
            await asyncio.sleep(0.1)
            assert not api.writes
            loop.may_plan = lambda namespace: True
            await until(lambda: api.of("Pod"), "its pod")

    asyncio.run(run())


def test_failed_network_policy_prevents_its_pod() -> None:
    api = MemoryApi()
    api.refuse = lambda verb, kind, body: (403, "networkpolicies is forbidden") if kind == "NetworkPolicy" else None
    api.put("Sandbox", manifest("Sandbox", "s", {"image": "i"}))

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: condition(api.objects["Sandbox", "t", "s"], "Reconciled"), "a condition")
            assert not api.of("Pod")

    asyncio.run(run())


def test_condition_of_another_writer_causes_no_further_status_writes() -> None:
    foreign = {"type": "Foreign", "status": "True", "reason": "Mine", "lastTransitionTime": "2026-01-01T00:00:00Z"}

    class Merging(MemoryApi):
        """Like server-side apply, which keeps conditions of other managers, and stores nothing without a change."""

        applied = 0

        async def apply_status(
            self, obj: Mapping[str, Any], kind: str, status: Mapping[str, Any], manager: str
        ) -> Json:
            self.applied += 1
            await asyncio.sleep(0.001)
            merged = {**status, "conditions": [*status["conditions"], foreign]}
            found = self.objects[kind, "t", obj["metadata"]["name"]]
            return found if found.get("status") == merged else await super().apply_status(obj, kind, merged, manager)

    api = Merging()
    api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC))

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: api.of("Job"), "the runners' Job")
            await asyncio.sleep(0.5)
            applied = api.applied
            await asyncio.sleep(0.5)
            assert api.applied == applied

    asyncio.run(run())


def test_running_job_keeps_its_executor_after_an_upgrade() -> None:
    """The job's runners keep their image, and may not understand another executor."""
    api = MemoryApi()
    job = api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC))
    owner = {"apiVersion": job["apiVersion"], "kind": "RolloutJob", "name": "j", "uid": job["metadata"]["uid"]}
    newer = CONFIG.model_copy(update={"images": Images(runtime="r2", executor="e2")})

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: api.of("Job"), "the runners' Job")
        of_job = manifest("Sandbox", "of-job", {"image": "i"})
        of_job["metadata"]["ownerReferences"] = [owner | {"controller": True}]
        api.put("Sandbox", of_job)
        api.put("Sandbox", manifest("Sandbox", "by-hand", {"image": "i"}))
        async with operator_on(api, newer):
            await until(lambda: len(api.of("Pod")) == 2, "both pods")

    asyncio.run(run())
    images = {
        pod["metadata"]["name"]: [v["image"]["reference"] for v in pod["spec"]["volumes"] if "image" in v]
        for pod in api.of("Pod")
    }
    assert images == {"of-job": ["e"], "by-hand": ["e2"]}


def test_all_sandboxes_of_a_job_go_on_after_a_restart_of_the_operator() -> None:
    """Their plans read the job's key at the same time, and one of them is the first."""
    api = MemoryApi()
    job = api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC))
    owner = {"apiVersion": job["apiVersion"], "kind": "RolloutJob", "name": "j", "uid": job["metadata"]["uid"]}

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: api.of("Job"), "the runners' Job")
        for name in "abcd":
            sandbox = manifest("Sandbox", name, {"image": "i"})
            sandbox["metadata"]["ownerReferences"] = [owner | {"controller": True}]
            api.put("Sandbox", sandbox)
        async with operator_on(api):
            await until(lambda: len(api.of("Pod")) == 4, "all pods")

    asyncio.run(run())


def test_a_job_and_a_pool_have_network_policies_of_their_own_whatever_their_names() -> None:
    api = MemoryApi()
    job = api.put("RolloutJob", manifest("RolloutJob", "x-pool", JOB_SPEC))
    api.put("SandboxPool", manifest("SandboxPool", "x", {"sandbox": {"image": "i"}, "replicas": 1, "maxReplicas": 1}))
    owner = {"apiVersion": job["apiVersion"], "kind": "RolloutJob", "name": "x-pool", "uid": job["metadata"]["uid"]}
    of_job = manifest("Sandbox", "of-job", {"image": "i"})
    of_job["metadata"]["ownerReferences"] = [owner | {"controller": True}]
    api.put("Sandbox", of_job)

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: len(api.of("Pod")) == 2, "both pods")

    asyncio.run(run())
    policies = api.of("NetworkPolicy")
    assert {policy["metadata"]["ownerReferences"][0]["name"] for policy in policies} == {"x", "x-pool"}


def test_no_pod_is_created_before_its_policy_when_a_quota_conflicts() -> None:
    api, tries = MemoryApi(), list[str]()
    words = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'

    def refuse(verb: str, kind: str, body: Mapping[str, Any]) -> tuple[int, str] | None:
        tries.append(f"{verb} {kind}")
        return (409, words) if tries.count("create NetworkPolicy") == 1 and kind == "NetworkPolicy" else None

    api.refuse = refuse
    api.put("Sandbox", manifest("Sandbox", "s", {"image": "i"}))

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: api.of("Pod"), "the pod")

    asyncio.run(run())
    assert [made for made in tries if made.endswith(("Policy", "Pod"))] == [*["create NetworkPolicy"] * 2, "create Pod"]


@pytest.mark.parametrize(
    "spec",
    [
        {"image": "i", "podTemplate": {"spec": {"affinity": {"nodeAffinity": "x"}}}},
        {"image": "i", "podTemplate": {"spec": {"affinity": {"nodeAffinity": {"requiredDuring": 1}}}}},
        {"image": "i", "resources": {"cpu": "1ki"}},
        {"image": "i", "clients": {"matchLabels": 5}},
        {"image": "i", "network": {"agent": {"a": 1}}},
        {"image": 5},
        None,
    ],
)
def test_a_malformed_sandbox_gets_a_condition(spec: Json | None) -> None:
    api = MemoryApi()
    api.refuse = lambda verb, kind, body: (400, "json: cannot unmarshal") if kind == "NetworkPolicy" else None
    made = manifest("Sandbox", "s", {})
    made["spec"] = spec
    api.put("Sandbox", made)

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: (api.objects["Sandbox", "t", "s"].get("status") or {}).get("conditions"), "a condition")

    asyncio.run(run())


def test_runners_get_every_task_though_the_operator_keeps_only_their_number() -> None:
    api = MemoryApi()
    api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC))

    async def run() -> None:
        async with operator_on(api) as loop:
            await until(lambda: api.of("Job"), "the runners' Job")
            kept = loop._cache.get("RolloutJob", "t", "j")
            assert kept is not None
            assert kept["spec"]["tasks"] == {"inline": [None]}

    asyncio.run(run())
    (secret,) = api.of("Secret")
    sent = json.loads(base64.b64decode(secret["data"]["job.json"]))["spec"]["tasks"]["inline"]
    assert [(task["name"], task["prompt"]) for task in sent] == [("a", "p")]


def test_job_whose_spec_is_temporarily_unreadable_is_not_invalid() -> None:
    api = MemoryApi()
    job = api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC))
    find, tries = api.find, []

    async def away(kind: str, namespace: str, name: str) -> Json | None:
        tries.append(name)
        raise ApiError(UNREACHABLE, "the API server did not answer in time")

    async def run() -> None:
        api.find = away  # type: ignore[method-assign]
        async with operator_on(api):
            await until(lambda: len(tries) > 1, "a second try")
            assert api.objects["RolloutJob", "t", "j"] == job, "an outage is no news of the job"
            api.find = find  # type: ignore[method-assign]
            await until(lambda: api.of("Job"), "the runners' Job")

    asyncio.run(run())


def test_reports_of_runners_cost_the_job_few_writes() -> None:
    api = MemoryApi()
    api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC | {"runners": {"replicas": 2}}))

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: api.of("Job"), "the runners' Job")
            before = api.writes.count("status RolloutJob")
            for sealed in range(300):
                for index, shard in enumerate(api.of("RolloutShard")):
                    api.put("RolloutShard", {**shard, "status": {"index": index, "sealed": sealed + 1, "total": 300}})
                await asyncio.sleep(0.001)
            assert api.writes.count("status RolloutJob") - before < 5

    asyncio.run(run())


def test_an_exception_in_a_plan_becomes_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("spread")

    monkeypatch.setattr(policy, "decide", fails)
    api = MemoryApi()
    api.put("ModelServer", manifest("ModelServer", "q", SERVER_SPEC))

    async def run() -> None:
        async with operator_on(api):
            failed = await until(lambda: condition(api.objects["ModelServer", "t", "q"], "Reconciled"), "a condition")
            assert (failed["reason"], "KeyError" in failed["message"]) == ("OperatorError", True)

    asyncio.run(run())


def test_null_status_of_one_tenant_disturbs_neither_the_others_nor_the_metrics() -> None:
    api = MemoryApi()
    statuses: list[Any] = [None, [], {"conditions": [None]}, {"sealed": None, "conditions": None}]

    async def run() -> None:
        async with operator_on(api) as loop:
            for number, status in enumerate(statuses):
                for kind, spec in (("RolloutJob", JOB_SPEC), ("Sandbox", {"image": "i"}), ("ModelServer", SERVER_SPEC)):
                    api.put(kind, manifest(kind, f"evil-{number}", spec) | {"status": status})
            api.put("Sandbox", manifest("Sandbox", "other", {"image": "i"}))
            await until(lambda: ("Pod", "t", "other") in api.objects, "the other tenant's pod")
            assert b"rollout_jobs" in generate_latest(loop._metrics.registry)

    asyncio.run(run())


def test_a_sandbox_waits_for_the_service_account_of_a_new_namespace() -> None:
    api = MemoryApi()
    words = 'pods "s" is forbidden: error looking up service account t/default: serviceaccount "default" not found'
    api.refuse = lambda verb, kind, body: (403, words) if kind == "Pod" else None
    api.put("Sandbox", manifest("Sandbox", "s", {"image": "i"}))

    def found() -> Json:
        return api.objects["Sandbox", "t", "s"]

    async def run() -> None:
        async with operator_on(api):
            failed = await until(lambda: condition(found(), "Reconciled"), "a condition")
            assert "serviceaccount" in failed["message"]
            await until(lambda: api.writes.count("create Pod") > 3, "it is tried again")
            assert not condition(found(), "Finished")
            api.refuse = lambda verb, kind, body: None
            await until(lambda: api.of("Pod"), "its pod")
            (pod,) = api.of("Pod")
            assert pod["spec"]["hostUsers"] is False, "a refusal that passed says nothing about Overlay"

    asyncio.run(run())


def drained_job(sandboxes: int) -> MemoryApi:
    """Return a suspended RolloutJob without runners, with this many Sandboxes to delete."""
    api = MemoryApi()
    job = api.put("RolloutJob", manifest("RolloutJob", "j", {**JOB_SPEC, "suspend": True}))
    uid = job["metadata"]["uid"]
    owner = {"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutJob", "name": "j", "controller": True, "uid": uid}
    suspended = {"type": "Suspended", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    note = {SUSPEND_ANNOTATION: "true"}
    runners = {"name": "j-runner", "namespace": "t", "ownerReferences": [owner], "annotations": note}
    shard = {"name": shard_name("j", uid, 0), "namespace": "t", "ownerReferences": [owner]}
    api.put("RolloutShard", {"kind": "RolloutShard", "metadata": shard})
    spec, status = {"suspend": True}, {"conditions": [suspended]}
    api.put("Job", {"kind": "Job", "metadata": runners, "spec": spec, "status": status})
    finished = {"type": "Finished", "status": "True", "reason": "Idle", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    for number in range(sandboxes):
        sandbox = manifest("Sandbox", f"s{number}", {"image": "i", "whenFinished": "Retain"})
        sandbox["metadata"]["ownerReferences"] = [owner]
        api.put("Sandbox", sandbox | {"status": {"conditions": [finished]}})
    return api


def test_operator_stays_healthy_while_a_job_of_many_sandboxes_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "STUCK_SECONDS", 3.0)
    api = drained_job(200)
    api.seconds = 0.05  # One after the other they would take 10 s.

    async def run() -> None:
        async with operator_on(api) as loop:
            stuck: list[float] = []

            def are_deleted() -> bool:
                stuck.append(loop.stuck())
                return not api.of("Sandbox")

            await until(are_deleted, "all are deleted")
            assert max(stuck) == 0, "the work gets further all the time"
            assert api.most_at_once > 1, "several are deleted at once"

    asyncio.run(run())


def test_a_waiting_write_is_not_made_when_the_lease_is_lost_meanwhile() -> None:
    api, leads = MemoryApi(), True
    for name in ("i", "j", "k"):
        api.put("RolloutJob", manifest("RolloutJob", name, JOB_SPEC))
    api.seconds = 0.5

    async def run() -> None:
        nonlocal leads
        async with operator_on(api, may_write=lambda: leads, writes_in_flight=1):
            await until(lambda: api.most_at_once, "the first create is under way, and the others wait for it")
            leads = False
            await until(lambda: api.writes, "it is made")
            await asyncio.sleep(1)
            assert api.writes == ["create Secret"]

    asyncio.run(run())


def test_operator_that_regains_its_lease_during_a_write_works_again() -> None:
    api, answers = drained_job(2), [True, False]
    api.seconds = 0.2  # The lease is lost between two deletes, and regained before the first one is answered.

    async def run() -> None:
        async with operator_on(api, may_write=lambda: answers.pop(0) if answers else True) as loop:
            await until(lambda: not answers, "the second delete finds the lease lost")
            loop.lead()
            await until(lambda: not api.of("Sandbox"), "both are deleted")
            api.put("Sandbox", manifest("Sandbox", "later", {"image": ""}))
            await until(lambda: condition(api.objects["Sandbox", "t", "later"], "Finished"), "a new one is looked at")

    asyncio.run(run())


def starting_runner(api: MemoryApi) -> Json:
    """Return a runner pod that has been on its node for long and reports nothing."""
    (job,) = api.of("Job")
    labels = {"app.kubernetes.io/managed-by": "agent-rollouts", "rollout.dev/role": "runner", "rollout.dev/job": "j"}
    owner = {"kind": "Job", "name": "j-runner", "uid": job["metadata"]["uid"], "controller": True}
    return {
        "metadata": {"name": "j-runner-0", "namespace": "t", "labels": labels, "ownerReferences": [owner]},
        "spec": {},
        "status": {"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"},
    }


def test_a_deleted_runner_secret_is_restored_with_the_same_key() -> None:
    api = MemoryApi()
    api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC))

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: api.of("Job"), "a Job")
            secret = api.objects.pop(("Secret", "t", "j-runner"))
            api.put("Pod", starting_runner(api))
            await until(lambda: api.of("Secret"), "the Secret")
            assert api.of("Secret")[0]["data"] == secret["data"]

    asyncio.run(run())


def test_a_deleted_control_secret_is_restored_with_the_same_key_while_a_server_waits() -> None:
    api = MemoryApi()
    api.put("ModelServer", manifest("ModelServer", "m", SERVER_SPEC))

    async def run() -> None:
        async with operator_on(api):
            workload = await until(lambda: api.of("StatefulSet"), "a StatefulSet")
            [(key, secret)] = [(key, obj) for key, obj in api.objects.items() if key[0] == "Secret"]
            del api.objects[key]
            metadata = {
                "name": "m-0",
                "namespace": "t",
                "labels": workload[0]["spec"]["template"]["metadata"]["labels"],
            }
            api.put("Pod", {"metadata": metadata, "spec": {}, "status": {"phase": "Pending"}})
            await until(lambda: api.of("Secret"), "the Secret")
            assert api.of("Secret")[0]["data"] == secret["data"]

    asyncio.run(run())


def test_status_is_written_again_after_a_conflict_with_another_writer() -> None:
    api = MemoryApi()
    refusals = ["the object 'guide' has been modified; please apply your changes to the latest version and try again"]
    api.refuse = lambda verb, kind, body: (409, refusals.pop()) if verb == "status" and refusals else None
    api.put("Sandbox", manifest("Sandbox", "s", {}))

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: condition(api.objects["Sandbox", "t", "s"], "Finished"), "a condition")
        assert not [event for event in api.of("Event") if event["reason"] == "ReconcileFailed"]

    asyncio.run(run())


KEYED: list[tuple[str, str, Json]] = [
    ("SandboxPool", "one-pool", {"sandbox": {"image": "i", "perSandbox": 2}}),
    ("Sandbox", "one-sandbox", {"image": "i"}),
    ("ModelServer", "one-control", SERVER_SPEC),
    ("RolloutJob", "one-runner", JOB_SPEC),
]


@pytest.mark.parametrize(("kind", "secret", "spec"), KEYED, ids=[kind for kind, *_ in KEYED])
def test_object_is_not_ready_while_a_secret_without_an_owner_has_the_name_of_its_key(
    kind: str, secret: str, spec: Json
) -> None:
    api = MemoryApi()
    api.put("Secret", {"kind": "Secret", "metadata": {"name": secret, "namespace": "t"}, "data": {}})
    api.put(kind, manifest(kind, "one", spec))

    def ready() -> Json:
        return condition(api.objects[kind, "t", "one"], "Ready")

    async def run() -> None:
        async with operator_on(api):
            failed = await until(ready, "a condition")
            assert (failed["status"], failed["reason"]) == ("False", "Conflict")
            assert f"Secret t/{secret} exists already and has no owner" in failed["message"]
            del api.objects["Secret", "t", secret]
            await until(lambda: "has no owner" not in ready().get("message", ""), "its own Secret")
            assert not condition(api.objects[kind, "t", "one"], "Reconciled")

    asyncio.run(run())


def test_a_lost_key_is_replaced_only_when_no_sandbox_uses_it() -> None:
    api = MemoryApi()
    api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC))

    def job() -> Json:
        return api.objects["RolloutJob", "t", "j"]

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: api.of("Job") and condition(job(), "Progressing"), "a Job")
        del api.objects["Secret", "t", "j-runner"]
        owner = {"kind": "RolloutJob", "name": "j", "uid": job()["metadata"]["uid"], "controller": True}
        sandbox = manifest("Sandbox", "s", {"image": "i"})
        api.sink = None
        api.put("Sandbox", sandbox | {"metadata": {**sandbox["metadata"], "ownerReferences": [owner]}})
        api.put("Pod", starting_runner(api))
        async with operator_on(api) as loop:  # this operator does not know the key
            failed = await until(lambda: condition(job(), "Reconciled"), "a condition")
            assert (failed["status"], failed["reason"]) == ("False", "NotFound")
            assert "Suspend and resume the RolloutJob" in failed["message"]
            assert not api.of("Secret"), "a new key would invalidate the token of the sandbox"
            loop.gone("Sandbox", api.objects.pop(("Sandbox", "t", "s")))
            await until(lambda: api.of("Secret") and not condition(job(), "Reconciled"), "a new key")

    asyncio.run(run())


def test_job_is_not_ended_by_an_object_of_another_namespace() -> None:
    api = MemoryApi()
    job = api.put("RolloutJob", manifest("RolloutJob", "j", JOB_SPEC))
    owner = {"kind": "RolloutJob", "name": "j", "uid": job["metadata"]["uid"], "controller": True}
    gone = {"type": "Failed", "status": "True", "reason": "Forged", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    metadata = {"name": "forged", "namespace": "elsewhere", "ownerReferences": [owner]}
    api.put("Job", {"kind": "Job", "metadata": metadata, "spec": {}, "status": {"conditions": [gone]}})

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: ("Job", "t", "j-runner") in api.objects, "the job's runners")
            await until(lambda: condition(api.objects["RolloutJob", "t", "j"], "Ready"), "a condition")
            assert condition(api.objects["RolloutJob", "t", "j"], "Failed")["status"] == "False"

    asyncio.run(run())


def _nested(levels: int) -> Json:
    value: Json = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("template", "words"),
    [({"spec": {"x": "y" * 70_000}}, "expected at most 65536"), (_nested(150), "nested more than 128 levels")],
)
def test_a_spec_of_excessive_size_or_depth_is_invalid_and_not_kept(template: Json, words: str) -> None:
    api = MemoryApi()
    sandbox = {**JOB_SPEC["sandbox"], "podTemplate": template}
    wholes = {
        "Sandbox": {"image": "i", "podTemplate": template},
        "RolloutJob": {**JOB_SPEC, "sandbox": sandbox},
        "ModelServer": {**SERVER_SPEC, "podTemplate": template},
    }
    api.objects = {
        (kind, "t", "large"): api.put(kind, manifest(kind, "large", {})) | {"spec": spec}
        for kind, spec in wholes.items()
    }

    def told(kind: str) -> str:
        obj = api.objects[kind, "t", "large"]
        return str((condition(obj, "Finished") or condition(obj, "Invalid")).get("message", ""))

    async def run() -> None:
        async with operator_on(api) as loop:
            await until(lambda: all(words in told(kind) for kind in wholes), "a condition of each")
            for kind in wholes:
                assert len(json.dumps(loop._cache.get(kind, "t", "large"))) < 5000

    asyncio.run(run())


def test_no_overlay_pod_is_made_where_the_api_server_drops_its_user_namespace() -> None:
    api = MemoryApi()
    made: list[Json] = []

    def drop(body: Json) -> Json:
        spec = {key: value for key, value in body.get("spec", {}).items() if key != "hostUsers"}
        return {**body, "spec": spec}

    api.admit = drop
    api.refuse = lambda verb, kind, body: made.append(dict(body)) if (verb, kind) == ("create", "Pod") else None
    api.put("Sandbox", manifest("Sandbox", "auto", {"image": "i"}))
    api.put("Sandbox", manifest("Sandbox", "overlay", {"image": "i", "workspaces": {"mode": "Overlay"}}))

    async def run() -> None:
        async with operator_on(api):
            await until(lambda: ("Pod", "t", "auto") in api.objects, "a Plain pod")
            told = await until(lambda: condition(api.objects["Sandbox", "t", "overlay"], "Finished"), "an end")
            assert (told["reason"], "UserNamespacesSupport" in told["message"]) == ("Invalid", True)
        assert [pod["metadata"]["name"] for pod in made] == ["auto"]
        assert "SYS_ADMIN" not in json.dumps(made)

    asyncio.run(run())
