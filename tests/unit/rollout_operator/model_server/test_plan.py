"""A ModelServer in a cluster: its objects are created in the right order, once, changed only where the spec changed,
and always reported.
"""

import copy
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_api.cluster import ROLE_LABEL, SANDBOX_ROLE
from rollout_api.on_cluster.model_server_problems import parse
from rollout_api.on_cluster.objects import EXCESS
from rollout_operator.actions import Ask, Create, Delete, EnsureKey, Event, Patch, Replace
from rollout_operator.model_server.objects import REFUSABLE_KINDS, WORKLOAD_KINDS, policies
from rollout_operator.model_server.plan import needs_spec, plan
from rollout_operator.model_server.status import events_of
from rollout_operator.model_server.update_state import Runner
from rollout_operator.prune import prune
from rollout_operator.server_contact import Call, ServerContact, ServerReport
from tests.support.full import examples
from tests.unit.rollout_operator.model_server.scenes import CONFIG, NAMESPACE, SPECS, Cluster, model_server

CACHED = SPECS["cache-and-token"]
SMALL = SPECS["smallest"]


def kinds(cluster: Cluster) -> list[str]:
    return sorted(f"{kind}/{name}" for kind, name in cluster.objects if kind != "Pod")


def running(spec: dict[str, Any]) -> Cluster:
    cluster = Cluster(spec)
    cluster.settle()
    if ("Job", "qwen-download") in cluster.objects:
        cluster.download_ends()
    cluster.settle()
    cluster.start_pods()
    cluster.settle()
    return cluster


def test_accelerators_are_requested_after_the_weights_are_complete() -> None:
    cluster = Cluster(CACHED)
    cluster.settle()
    assert "StatefulSet/qwen" not in kinds(cluster)
    assert {"Job/qwen-download", "PersistentVolumeClaim/qwen-weights"} <= set(kinds(cluster))
    job = cluster.objects["Job", "qwen-download"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert not any("/" in name for name in container["resources"]["requests"]), "an extended resource"
    assert cluster.condition("Ready")["reason"] == "Downloading"
    cluster.download_ends()
    cluster.settle()
    assert "StatefulSet/qwen" in kinds(cluster)
    assert cluster.condition("Downloaded")["status"] == "True"


def test_token_of_servers_that_run_is_not_replaced() -> None:
    """After a restart the operator knows it only from its Secret, which may have been deleted."""
    cluster = running(SMALL)
    cluster.keys.clear()
    (action,) = cluster.look().actions
    assert isinstance(action, EnsureKey)
    assert "Delete the pods of the ModelServer" in (action.remedy or "")
    for (kind, _), pod in cluster.objects.items():
        if kind == "Pod":  # the StatefulSet creates it again, and it waits for the Secret
            pod["status"] = {"phase": "Pending", "conditions": []}
    (action,) = cluster.look().actions
    assert isinstance(action, EnsureKey)
    assert action.remedy is None


def test_failed_download_is_reported_with_the_solution() -> None:
    cluster = Cluster(CACHED)
    cluster.settle()
    cluster.download_ends("Failed")
    cluster.settle()
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "DownloadFailed")
    assert "delete Job qwen-download to try again" in ready["message"]
    assert "StatefulSet/qwen" not in kinds(cluster)


def test_a_download_job_that_is_tidied_away_is_not_missed() -> None:
    cluster = running(CACHED)
    del cluster.objects["Job", "qwen-download"]
    assert not [action for action in cluster.look().actions if isinstance(action, Create)]


@pytest.mark.parametrize("name", SPECS)
def test_plan_of_an_unchanged_server_is_empty(name: str) -> None:
    cluster = running(SPECS[name])
    assert [action for action in cluster.look().actions if not isinstance(action, Ask)] == []
    assert cluster.look().status == cluster.server["status"]


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {"version": 7, "uri": "s3://p/7"}},
        {"clients": [{"podSelector": {}}]},
        {"weightTransfer": {"pull": {"timeoutSeconds": 60}}},
    ],
)
def test_engines_keep_running_when_a_change_does_not_affect_pods(changes: dict[str, Any]) -> None:
    cluster = running(SMALL)
    before = cluster.objects["StatefulSet", "qwen"]["metadata"]["resourceVersion"]
    cluster.spec(**changes)
    cluster.settle()
    assert cluster.objects["StatefulSet", "qwen"]["metadata"]["resourceVersion"] == before


def test_changed_number_of_servers_changes_only_the_replicas() -> None:
    cluster = running(SMALL)
    cluster.spec(replicas=5)
    [action] = [action for action in cluster.look().actions if not isinstance(action, Ask)]
    assert isinstance(action, Patch)
    assert action.change == {"spec": {"replicas": 5}}


