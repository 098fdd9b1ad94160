"""JSON schemas for kubeconform, from what Kubernetes and the Prometheus operator publish as Go modules."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import KUBERNETES

# Its module carries the CustomResourceDefinitions of ServiceMonitor, PodMonitor and PrometheusRule.
PROMETHEUS_OPERATOR = "0.85.0"

GROUPS = (
    *("api__v1", "apis__apps__v1", "apis__batch__v1", "apis__policy__v1", "apis__networking.k8s.io__v1"),
    *("apis__rbac.authorization.k8s.io__v1", "apis__apiextensions.k8s.io__v1"),
    "apis__admissionregistration.k8s.io__v1",
)

Schema = dict[str, Any]


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a schema for every kind that the chart can render."""
    folder = tmp_path_factory.mktemp("schemas")
    for name, schema in (*kubernetes_schemas(), *prometheus_schemas()):
        (folder / name).write_text(json.dumps(schema))
    return folder


def kubernetes_schemas() -> Iterator[tuple[str, Schema]]:
    """The API server's own OpenAPI documents, of the groups that the chart uses."""
    documents = go_module("k8s.io/kubernetes", KUBERNETES) / "api" / "openapi-spec" / "v3"
    for group in GROUPS:
        text = (documents / f"{group}_openapi.json").read_text().replace("#/components/schemas/", "#/definitions/")
        definitions = {name: closed(schema) for name, schema in json.loads(text)["components"]["schemas"].items()}
        for schema in definitions.values():
            for kind in schema.get("x-kubernetes-group-version-kind", ()):
                # A schema that lists several groups (DeleteOptions) is nothing to be installed.
                yield file_name(kind["kind"], kind["group"], kind["version"]), {"definitions": definitions, **schema}


def prometheus_schemas() -> Iterator[tuple[str, Schema]]:
    """The schemas in the Prometheus operator's CustomResourceDefinitions."""
    folder = go_module("github.com/prometheus-operator/prometheus-operator", PROMETHEUS_OPERATOR)
    for plural in ("servicemonitors", "podmonitors", "prometheusrules"):
        path = folder / "example" / "prometheus-operator-crd" / f"monitoring.coreos.com_{plural}.yaml"
        definition = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]
        for version in definition["versions"]:
            schema = closed(version["schema"]["openAPIV3Schema"])
            # The API server has a schema of its own for metadata.
            schema["properties"]["metadata"] = {"type": "object"}
            yield file_name(definition["names"]["kind"], definition["group"], version["name"]), schema


def file_name(kind: str, group: str, version: str) -> str:
    """Return the file name that kubeconform looks for: `deployment-apps-v1.json`, `service-v1.json`."""
    return "-".join(part for part in (kind.lower(), group.split(".")[0], version) if part) + ".json"


def closed(schema: Any) -> Any:
    """Return the schema with unknown fields refused, like the API server's strict field validation."""
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(inner) for key, inner in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        found.setdefault("additionalProperties", False)
    return found


def go_module(path: str, version: str) -> Path:
    """Return a module's files, from the Go module cache or proxy."""
    command = ["go", "mod", "download", "-json", f"{path}@v{version}"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(json.loads(done.stdout)["Dir"])
