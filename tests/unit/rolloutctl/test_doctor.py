"""The doctor names each problem of a job and its remedy, and never reports as broken what it cannot see."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rolloutctl.commands import doctor_checks as checks
from rolloutctl.commands.doctor_checks import Finding, Refusal, State

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NO_RIGHT = Refusal(
    403, 'nodes is forbidden: User "jane" cannot list resource "nodes" in API group "" at the cluster scope'
)
NOT_FOUND = Refusal(404, "not found")
POD_SECURITY = Refusal(403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true')
CONFIG = """
images: {runtime: runtime:1, executor: executor:1}
lease: {namespace: agents, name: rollouts}
watch: {namespaces: [team]}
"""


def only(findings: Any) -> Finding:
    (finding,) = list(findings)
    assert isinstance(finding, Finding)
    return finding


def deployment(ready: int = 1) -> dict[str, Any]:
    metadata = {"name": "rollouts", "namespace": "agents"}
    return {"metadata": metadata, "spec": {"replicas": 2}, "status": {"readyReplicas": ready}}


def lease(age: timedelta = timedelta(seconds=2), holder: str = "rollouts-1") -> dict[str, Any]:
    renewed = (NOW - age).isoformat().replace("+00:00", "Z")
    return {"spec": {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}}


def node(
    name: str, *, user_namespaces: bool = True, runtime: str = "containerd://2.1.0", **spec: Any
) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": spec,
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "runtimeHandlers": [{"name": "", "features": {"userNamespaces": user_namespaces}}],
            "nodeInfo": {"containerRuntimeVersion": runtime},
        },
    }


def namespace(level: str = "restricted") -> dict[str, Any]:
    return {"metadata": {"name": "team", "labels": {"pod-security.kubernetes.io/enforce": level}}}


@pytest.mark.parametrize(
    ("major", "minor", "state"), [("1", "35", State.OK), ("1", "33+", State.OK), ("1", "32", State.FAIL)]
)
def test_old_cluster_is_reported_before_an_installation(major: str, minor: str, state: State) -> None:
    assert checks.version({"major": major, "minor": minor, "gitVersion": f"v{major}.{minor}.0"}).state is state


def test_an_api_server_that_does_not_answer_points_to_the_kubeconfig() -> None:
    finding = checks.version(Refusal(0, "connection refused"))
    assert finding.state is State.FAIL
    assert "KUBECONFIG" in finding.advice


def test_a_missing_definition_is_named() -> None:
    good = {"status": {"conditions": [{"type": "Established", "status": "True"}]}}
    assert checks.definitions({"rolloutjobs": good, "sandboxes": good}).state is State.OK
    finding = checks.definitions({"rolloutjobs": good, "sandboxes": NOT_FOUND})
    assert (finding.state, "sandboxes.rollout.dev" in finding.message) == (State.FAIL, True)


def test_definition_with_a_name_conflict_is_not_installed() -> None:
    conditions = [
        {"type": "NamesAccepted", "status": "False", "message": '"sb" is already in use'},
        {"type": "Established", "status": "False"},
    ]
    finding = checks.definitions({"sandboxes": {"status": {"conditions": conditions}}})
    assert finding.state is State.FAIL
    assert "already in use" in finding.message


def test_working_operator_passes_the_checks() -> None:
    config = checks.config_of({"data": {"operator.yaml": CONFIG}})
    findings = checks.operator({"items": [deployment()]}, config, lease(), "team", NOW)
    assert [finding.state for finding in findings] == [State.OK, State.OK]


@pytest.mark.parametrize(
    ("deployments", "found_lease", "place", "words"),
    [
        ([], lease(), "team", "is not installed"),
        ([deployment(ready=0)], lease(), "team", "has no ready pod"),
        ([deployment()], NOT_FOUND, "team", "no replica has ever taken the lease"),
        ([deployment()], lease(holder=""), "team", "no replica holds the lease"),
        ([deployment()], lease(timedelta(minutes=5)), "team", "has not renewed it for 300 s"),
        ([deployment()], lease(), "other", "watches only namespaces team, not other"),
    ],
)
def test_broken_operator_is_reported_with_the_reason(
    deployments: Any, found_lease: Any, place: str, words: str
) -> None:
    config = checks.config_of({"data": {"operator.yaml": CONFIG}})
    findings = checks.operator({"items": deployments}, config, found_lease, place, NOW)
    (failed,) = (finding for finding in findings if finding.state is State.FAIL)
    assert words in failed.message
    assert failed.advice


def test_two_operators_for_one_namespace_are_reported() -> None:
    findings = checks.operator({"items": [deployment(), deployment()]}, None, lease(), "team", NOW)
    assert (findings[0].state, findings[0].message) == (State.WARN, "is installed 2 times: agents, agents")


def test_nodes_that_cannot_do_overlay_are_named() -> None:
    answer = {"items": [node("new"), node("old", user_namespaces=False, runtime="containerd://1.7.2")]}
    overlay, volumes = checks.nodes(answer)
    assert (overlay.state, volumes.state) == (State.WARN, State.WARN)
    assert "1 of 2 nodes" in overlay.message
    assert "old (containerd://1.7.2)" in overlay.message
    assert "init container" in volumes.message


def test_nodes_that_accept_no_sandbox_are_not_counted() -> None:
    tainted = node("gpu", user_namespaces=False, taints=[{"key": "gpu", "effect": "NoSchedule"}])
    cordoned = node("old", user_namespaces=False, unschedulable=True)
    overlay, _ = checks.nodes({"items": [node("new"), tainted, cordoned]})
    assert overlay.state is State.OK
    assert only(checks.nodes({"items": [cordoned]})).state is State.FAIL


def test_a_cluster_without_user_namespaces_still_runs_jobs() -> None:
    overlay, _ = checks.nodes({"items": [node("old", user_namespaces=False)]})
    assert overlay.state is State.WARN
    assert "one pod for each rollout" in overlay.advice


@pytest.mark.parametrize(
    ("overlay", "plain", "as_user", "states", "words"),
    [
        ({}, {}, {}, [State.OK], "are admitted (Pod Security: restricted)"),
        (POD_SECURITY, {}, {}, [State.WARN], "Overlay sandbox pods are refused"),
        (POD_SECURITY, POD_SECURITY, {}, [State.WARN, State.WARN], "without a numeric user are refused"),
        (POD_SECURITY, POD_SECURITY, POD_SECURITY, [State.FAIL], "violates PodSecurity"),
        (NO_RIGHT, NO_RIGHT, NO_RIGHT, [State.WARN], "you may not read"),
    ],
)
def test_admission_report_names_the_sandboxes_that_can_run(
    overlay: Any, plain: Any, as_user: Any, states: list[State], words: str
) -> None:
    findings = list(checks.admission(namespace(), overlay, plain, as_user))
    assert [finding.state for finding in findings] == states
    assert words in findings[0].message


def test_missing_namespace_is_reported() -> None:
    finding = only(checks.admission(NOT_FOUND, NOT_FOUND, NOT_FOUND, NOT_FOUND))
    assert (finding.state, finding.message) == (State.FAIL, "the namespace does not exist")


def test_enforcement_of_network_policies_is_never_claimed_without_a_reason() -> None:
    names = [{"metadata": {"name": "cilium"}}]
    assert checks.isolation({"items": names}).state is State.OK
    assert checks.isolation({"items": [{"metadata": {"name": "kube-proxy"}}]}).state is State.WARN
    assert checks.isolation(NO_RIGHT).state is State.WARN


def test_a_secret_that_is_missing_is_named_with_the_field_that_wants_it() -> None:
    answers: dict[str, tuple[str, Any]] = {
        "store": ("spec.output.secretRef", {}),
        "keys": ("spec.model.endpoint.apiKeyFrom", NOT_FOUND),
    }
    there, missing = checks.secrets(answers, "team")
    assert (there.state, missing.state) == (State.OK, State.FAIL)
    assert "keys, which spec.model.endpoint.apiKeyFrom names, does not exist" in missing.message


def test_only_the_right_to_apply_jobs_is_indispensable() -> None:
    granted = dict.fromkeys(checks.RIGHTS, True)
    assert only(checks.rights(granted)).state is State.OK
    without_log = granted | {checks.RIGHTS[5]: False}
    assert only(checks.rights(without_log)).state is State.WARN
    without_create = granted | {checks.RIGHTS[0]: False}
    assert only(checks.rights(without_create)).state is State.FAIL


def test_sandboxes_that_fell_back_to_plain_are_reported_once_with_the_reason() -> None:
    def sandbox(*conditions: dict[str, Any]) -> dict[str, Any]:
        return {"status": {"conditions": list(conditions)}}

    failed = {"type": "Overlay", "status": "False", "reason": "TrialFailed", "message": "mount was refused"}
    asked = {"type": "Overlay", "status": "False", "reason": "NotAsked", "message": ""}
    ready = {"type": "Ready", "status": "True", "reason": "Running"}
    answer = {"items": [sandbox(failed, ready), sandbox(failed, ready), sandbox(asked, ready), {}]}
    assert only(checks.running(answer)).message == "2 run in Plain mode: TrialFailed: mount was refused"


def test_checks_without_permission_warn_and_do_not_fail() -> None:
    findings = [
        checks.definitions({"rolloutjobs": NO_RIGHT}),
        *checks.operator(NO_RIGHT, None, NO_RIGHT, "team", NOW),
        *checks.nodes(NO_RIGHT),
        *checks.secrets({"store": ("spec.output.secretRef", NO_RIGHT)}, "team"),
        *checks.running(NO_RIGHT),
    ]
    assert {finding.state for finding in findings} == {State.WARN}
