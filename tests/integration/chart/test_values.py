"""Values that a user may set: Helm itself refuses wrong ones, with the name of the field."""

import pytest

from tests.support.chart import template

# A setting, and what the refusal must name.
WRONG = {
    "replica=2": "replica",
    "replicas=two": "replicas",
    "replicas=11": "replicas",
    "images.operater=x": "operater",
    "images.pullPolicy=Sometimes": "pullPolicy",
    "images.runtime=": "images",
    "watch.namespace={team-a}": "namespace",
    "watch.namespaces={Team_A}": "namespaces",
    "defaults.output.url=s3://bucket": "url",
    "defaults.output.uri=./runs": "uri",
    "defaults.output.secretRef=storage": "uri",
    "defaults.model.endpoint.baseURL=vllm:8000": "baseURL",
    "defaults.model.endpoint.apiKeyFrom.env=KEY": "env",
    "defaults.model.scripted=x": "scripted",
    "privilegedNamespace={a}": "privilegedNamespace",
    "resources.limit.memory=1Gi": "limit",
    "resources.limits.memory=1GB": "memory",
    "tolerations[0].effects=NoSchedule": "effects",
    "podDisruptionBudget.minAvailable=1": "minAvailable",
    "networkPolicy.enable=true": "enable",
    "budgets.createsPerSecond=0": "createsPerSecond",
    "budgets.creates=5": "creates",
    "workers=0": "workers",
    "resyncSeconds=1.5": "resyncSeconds",
    "runner.memory=lots": "memory",
    "crds.keep=true": "keep",
    "monitoring.scraping=true": "scraping",
    "monitoring.labels.release=7": "release",
    "serviceAccount.name=x": "serviceAccount",
    "viewer.ingress.hosts={a.example}": "hosts",
    "viewer.ingress.host=a.example/runs": "host",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_is_refused_by_name(setting: str) -> None:
    done = template("--set", setting)
    assert done.returncode != 0
    assert WRONG[setting] in done.stderr


def test_a_cluster_too_old_for_user_namespaces_is_refused() -> None:
    done = template("--kube-version", "1.32.9")
    assert done.returncode != 0
    assert "1.33" in done.stderr