def test_changed_image_creates_new_pods() -> None:
    cluster = running(SMALL)
    cluster.spec(engine={"image": "vllm:next", "version": "0.27.0"})
    [action] = [action for action in cluster.look().actions if not isinstance(action, Ask)]
    assert isinstance(action, Replace)
    cluster.settle()
    [engine] = cluster.objects["StatefulSet", "qwen"]["spec"]["template"]["spec"]["containers"]
    assert engine["image"] == "vllm:next"


@pytest.mark.parametrize(
    ("field", "kind"), [("podDisruptionBudget", "PodDisruptionBudget"), ("inferencePool", "InferencePool")]
)
def test_optional_object_is_deleted_when_the_spec_no_longer_has_it(field: str, kind: str) -> None:
    cluster = running(CACHED)
    assert f"{kind}/qwen" in kinds(cluster)
    cluster.spec(**{field: None})
    [action] = [action for action in cluster.look().actions if not isinstance(action, Ask)]
    assert isinstance(action, Delete)
    cluster.settle()
    assert f"{kind}/qwen" not in kinds(cluster)


def test_cluster_without_inference_pools_is_reported_and_the_servers_start() -> None:
    cluster = Cluster(SMALL | {"inferencePool": {"endpointPicker": {"name": "picker"}}})
    cluster.refused_kinds = ("InferencePool",)
    cluster.settle()
    assert cluster.condition("InferencePool")["reason"] == "CannotCreate"
    assert "StatefulSet/qwen" in kinds(cluster)
    cluster.refused_kinds = ()
    cluster.wait(61)
    cluster.settle()
    assert cluster.condition("InferencePool")["status"] == "True"
    cluster.spec(inferencePool={"endpointPicker": {"name": "picker", "port": 9003, "failureMode": "FailOpen"}})
    cluster.settle()
    picker = {"name": "picker", "port": {"number": 9003}, "failureMode": "FailOpen"}
    assert cluster.objects["InferencePool", "qwen"]["spec"]["endpointPickerRef"] == picker


def test_invalid_change_is_reported_and_running_servers_continue() -> None:
    cluster = running(SMALL)
    before = kinds(cluster)
    cluster.spec(podTemplate={"spec": {"hostNetwork": True}})
    cluster.settle()
    invalid = cluster.condition("Invalid")
    assert invalid["status"] == "True"
    assert "spec.podTemplate.spec.hostNetwork" in invalid["message"]
    assert kinds(cluster) == before
    assert cluster.server["status"]["servers"], "runners still find the servers"
    cluster.spec(podTemplate=None)
    cluster.settle()
    assert cluster.condition("Invalid") == {}


def test_a_server_made_invalid_in_mid_update_still_opens_its_gate() -> None:
    cluster = running(SMALL)
    policy = cluster.server["status"]["policy"] | {"gate": "Shut", "step": "Resuming", "update": 1}
    cluster.server["status"]["policy"] = policy | {"since": "2020-01-01T00:00:00Z"}
    cluster.spec(podTemplate={"spec": {"hostNetwork": True}})
    cluster.settle()
    assert cluster.condition("Invalid")["status"] == "True"
    assert cluster.server["status"]["policy"]["gate"] == "Open", "jobs would wait for ever"


