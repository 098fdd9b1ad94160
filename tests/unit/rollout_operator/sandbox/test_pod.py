"""The pod of a Sandbox: its programs, its rights, and its executor's configuration."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.config import read_config
from rollout_api.base import quantity_value
from rollout_api.cluster import executor_token, token_sha256
from rollout_api.on_cluster.sandbox_pod import Choice, Identity, pod_for
from rollout_api.sandbox import SandboxSpec, WorkspaceMode
from tests.unit.rollout_operator.sandbox.objects import CONFIG, KEY, Json

WHO = Identity("s", "lab", "uid-s", KEY, {}, "abcd1234")
OVERLAY, PLAIN = Choice(WorkspaceMode.OVERLAY, "Supported", ""), Choice(WorkspaceMode.PLAIN, "NotAsked", "asked")


def made(choice: Choice = OVERLAY, template: Json | None = None, *, image_volume: bool = True, **spec: Any) -> Json:
    sandbox = SandboxSpec.model_validate({"image": "busybox:1", "workspaces": {"perSandbox": 8}, **spec})
    return pod_for(WHO, sandbox, choice, CONFIG.images, template or {}, image_volume=image_volume)


def container(pod: Json) -> Json:
    (found,) = pod["spec"]["containers"]
    return dict(found)


def told(pod: Json) -> Json:
    """Return the executor's configuration after Kubernetes has expanded its command."""
    launcher, option, text = container(pod)["command"]
    assert (launcher, option) == ("/.rollout/executor/executor", "--config-json")
    config: Json = json.loads(text.replace("$$", "$"))
    return config


def test_the_pod_carries_the_digest_of_the_token_and_neither_token_nor_key() -> None:
    token = executor_token(KEY, "s", "uid-s")
    text = json.dumps(made())
    assert told(made())["tokenSha256"] == token_sha256(token)
    assert token not in text
    assert KEY not in text


@pytest.mark.parametrize("choice", [OVERLAY, PLAIN])
def test_executor_accepts_the_generated_configuration(choice: Choice) -> None:
    spec: Json = {"resources": {"memory": "1Gi", "disk": "2Gi"}, "user": "1000:1000", "idleSeconds": 60}
    pod = made(choice, **spec)
    config = read_config(json.dumps(told(pod)))
    places = 8 if choice == OVERLAY else 1
    assert (config.listen, config.idle_seconds, config.host.state_dir) == ("tcp:0.0.0.0:8470", 60, "/.rollout/state")
    assert (config.host.mode, config.host.places, config.host.user) == (choice.mode.value, places, "1000:1000")
    assert (config.host.memory_bytes, config.host.disk_bytes) == (places * 2**30, places * 2**31)


