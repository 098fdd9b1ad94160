"""A pod template cannot grant privileges: accepted ones are judged by a check that is independent of the
implementation.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_api.on_cluster.sandbox_pod import OVERLAY_CAPABILITIES, Choice, Identity, pod_for
from rollout_api.on_cluster.template import merge, merge_problems, refusals, without_nulls
from rollout_api.sandbox import SandboxSpec, WorkspaceMode
from tests.unit.rollout_operator.sandbox.objects import CONFIG, KEY, Json

WHO = Identity("s", "lab", "uid-s", KEY, {"rollout.dev/job": "j", "rollout.dev/job-uid": "uid-j"}, "abcd1234")
PLAIN, OVERLAY = (Choice(mode, "R", "") for mode in (WorkspaceMode.PLAIN, WorkspaceMode.OVERLAY))


def refused(template: Json) -> list[str]:
    return [str(problem) for problem in refusals(without_nulls(template), "spec.podTemplate")]


def made(template: Json, choice: Choice = PLAIN, **spec: Any) -> Json:
    """Return the pod with this template merged into it."""
    sandbox = SandboxSpec.model_validate({"image": "busybox:1", **spec})
    return pod_for(WHO, sandbox, choice, CONFIG.images, without_nulls(template), image_volume=True)


def made_if_it_fits(template: Json, choice: Choice = PLAIN) -> Json | None:
    """Return the same; None if the template leaves the executor no memory."""
    try:
        return made(template, choice)
    except ValueError as error:
        if "resources.limits.memory" in str(error):
            return None
        raise


def rights(pod: Json, capabilities: list[str]) -> Iterator[str]:
    """Return what the pod can do that a sandbox must not, except these capabilities of its executor."""
    spec = pod["spec"]
    for field in ("serviceAccountName", "serviceAccount", "hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if spec.get(field):
            yield field
    if spec.get("automountServiceAccountToken") is not False:
        yield "service account token"
    if spec.get("hostUsers") not in (False, None) or (capabilities and spec.get("hostUsers") is not False):
        yield "host users"
    if spec.get("initContainers") or spec.get("ephemeralContainers") or len(spec["containers"]) != 1:
        yield "further containers"
    if spec.get("resourceClaims") or spec.get("securityContext") != {"seccompProfile": {"type": "RuntimeDefault"}}:
        yield "pod security context"
    for volume in spec["volumes"]:
        if set(volume) - {"name", "emptyDir", "image"}:
            yield f"volume {volume}"
    (container,) = spec["containers"]
    context = container["securityContext"]
    if context.get("privileged") or context.get("capabilities", {}).get("add", []) != capabilities:
        yield "capabilities"
    if not capabilities and (context.get("allowPrivilegeEscalation") is not False or context.get("procMount")):
        yield "privilege escalation"
    if container.get("envFrom") or any("valueFrom" in variable for variable in container.get("env", [])):
        yield "Secrets in the environment"
    if container["command"][0] != "/.rollout/executor/executor" or container.get("args") or container.get("lifecycle"):
        yield "another command"
    if spec["restartPolicy"] != "Never" or spec["activeDeadlineSeconds"] != 86_400:
        yield "its own clock"
    if pod["metadata"]["labels"]["rollout.dev/job-uid"] != "uid-j" or pod["metadata"]["name"] != "s":
        yield "another's identity"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    if mounts["/.rollout/executor"] != "rollout-executor" or mounts["/.rollout/state"] != "rollout-state":
        yield "another executor"


# All known ways to grant rights to a pod, as fragments of a pod spec, of a container, or of metadata.
SPEC_DANGERS: list[Json] = [
    {"serviceAccountName": "admin"},
    {"serviceAccount": "admin"},
    {"automountServiceAccountToken": True},
    {"hostNetwork": True},
    {"hostPID": True},
    {"hostIPC": True},
    {"hostUsers": True},
    {"shareProcessNamespace": True},
    {"securityContext": {"runAsUser": 0}},
    {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    {"restartPolicy": "Always"},
    {"activeDeadlineSeconds": 10**9},
    {"runtimeClassName": "runc-privileged"},
    {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
    {"volumes": [{"name": "v", "secret": {"secretName": "model-key"}}]},
    {"volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]},
    {"volumes": [{"name": "v", "csi": {"driver": "secrets-store.csi.k8s.io"}}]},
    {"volumes": [{"name": "v", "configMap": {"name": "c"}}]},
    {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
    {"volumes": [{"name": "v", "nfs": {"server": "s", "path": "/"}}]},
    {"volumes": [{"name": "v", "emptyDir": {}, "hostPath": {"path": "/"}}]},
    {"volumes": [{"name": "rollout-executor", "emptyDir": {}}]},
    {"volumes": [{"name": "rollout-state", "image": {"reference": "evil:1"}}]},
    {"initContainers": [{"name": "i", "image": "evil:1"}]},
    {"ephemeralContainers": [{"name": "e", "image": "evil:1"}]},
    {"containers": [{"name": "sidecar", "image": "evil:1"}]},
    {"containers": [{"image": "evil:1"}]},
    {"resourceClaims": [{"name": "gpu"}]},
    {"nodeName": "control-plane"},
    {"aFieldOfTomorrow": {"rights": "all"}},
]
CONTAINER_DANGERS: list[Json] = [
    {"command": ["sh"]},
    {"args": ["--mode"]},
    {"image": "evil:1"},
    {"lifecycle": {"postStart": {"exec": {"command": ["sh"]}}}},
    {"livenessProbe": {"exec": {"command": ["sh"]}}},
    {"envFrom": [{"secretRef": {"name": "model-key"}}]},
    {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "model-key", "key": "k"}}}]},
    {"securityContext": {"privileged": True}},
    {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}},
    {"securityContext": {"procMount": "Unmasked"}},
    {"securityContext": {"allowPrivilegeEscalation": True}},
    {"volumeMounts": [{"name": "rollout-state", "mountPath": "/mine"}]},
    {"volumeMounts": [{"name": "data", "mountPath": "/.rollout/executor"}]},
    {"volumeMounts": [{"name": "data", "mountPath": "/.rollout/../.rollout/executor/"}]},
    {"volumeMounts": [{"name": "data", "mountPath": "//.rollout"}]},
    {"volumeMounts": [{"name": "data", "mountPath": "/"}]},
    {"volumeMounts": [{"name": "data", "mountPath": "/x", "mountPropagation": "Bidirectional"}]},
    {"volumeDevices": [{"name": "data", "devicePath": "/dev/sda"}]},
    {"resources": {"claims": [{"name": "gpu"}]}},
    {"restartPolicy": "Always"},
]
METADATA_DANGERS: list[Json] = [
    {"labels": {"rollout.dev/job-uid": "uid-of-another-job"}},
    {"labels": {"rollout.dev/network": "open"}},
    {"labels": {"app.kubernetes.io/managed-by": "me"}},
    {"annotations": {"rollout.dev/overlay": "Supported: "}},
    {"annotations": {"container.apparmor.security.beta.kubernetes.io/sandbox": "unconfined"}},
    {"annotations": {"k8s.v1.cni.cncf.io/networks": "storage"}},
    {"annotations": {"io.kubernetes.cri-o.Devices": "/dev/kvm"}},
    {"labels": {"azure.workload.identity/use": "true"}},
    {"name": "another"},
    {"namespace": "kube-system"},
    {"ownerReferences": []},
    {"finalizers": ["never/goes"]},
]
DANGERS: list[Json] = [
    *({"spec": danger} for danger in SPEC_DANGERS),
    *(
        {"spec": {"containers": [{"name": "sandbox", **danger}], "volumes": [{"name": "data", "emptyDir": {}}]}}
        for danger in CONTAINER_DANGERS
    ),
    *({"metadata": danger} for danger in METADATA_DANGERS),
]
HARMLESS: Json = {
    "metadata": {"labels": {"team": "rl"}, "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}},
    "spec": {
        "nodeSelector": {"pool": "cpu"},
        "affinity": {"podAntiAffinity": {}},
        "tolerations": [{"key": "pool", "operator": "Exists"}],
        "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1}],
        "priorityClassName": "low",
        "schedulerName": "binpack",
        "imagePullSecrets": [{"name": "registry"}],
        "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
        "volumes": [
            {"name": "data", "emptyDir": {"medium": "Memory"}},
            {"name": "set", "image": {"reference": "data:1"}},
        ],
        "containers": [
            {
                "name": "sandbox",
                "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "2Gi"}, "requests": {"cpu": "1"}},
                "env": [{"name": "A", "value": "b"}],
                "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
            }
        ],
    },
}


@pytest.mark.parametrize("template", DANGERS, ids=str)
def test_field_that_grants_privileges_is_refused_by_name(template: Json) -> None:
    said = refused(template)
    assert said
    assert all(problem.startswith("spec.podTemplate.") for problem in said)


def test_a_second_container_is_refused_for_being_one_before_anything_in_it() -> None:
    told = refused({"spec": {"containers": [{"name": "sandbox"}, {"name": "sidecar", "image": "mine:1"}]}})
    assert told[0].startswith("spec.podTemplate.spec.containers[1].name: is 'sidecar', expected 'sandbox'")


def test_scheduling_and_resource_fields_of_a_template_are_allowed() -> None:
    assert refused(HARMLESS) == []
    pod = made(HARMLESS)
    assert list(rights(pod, [])) == []
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert spec["nodeSelector"] == {"pool": "cpu"}
    assert spec["schedulerName"] == "binpack"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1, "memory": "2Gi"}
    assert container["resources"]["requests"]["cpu"] == "1"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
        "/data",
        "/.rollout/executor",
        "/.rollout/state",
    }
    assert pod["metadata"]["labels"]["team"] == "rl"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from(["", "sandbox", "x", "/", "/.rollout"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "spec", "key"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def mutated(parts: list[Json]) -> Json:
    template: Json = {}
    for part in parts:
        template = merge(template, part)
    return template


PART = st.sampled_from([HARMLESS, *DANGERS])
NONSENSE = st.builds(
    lambda path, value: {path[0]: {path[1]: value}},
    st.sampled_from(
        [("spec", name) for name in ("containers", "volumes", "tolerations", "nodeSelector", "hostPID", "affinity")]
        + [("metadata", name) for name in ("labels", "annotations", "name")]
    ),
    JSON,
)
TEMPLATES = st.lists(PART | NONSENSE, max_size=3).map(mutated) | JSON.filter(lambda value: isinstance(value, dict))


@given(TEMPLATES, st.sampled_from([(PLAIN, []), (OVERLAY, list(OVERLAY_CAPABILITIES))]))
@example({"spec": {"containers": None, "volumes": [None]}}, (PLAIN, []))
@example({"spec": {"automountServiceAccountToken": None, "restartPolicy": None}}, (PLAIN, []))
def test_accepted_templates_give_a_pod_no_privileges(template: Json, mode: tuple[Choice, list[str]]) -> None:
    if refused(template):
        return
    choice, capabilities = mode
    pod = made_if_it_fits(template, choice)
    assert pod is None or list(rights(pod, capabilities)) == []


@given(TEMPLATES)
def test_arbitrary_templates_are_accepted_or_refused_by_field(template: Json) -> None:
    cleaned = without_nulls(template)
    for problem in [*refusals(cleaned, "spec.podTemplate"), *merge_problems(cleaned, "spec.podTemplate")]:
        assert problem.path.startswith("spec.podTemplate")


@given(TEMPLATES)
def test_privileged_template_keeps_the_executor_and_the_owner(template: Json) -> None:
    cleaned = without_nulls(template)
    if merge_problems(cleaned, "t"):
        return
    if (pod := made_if_it_fits(template)) is None:
        return
    container = next(c for c in pod["spec"]["containers"] if c["name"] == "sandbox")
    assert container["command"][:2] == ["/.rollout/executor/executor", "--config-json"]
    assert "args" not in container
    assert pod["metadata"]["name"] == "s"
    assert pod["metadata"]["labels"]["rollout.dev/job-uid"] == "uid-j"
    assert pod["metadata"]["ownerReferences"][-1]["uid"] == "uid-s"
    assert pod["spec"]["restartPolicy"] == "Never"


def test_a_privileged_template_is_merged_as_it_is() -> None:
    pod = made(
        {"spec": {"hostNetwork": True, "containers": [{"name": "sandbox", "securityContext": {"privileged": True}}]}}
    )
    assert pod["spec"]["hostNetwork"] is True
    assert pod["spec"]["containers"][0]["securityContext"]["privileged"] is True


def test_named_things_are_merged_by_name_and_other_lists_replaced() -> None:
    base = {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}], "command": ["x", "y"]}, {"name": "b"}]}
    over = {"containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}], "command": ["z"]}]}
    assert merge(base, over) == {
        "containers": [
            {"name": "a", "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}], "command": ["z"]},
            {"name": "b"},
        ]
    }


def test_default_tolerations_are_added_unless_the_template_has_the_same_taint() -> None:
    tolerations = made(HARMLESS)["spec"]["tolerations"]
    assert [toleration["key"] for toleration in tolerations][-1] == "pool"
    assert len(tolerations) == 3
    longer = {
        "key": "node.kubernetes.io/not-ready",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 300,
    }
    seconds = [t["tolerationSeconds"] for t in made({"spec": {"tolerations": [longer]}})["spec"]["tolerations"]]
    assert sorted(seconds) == [30, 300]


NAMED = st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3).map(
    lambda values: [{"name": name, "value": value} for name, value in values.items()]
)
OBJECTS = st.recursive(
    st.integers() | NAMED,
    lambda inner: st.dictionaries(st.sampled_from(["containers", "env", "command", "x"]), inner, max_size=3),
    max_leaves=5,
).filter(lambda value: isinstance(value, dict))


@given(OBJECTS, OBJECTS)
def test_merging_the_same_template_twice_changes_nothing(base: Json, over: Json) -> None:
    once = merge(base, over)
    assert merge(once, over) == once


def test_entries_without_a_name_are_left_for_the_api_server_to_refuse() -> None:
    assert merge({"containers": [{"name": "a"}, 1]}, {"containers": [{"name": ["b"]}]})["containers"][-1] == {
        "name": ["b"]
    }


def test_spread_constraints_of_one_topology_key_are_both_kept() -> None:
    strict = {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}
    lenient = {"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2}
    merged = merge({"topologySpreadConstraints": [lenient]}, {"topologySpreadConstraints": [strict]})
    assert merged == {"topologySpreadConstraints": [lenient, strict]}


def test_ports_of_one_number_and_two_protocols_are_both_kept() -> None:
    tcp, udp = {"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}
    named = {"containerPort": 53, "protocol": "TCP", "name": "dns"}
    assert merge({"ports": [tcp]}, {"ports": [udp, named]}) == {"ports": [named, udp]}


@pytest.mark.parametrize(
    "key",
    [
        *(
            "istio.io/rev",
            "inject.istio.io/templates",
            "instrumentation.opentelemetry.io/inject-python",
            "aadpodidbinding",
        ),
        *("consul.hashicorp.com/connect-inject", "admission.datadoghq.com/enabled", "k8s.ovn.org/pod-networks"),
        *("cpu-load-balancing.crio.io", "run.oci.keep_original_groups", "gke-gcsfuse/volumes"),
    ],
)
def test_keys_by_which_software_injects_into_a_pod_are_refused(key: str) -> None:
    (problem,) = refused({"metadata": {"annotations": {key: "x"}}})
    assert problem.startswith(f"spec.podTemplate.metadata.annotations[{key}]: refused")
