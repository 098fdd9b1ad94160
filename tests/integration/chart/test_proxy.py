"""The session proxy that the chart installs: its settings, and values that contradict each other."""

from pathlib import Path

import pytest
import yaml

from agent_runtime.proxy.serve import ADMIN_KEY_VARIABLE, POD_IP_VARIABLE, ProxySettings, admin_key
from rollout_api.keys import MODEL_KEY_VARIABLE
from tests.support.chart import RELEASE, Manifest, of_kind, render, template

VALUES = Path(__file__).parent / "values"
PROXY = f"{RELEASE}-proxy"


def proxy(name: str) -> tuple[ProxySettings, Manifest]:
    """Return its settings as the proxy reads them, and its container."""
    documents = render("--values", str(VALUES / f"{name}.yaml"))
    [config] = [each for each in of_kind(documents, "ConfigMap") if each["metadata"]["name"] == PROXY]
    [deployment] = [each for each in of_kind(documents, "Deployment") if each["metadata"]["name"] == PROXY]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return ProxySettings.model_validate(yaml.safe_load(config["data"]["proxy.yaml"])), container


def test_values_reach_the_proxy() -> None:
    settings, container = proxy("proxy")
    assert settings.store == "s3://rollouts/sessions"
    assert settings.endpoint is not None
    assert settings.endpoint.name == "Qwen/Qwen3-8B"
    assert container["ports"] == [{"name": "http", "containerPort": settings.port}]
    assert settings.host == "0.0.0.0"
    environ = {each["name"]: each["valueFrom"] for each in container["env"]}
    assert environ == {
        POD_IP_VARIABLE: {"fieldRef": {"fieldPath": "status.podIP"}},
        ADMIN_KEY_VARIABLE: {"secretKeyRef": {"name": "proxy-key", "key": "admin-key"}},
        MODEL_KEY_VARIABLE: {"secretKeyRef": {"name": "model-key", "key": "api-key"}},
    }
    assert container["envFrom"] == [{"secretRef": {"name": "storage"}}]


def test_key_in_the_values_becomes_a_secret_of_the_proxy() -> None:
    settings, container = proxy("relay")
    assert settings.relay is not None
    documents = render("--values", str(VALUES / "relay.yaml"), "--set", "admission.enabled=false")
    [secret] = of_kind(documents, "Secret")
    [reference] = [each["valueFrom"] for each in container["env"] if each["name"] == ADMIN_KEY_VARIABLE]
    assert reference == {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "admin-key"}}
    key = secret["stringData"]["admin-key"]
    assert admin_key(None, {ADMIN_KEY_VARIABLE: key}) == key


def test_no_proxy_is_installed_unasked() -> None:
    assert [each for each in render() if "proxy" in each["metadata"]["name"]] == []


# Settings beside those of the file, and what the refusal must name.
WRONG = {
    ("proxy", "proxy.output=null"): "proxy.output",
    ("proxy", "proxy.endpoint=null"): "exactly one of endpoint and relay",
    ("proxy", "proxy.relay.model=m"): "exactly one of endpoint and relay",
    ("proxy", "proxy.adminKeySecret="): "exactly one of adminKey and adminKeySecret",
    ("proxy", "proxy.adminKey=0123456789abcdef"): "exactly one of adminKey and adminKeySecret",
    ("relay", "proxy.replicas=2"): "a worker connects to one replica",
    ("relay", "proxy.adminKey=short"): "adminKey",
    ("proxy", "proxy.output.uri=./sessions"): "uri",
    ("proxy", "proxy.networkPolicy.from={a}"): "from",
}


@pytest.mark.parametrize(("name", "setting"), WRONG)
def test_values_that_do_not_fit_together_are_refused_in_words(name: str, setting: str) -> None:
    done = template("--values", str(VALUES / f"{name}.yaml"), "--set", setting)
    assert done.returncode != 0
    assert WRONG[name, setting] in done.stderr