def test_a_plain_pod_has_no_capability_and_cannot_gain_any() -> None:
    pod = made(PLAIN)
    assert container(pod)["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert "hostUsers" not in pod["spec"]


def test_capabilities_of_an_overlay_pod_are_limited_to_its_user_namespace() -> None:
    pod = made(OVERLAY)
    assert pod["spec"]["hostUsers"] is False
    assert "privileged" not in container(pod)["securityContext"]


@pytest.mark.parametrize("choice", [OVERLAY, PLAIN])
def test_no_identity_in_the_cluster_no_services_in_the_environment_no_restart(choice: Choice) -> None:
    spec = made(choice)["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert "serviceAccountName" not in spec


def test_a_plain_pod_starts_as_the_user_that_it_cannot_become_later() -> None:
    assert container(made(PLAIN, user="1000:2000"))["securityContext"]["runAsUser"] == 1000
    assert container(made(PLAIN, user="1000:2000"))["securityContext"]["runAsGroup"] == 2000
    assert container(made(PLAIN, user="1000"))["securityContext"]["runAsNonRoot"] is True
    assert container(made(PLAIN, user="0"))["securityContext"]["runAsNonRoot"] is False
    assert "runAsUser" not in container(made(PLAIN, user="agent"))["securityContext"]


@given(st.text(alphabet="$()AB {}", max_size=20))
def test_variable_is_passed_literally(value: str) -> None:
    (variable,) = container(made(env=[{"name": "A", "value": value}]))["env"]
    # Kubernetes' own rule: `$$` is `$`, and `$(NAME)` only counts behind an even number of them.
    assert variable["value"].count("$") == 2 * value.count("$")
    assert variable["value"].replace("$$", "$") == value


def test_image_is_unchanged_and_the_executor_is_in_a_read_only_image_volume() -> None:
    pod = made(image="registry/task@sha256:abc")
    assert container(pod)["image"] == "registry/task@sha256:abc"
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["rollout-executor"]["image"] == {"reference": "executor:1", "pullPolicy": "IfNotPresent"}
    mounts = {mount["name"]: mount for mount in container(pod)["volumeMounts"]}
    assert mounts["rollout-executor"] == {
        "name": "rollout-executor",
        "mountPath": "/.rollout/executor",
        "readOnly": True,
    }
    assert "initContainers" not in pod["spec"]


def test_without_image_volumes_an_init_container_without_rights_copies_the_executor() -> None:
    pod = made(image_volume=False, resources={"cpu": "1", "memory": "256Mi"})
    (init,) = pod["spec"]["initContainers"]
    assert init["resources"] == pod["spec"]["containers"][0]["resources"], "a quota may need limits of each container"
    assert (init["image"], init["command"]) == ("executor:1", ["/executor", "--copy-to", "/.rollout/executor"])
    assert init["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["rollout-executor"] == {"name": "rollout-executor", "emptyDir": {}}


def test_limit_of_the_pod_is_above_the_limit_for_its_workspaces() -> None:
    pod = made(resources={"memory": "256Mi", "disk": "1Gi"})
    limits = container(pod)["resources"]["limits"]
    assert quantity_value(limits["memory"]) > told(pod)["memoryBytes"] == 8 * 256 * 2**20
    assert quantity_value(limits["ephemeral-storage"]) > told(pod)["diskBytes"]
    state = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "rollout-state")
    assert quantity_value(state["emptyDir"]["sizeLimit"]) > told(pod)["diskBytes"]


def test_executor_enforces_the_limit_of_a_template() -> None:
    template = {"spec": {"containers": [{"name": "sandbox", "resources": {"limits": {"memory": "1Gi"}}}]}}
    assert told(made(template=template))["memoryBytes"] < 2**30
    assert told(made(template=template, resources={"memory": "16Mi"}))["memoryBytes"] == 8 * 16 * 2**20


@pytest.mark.parametrize("limit", ["32Mi", "1", "lots"])
def test_a_limit_too_small_for_the_executor_is_refused_by_name(limit: str) -> None:
    template = {"spec": {"containers": [{"name": "sandbox", "resources": {"limits": {"memory": limit}}}]}}
    with pytest.raises(ValueError, match=r"containers\[sandbox\]\.resources\.limits\.memory: .*"):
        made(template=template)


def test_overlay_affinity_keeps_that_of_the_template() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchFields": [{"key": "metadata.name"}]}, {}]}
    preferred = [{"weight": 1, "preference": {"matchExpressions": [zone]}}]
    wanted = {
        "requiredDuringSchedulingIgnoredDuringExecution": required,
        "preferredDuringSchedulingIgnoredDuringExecution": preferred,
    }
    template = {"spec": {"affinity": {"nodeAffinity": wanted, "podAffinity": {}}}}
    offers = {"key": "userns.rollout.dev/kata", "operator": "DoesNotExist"}
    kata: Json = {"runtimeClassName": "kata"}

    auto = made(OVERLAY, template, **kata)["spec"]["affinity"]
    assert auto["podAffinity"] == {}
    assert auto["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == required
    assert auto["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == [
        *preferred,
        {"weight": 100, "preference": {"matchExpressions": [offers]}},
    ]
    overlay = made(OVERLAY, template, workspaces={"mode": "Overlay"}, **kata)["spec"]["affinity"]["nodeAffinity"]
    assert overlay["preferredDuringSchedulingIgnoredDuringExecution"] == preferred
    assert overlay["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [
        {"matchExpressions": [zone, offers]},
        {"matchFields": [{"key": "metadata.name"}], "matchExpressions": [offers]},
        {},  # It matches no node.
    ]
    assert made(PLAIN, template, **kata)["spec"]["affinity"]["nodeAffinity"] == wanted


def test_pod_tolerates_a_lost_node_for_30_seconds_and_has_a_lifetime() -> None:
    spec = made(lifetimeSeconds=100)["spec"]
    assert {toleration["tolerationSeconds"] for toleration in spec["tolerations"]} == {30}
    assert spec["activeDeadlineSeconds"] == 100
