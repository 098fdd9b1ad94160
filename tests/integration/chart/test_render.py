"""The chart's objects, rendered by Helm: for review (golden files), against the API server's schemas, and for the
security of a cluster.
"""

import base64
import json
import os
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_api.crd import definitions
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.rollout_job import RolloutJob
from rollout_operator.admission import CHECKS
from rollout_operator.config import load_config
from rollout_operator.rollout_job.runner_objects import access
from rollout_operator.world import NOT_SANDBOX, OPERATOR_LABELS
from tests.support.chart import CHART, NAMESPACE, RELEASE, ROOT, Manifest, of_kind, render, template, tool
from tests.support.documentation import blocks

FOLDER = Path(__file__).parent
SETS = sorted(path.stem for path in (FOLDER / "values").glob("*.yaml"))


def rendered(name: str) -> list[Manifest]:
    return render("--values", str(FOLDER / "values" / f"{name}.yaml"))


@pytest.fixture(params=SETS)
def documents(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


@pytest.mark.parametrize("name", SETS)
def test_helm_lint_finds_no_problem(name: str) -> None:
    command = [tool("helm"), "lint", "--strict", str(CHART), "--values", str(FOLDER / "values" / f"{name}.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SETS)
def test_installed_objects_change_only_with_the_golden_files(name: str) -> None:
    """The golden files have all objects except the definitions. ROLLOUT_GOLDEN=write writes them again, for a review of
    the diff.
    """
    kept = [document for document in rendered(name) if document["kind"] != "CustomResourceDefinition"]
    text = yaml.safe_dump_all(kept, sort_keys=True, width=120, allow_unicode=True)
    text = re.sub(r"(caBundle|ca.crt|tls.crt|tls.key): \S+", r"\1: (made by Helm)", text)
    golden = FOLDER / "golden" / f"{name}.yaml"
    if os.environ.get("ROLLOUT_GOLDEN") == "write":
        golden.write_text(text)
    assert golden.read_text() == text


def test_the_api_server_knows_every_field(documents: list[Manifest], schemas: Path) -> None:
    location = f"{schemas}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    text = "\n---\n".join(map(json.dumps, documents))
    command = [tool("kubeconform"), "-strict", "-summary", "-output", "json", "-schema-location", location]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    assert not answer.get("resources"), answer["resources"]
    assert answer["summary"] == {"valid": len(documents), "invalid": 0, "errors": 0, "skipped": 0}


def test_schema_refuses_a_misspelt_field(schemas: Path) -> None:
    service = of_kind(render(), "Service")[0]
    service["spec"]["selectors"] = service["spec"].pop("selector")
    location = f"{schemas}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    command = [tool("kubeconform"), "-strict", "-schema-location", location]
    done = subprocess.run(command, input=yaml.safe_dump(service), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "selectors" in done.stdout


def test_definitions_are_kept_at_uninstall_and_equal_the_models() -> None:
    installed = {document["metadata"]["name"]: document for document in of_kind(render(), "CustomResourceDefinition")}
    for expected in definitions().values():
        found = installed.pop(expected["metadata"]["name"])
        assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        del found["metadata"]["labels"]
        assert found == expected
    assert not installed
    assert not of_kind(rendered("namespaced"), "CustomResourceDefinition")


def test_nothing_can_block_an_uninstall(documents: list[Manifest]) -> None:
    for document in documents:
        assert "finalizers" not in document["metadata"]
        assert "helm.sh/hook" not in document["metadata"].get("annotations", {})


def test_two_releases_never_share_an_object_of_the_cluster() -> None:
    """Otherwise Helm refuses the second release, or an uninstall removes rights of the other one."""
    names = []
    for namespace, release in (("a-b", "c"), ("a", "b-c"), ("a", "b"), ("a", "b-view")):
        command = [tool("helm"), "template", release, str(CHART), "--namespace", namespace, "--kube-version", "1.35.0"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = [document for document in yaml.safe_load_all(done.stdout) if document]
        for kind in ("ClusterRole", "ValidatingAdmissionPolicy", "ValidatingWebhookConfiguration"):
            names += [(kind, document["metadata"]["name"]) for document in of_kind(found, kind)]
    assert len(names) == len(set(names)) == 20


def test_admission_trusts_the_operators_certificate_and_can_be_disabled() -> None:
    documents = render()
    [secret] = of_kind(documents, "Secret")
    [webhooks] = of_kind(documents, "ValidatingWebhookConfiguration")
    assert [each["name"].split(".")[0] for each in webhooks["webhooks"]] == list(CHECKS)
    authority = ssl.create_default_context(cadata=base64.b64decode(secret["data"]["ca.crt"]).decode())
    assert len(authority.get_ca_certs()) == 1
    for webhook in webhooks["webhooks"]:
        assert webhook["clientConfig"]["caBundle"] == secret["data"]["ca.crt"]
        assert webhook["failurePolicy"] == "Ignore"
    off = render("--set", "admission.enabled=false")
    assert not of_kind(off, "ValidatingWebhookConfiguration") + of_kind(off, "Secret")
    assert f"{RELEASE}-admission" not in yaml.safe_dump(off)


def rules(documents: list[Manifest], *kinds: str) -> list[Manifest]:
    return [rule for kind in kinds for document in of_kind(documents, kind) for rule in document["rules"]]


def test_no_role_has_wildcards_or_permissions_to_escalate(documents: list[Manifest]) -> None:
    found = rules(documents, "ClusterRole", "Role")
    assert found
    for rule in found:
        words = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert not [word for word in words if "*" in word]
        assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
        assert not {"pods/exec", "pods/attach", "pods/portforward", "serviceaccounts/token"} & set(rule["resources"])
        if "secrets" in rule["resources"]:
            assert set(rule["verbs"]) == {"get", "create"}, "listing Secrets would read all of them"


def test_operator_has_exactly_the_documented_permissions() -> None:
    rights = (ROOT / "docs" / "operator.md").read_text().partition("## Rights")[2].partition("\n## ")[0]
    listed: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`.*) \|$", rights, re.MULTILINE):
        resources, *verbs = row.split("|")
        for name in re.findall("`([^`]+)`", resources):
            listed.setdefault(name.split(".")[0], set()).update(re.findall(r"\w+", " ".join(verbs)))
    granted: dict[str, set[str]] = {}
    documents = render("--set", "userRoles=false")
    for rule in rules(documents, "ClusterRole", "Role"):
        for name in rule["resources"]:
            granted.setdefault(name, set()).update(rule["verbs"])
    assert granted == listed


def test_an_operator_of_some_namespaces_has_no_rights_in_the_others() -> None:
    documents = rendered("namespaced")
    assert rules(documents, "ClusterRole") == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch", "patch"]}
    ]
    namespaces = [role["metadata"]["namespace"] for role in of_kind(documents, "Role")]
    assert sorted(namespaces) == [NAMESPACE, "team-a", "team-b"]
    everywhere = rules(rendered("default"), "ClusterRole")
    for role in of_kind(documents, "Role"):
        if role["metadata"]["namespace"] != NAMESPACE:
            assert [rule for rule in role["rules"] if rule not in everywhere] == []


def grants(held: list[Manifest], asked: Manifest) -> bool:
    return all(
        any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in held
            if "resourceNames" not in rule
        )
        for group in asked["apiGroups"]
        for resource in asked["resources"]
        for verb in asked["verbs"]
    )


JOB = """
apiVersion: rollout.dev/v1alpha1
kind: RolloutJob
metadata: {name: j, namespace: team-a, uid: u}
spec:
  tasks: {inline: [{name: t, prompt: p, verifier: {commands: ["true"]}}]}
  agent: {type: Nop}
  output: {uri: "s3://b/p"}
"""


def test_the_operator_may_give_runners_their_role() -> None:
    """Kubernetes refuses a Role with rights that its creator lacks."""
    held = rules(rendered("default"), "ClusterRole")
    config = OperatorConfig.model_validate({"images": {"runtime": "r", "executor": "e"}, "lease": {"namespace": "n"}})
    made = access(RolloutJob.model_validate(yaml.safe_load(JOB)), config)
    [role] = [body for body in made if body["kind"] == "Role"]
    assert [rule for rule in role["rules"] if not grants(held, rule)] == []


def pod_templates(documents: list[Manifest]) -> list[Manifest]:
    return [document["spec"]["template"] for document in documents if "template" in document.get("spec", {})]


def test_every_pod_meets_the_restricted_pod_security_standard(documents: list[Manifest]) -> None:
    templates = pod_templates(documents)
    assert templates
    for pod in (each["spec"] for each in templates):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all(set(volume) - {"name"} <= {"configMap", "emptyDir", "secret"} for volume in pod["volumes"])
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"requests", "limits"} <= set(container["resources"])


def named(documents: list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [document for document in of_kind(documents, kind) if document["metadata"]["name"] == name]
    return found


def configuration(documents: list[Manifest], folder: Path) -> OperatorConfig:
    config = named(documents, "ConfigMap", RELEASE)
    path = folder / "operator.yaml"
    path.write_text(config["data"]["operator.yaml"])
    return load_config(path)


def test_the_operator_reads_the_configuration(documents: list[Manifest], tmp_path: Path) -> None:
    config = configuration(documents, tmp_path)
    [container] = named(documents, "Deployment", RELEASE)["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.admission is not None
    assert ports == {"metrics": config.metrics_port, "health": config.health_port, "admission": config.admission.port}
    leases = [rule for rule in rules(documents, "Role") if rule["resources"] == ["leases"]]
    assert [rule["resourceNames"] for rule in leases if "resourceNames" in rule] == [[config.lease.name]]


def test_model_servers_know_the_operators_pods(documents: list[Manifest]) -> None:
    """The servers' NetworkPolicy admits only the operator to the control port."""
    labels = [deployment["spec"]["template"]["metadata"]["labels"] for deployment in of_kind(documents, "Deployment")]
    assert [OPERATOR_LABELS.items() <= found.items() for found in labels].count(True) == 1


def test_values_reach_the_operator(tmp_path: Path) -> None:
    config = configuration(rendered("production"), tmp_path)
    assert config.images.runtime == "mirror.example:5000/rollouts/runtime:0.1.0"
    assert (config.workers, config.budgets.creates_per_second, config.budgets.deletes_per_second) == (32, 100, 50)
    assert config.defaults.model is not None
    assert config.defaults.model.endpoint is not None
    assert config.defaults.model.endpoint.name == "Qwen/Qwen3-8B"
    config = configuration(rendered("namespaced"), tmp_path)
    assert config.watch.namespaces == ["team-a", "team-b"]
    assert config.privileged_namespaces == ["team-b"]
    assert config.defaults.output is not None
    assert config.defaults.output.secret_ref == "storage"


def checksum(*settings: str) -> str:
    [deployment] = of_kind(render(*settings), "Deployment")
    found: str = deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
    return found


def test_changed_configuration_restarts_only_operators() -> None:
    assert checksum("--set", "workers=8") != checksum()
    assert checksum("--set", "monitoring.alerts=true") == checksum()


def test_selectors_find_the_pods_they_are_for(documents: list[Manifest]) -> None:
    pods = {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in pod_templates(documents)}
    for document in documents:
        spec: dict[str, Any] = document.get("spec") or {}
        match document["kind"]:
            case "Deployment" | "PodDisruptionBudget" | "ServiceMonitor":
                selector = spec["selector"]["matchLabels"]
            case "Service":
                selector = spec["selector"]
            case "NetworkPolicy":
                selector = spec["podSelector"]["matchLabels"]
            case _:
                continue
        meant = document["metadata"]["labels"]["app.kubernetes.io/component"]
        found = [component for component, pod in pods.items() if selector.items() <= pod["metadata"]["labels"].items()]
        assert found == [meant]


def test_viewer_admits_no_sandbox_of_a_listed_namespace() -> None:
    [policy] = (p for p in of_kind(rendered("viewer"), "NetworkPolicy") if p["metadata"]["name"].endswith("-viewer"))
    peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    assert [peer["podSelector"] for peer in peers] == [{"matchExpressions": [NOT_SANDBOX]}]


def test_values_of_the_page_about_the_viewer_render(tmp_path: Path) -> None:
    """The first block has all values. Each other one replaces some of them."""
    shown = [block for block in blocks(ROOT / "docs" / "viewer-for-a-team.md") if block.text.startswith("viewer:")]
    files = [tmp_path / f"{block.line}.yaml" for block in shown]
    for block, file in zip(shown, files, strict=True):
        file.write_text(block.text)
        documents = render("--values", str(files[0]), "--values", str(file))
        values = yaml.safe_load(block.text)["viewer"]
        (ingress,) = (found for found in of_kind(documents, "Ingress"))
        (policy,) = (p for p in of_kind(documents, "NetworkPolicy") if p["metadata"]["name"].endswith("-viewer"))
        assert ingress["spec"]["ingressClassName"] == values["ingress"].get("className", "nginx"), block.place
        assert ingress["metadata"].get("annotations", {}) == values["ingress"].get("annotations", {}), block.place
        (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
        service = values["ingress"].get("service", f"{RELEASE}-viewer")
        assert path["backend"]["service"]["name"] == service, block.place
        assert all(name in json.dumps(policy["spec"]["ingress"]) for name in values["fromNamespaces"]), block.place


@pytest.mark.parametrize("setting", ["viewer.ingress.host=", "viewer.fromNamespaces=null"])
def test_ingress_that_cannot_work_is_refused(setting: str) -> None:
    done = template("--values", str(FOLDER / "values" / "viewer.yaml"), "--set", setting)
    assert done.returncode != 0
    assert setting.rstrip("=").removesuffix("=null") in done.stderr


@pytest.mark.parametrize("name", ["default", "production"])
def test_operator_admits_no_sandbox_to_its_metrics(name: str) -> None:
    [policy] = (p for p in of_kind(rendered(name), "NetworkPolicy") if p["metadata"]["name"] == RELEASE)
    [rule] = (rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == "metrics")
    assert [peer["podSelector"] for peer in rule["from"]] == [{"matchExpressions": [NOT_SANDBOX]}]


def test_two_releases_in_one_cluster_do_not_share_a_name() -> None:
    def cluster_wide(namespace: str) -> set[str]:
        found = template("--namespace", namespace, "--set", "crds.install=false").stdout
        return {
            f"{document['kind']} {document['metadata']['name']}"
            for document in yaml.safe_load_all(found)
            if "namespace" not in document["metadata"]
        }

    assert not cluster_wide("team-a") & cluster_wide("team-b")