@pytest.mark.parametrize("annotations", [{"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}])
def test_an_annotation_that_grants_privileges_on_the_node_is_refused(annotations: dict[str, str]) -> None:
    cluster = running(SMALL)
    cluster.spec(podTemplate={"metadata": {"annotations": annotations}})
    cluster.settle()
    assert "container.apparmor" in cluster.condition("Invalid")["message"]


@pytest.mark.parametrize("handler", ["httpGet", "tcpSocket"])
@pytest.mark.parametrize("at", ["livenessProbe", "lifecycle.preStop"])
def test_pod_template_with_the_host_of_a_probe_or_lifecycle_handler_is_refused(handler: str, at: str) -> None:
    """The kubelet would send the request from the node, and could reach the node's loopback."""

    def problems(request: dict[str, Any]) -> list[str]:
        container: dict[str, Any] = {handler: request}
        for field in reversed(at.split(".")):
            container = {field: container}
        server = Cluster(SMALL)
        template = {"metadata": {"labels": {"host": "a"}}, "spec": {"containers": [{"name": "engine", **container}]}}
        server.spec(podTemplate=template)
        return [problem.path for problem in parse(server.server, ()).problems]

    assert problems({"host": "127.0.0.1", "port": 10248}) == [
        f"spec.podTemplate.spec.containers[0].{at}.{handler}.host"
    ]
    assert problems({"port": 8000}) == []


@pytest.mark.parametrize("name", ["7b-chat", "qwen-api", "qwen-download", "qwen-runner", "qwen-sandbox"])
def test_name_that_no_service_can_have_is_refused(name: str) -> None:
    (problem,) = parse({**Cluster(SMALL).server, "metadata": {"name": name}}, ()).problems
    assert problem.path == "metadata.name"
    assert "must begin with a letter and not end in -api" in problem.message


def test_cluster_that_refuses_workloads_is_reported_and_retried() -> None:
    cluster = Cluster(SPECS["claimed-weights"])
    cluster.refused_kinds = WORKLOAD_KINDS
    cluster.settle()
    assert cluster.condition("Ready")["reason"] == "CannotCreate"
    cluster.refused_kinds = ()
    cluster.now += timedelta(seconds=61)
    cluster.settle()
    assert "StatefulSet/qwen" in kinds(cluster)


def test_unschedulable_server_is_reported_with_the_schedulers_message() -> None:
    words = "0/3 nodes are available: 3 cannot allocate all claims."
    cluster = running(SMALL)
    pod = cluster.objects["Pod", "qwen-0"]["metadata"]["uid"]
    cluster.asked[pod, 0] = ServerContact(
        report=ServerReport(at=cluster.now, paused=False, version=0, checked=True, opened=0)
    )
    cluster.spec(replicas=2)
    cluster.settle()
    cluster.start_pods()
    waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    cluster.objects["Pod", "qwen-1"]["status"] = {"phase": "Pending", "conditions": [waiting]}
    cluster.settle()
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["message"]) == ("True", f"1 of 2 servers are ready; qwen-1 waits: {words}")
    del cluster.objects["Pod", "qwen-0"]
    cluster.settle()
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Unschedulable")
    assert words in ready["message"]


def test_missing_pods_are_reported_with_a_command_that_shows_the_reason() -> None:
    cluster = Cluster(CACHED)
    cluster.settle()
    words = f"kubectl describe job qwen-download -n {NAMESPACE}"
    assert words in cluster.condition("Downloaded")["message"]
    cluster.download_ends()
    cluster.settle()
    ready = cluster.condition("Ready")
    assert f"have no pod yet: kubectl describe statefulset qwen -n {NAMESPACE}" in ready["message"]
    cluster.start_pods()
    cluster.settle()
    assert "no pod yet" not in cluster.condition("Ready")["message"]


def test_no_pod_is_ready_before_its_policy_is_checked() -> None:
    cluster = running(SMALL)
    assert cluster.gates == [""]
    asked = [action.operation.call for action in cluster.look().actions if isinstance(action, Ask)]
    assert asked == [Call.LOOK]
    pod = cluster.objects["Pod", "qwen-0"]["metadata"]["uid"]
    cluster.asked[pod, 0] = ServerContact(
        report=ServerReport(at=cluster.now, paused=False, version=0, checked=True, opened=0)
    )
    cluster.settle()
    assert cluster.gates == ["True"]
    assert cluster.condition("Ready")["status"] == "True"
    [server] = cluster.server["status"]["servers"]
    assert (server["ready"], server["policyVersion"]) == (True, 0)
    assert cluster.server["status"]["url"] == f"http://qwen-api.{NAMESPACE}.svc:8000"


@pytest.mark.parametrize("reason", ["FetchFailed", "RollingBack", "LoadFailed", "NotEnoughServers"])
def test_failed_policy_update_is_one_warning_and_its_end_is_normal(reason: str) -> None:
    cluster = running(SMALL)
    good = cluster.server["status"]
    bad = copy.deepcopy(good)
    [told] = [condition for condition in bad["conditions"] if condition["type"] == "PolicyLoaded"]
    told |= {"status": "False", "reason": reason, "message": "why"}
    assert events_of(cluster.seen(), bad) == (Event("Warning", reason, "why"),)
    cluster.server["status"] = bad
    assert events_of(cluster.seen(), bad) == ()
    assert [(event.type, event.reason) for event in events_of(cluster.seen(), good)] == [("Normal", "Loaded")]


@pytest.mark.parametrize("name", SPECS)
def test_sandboxes_and_unknown_pods_reach_no_port(name: str) -> None:
    server = model_server(SPECS[name])
    for rule in (rule for policy in policies(server, CONFIG) for rule in policy["spec"]["ingress"]):
        assert rule["from"], "an empty list is everybody"
        assert rule["ports"], "an empty list is every port"
        for peer in rule["from"]:
            selector = peer["podSelector"]
            allowed = selector.get("matchLabels", {})
            names_a_role = ROLE_LABEL in allowed or "app.kubernetes.io/component" in allowed
            not_sandbox = {"key": ROLE_LABEL, "operator": "NotIn", "values": [SANDBOX_ROLE]}
            own = "rollout.dev/model-server" in allowed
            assert names_a_role or own or not_sandbox in selector["matchExpressions"]
        control = [port for port in rule["ports"] if port["port"] <= 8001 <= port.get("endPort", port["port"])]
        if control:
            assert [peer["namespaceSelector"] for peer in rule["from"]] == [
                {"matchLabels": {"kubernetes.io/metadata.name": "operators"}}
            ]


CHANGES: list[dict[str, Any]] = [
    {"replicas": 0},
    {"replicas": 3},
    {"engine": {"image": "vllm:next", "version": "0.27.0"}},
    {"podDisruptionBudget": {"maxUnavailable": 2}},
    {"podDisruptionBudget": None},
    {"inferencePool": {"endpointPicker": {"name": "picker"}}},
    {"inferencePool": None},
    {"clients": [{"podSelector": {"matchLabels": {"app": "x"}}}]},
    {"policy": {"version": 9, "uri": "s3://p/9"}},
    {"podTemplate": {"spec": {"hostPID": True}}},
    {"podTemplate": None},
]
HAPPENINGS = [
    "download ends",
    "download fails",
    "pods start",
    "pod goes",
    "objects refused",
    "lost object",
    "time passes",
]


@settings(max_examples=examples(60))
@given(
    spec=st.sampled_from(sorted(SPECS)),
    story=st.lists(st.sampled_from(HAPPENINGS) | st.sampled_from(CHANGES), max_size=12),
    look_between=st.booleans(),
)
def test_plans_converge_and_create_no_object_twice_after_any_events(
    spec: str, story: list[str | dict[str, Any]], look_between: bool
) -> None:
    cluster = Cluster(SPECS[spec])
    for event in story:
        match event:
            case dict():
                cluster.spec(**event)
            case "download ends" | "download fails":
                if ("Job", "qwen-download") in cluster.objects:
                    cluster.download_ends("Complete" if event == "download ends" else "Failed")
            case "pods start":
                cluster.start_pods()
            case "pod goes":
                cluster.objects.pop(("Pod", "qwen-0"), None)
            case "objects refused":
                cluster.refused_kinds = () if cluster.refused_kinds else REFUSABLE_KINDS
            case "lost object":
                cluster.objects.pop(("Service", "qwen-api"), None)
            case "time passes":
                cluster.wait(45)
        if look_between:
            cluster.carry_out(cluster.look())
    cluster.refused_kinds = ()
    cluster.wait(120)
    cluster.settle()
    if cluster.condition("Invalid"):
        return
    assert "Service/qwen-api" in kinds(cluster)
    assert cluster.condition("Ready")["status"] == "False", "nobody was asked, so nobody is ready"
    assert "True" not in cluster.gates


def test_policy_update_waits_for_the_acknowledgements_of_the_runners() -> None:
    cluster = running(SMALL)
    job = {"metadata": {"name": "j", "namespace": NAMESPACE, "uid": "uid-j"}, "spec": {"model": {"serverRef": "qwen"}}}
    cluster.objects["RolloutJob", "j"] = job
    owner = {"kind": "RolloutJob", "name": "j", "uid": "uid-j", "controller": True}
    for index, state in enumerate(("Running", "Draining", "Completed")):
        metadata = {"name": f"j-{index}", "namespace": NAMESPACE, "uid": f"uid-{index}", "ownerReferences": [owner]}
        report = {"index": index, "state": state, "policyUpdate": index}
        cluster.objects["RolloutShard", f"j-{index}"] = {"metadata": metadata, "status": report}
    seen = cluster.seen()
    server, _ = seen.server
    assert server is not None
    assert seen.policy(server).runners == (Runner("uid-j/0", 0), Runner("uid-j/1", 1))


def test_servers_are_updated_by_a_spec_that_became_too_large_to_be_kept() -> None:
    cluster = running(SMALL)
    cluster.server = {**prune("ModelServer", cluster.server), "spec": {}, EXCESS: "has 70000 characters"}
    seen = cluster.seen()
    assert needs_spec(seen)
    assert plan(seen).status is not None
    cluster.server["spec"] = SMALL
    seen = cluster.seen()
    assert not needs_spec(seen)
    assert [task for task in plan(seen).actions if isinstance(task, Ask)], "its servers are not asked"
    cluster.settle()
    assert cluster.condition("Invalid")["message"].endswith("spec: has 70000 characters")


def test_servers_that_sleep_are_not_ready() -> None:
    cluster = running(SMALL)
    pod = cluster.objects["Pod", "qwen-0"]["metadata"]["uid"]

    def report(asleep: bool) -> ServerContact:
        state = ServerReport(at=cluster.now, paused=asleep, version=0, checked=True, opened=0, asleep=asleep)
        return ServerContact(report=state)

    cluster.asked[pod, 0] = report(False)
    cluster.spec(sleep=True)
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    cluster.asked[pod, 0] = report(True)
    cluster.spec(asleep=True)
    cluster.settle()
    assert cluster.server["status"]["policy"]["step"] == "Asleep"
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Asleep")
