"""Files of the chart that repeat facts of other files agree with them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agent_runtime.engine.scheduling.shard import Shard
from agent_runtime.runner.metrics import RunnerMetrics
from agent_runtime.runner.report import ShardTally
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.version import VERSION
from rollout_operator.cache import Cache
from rollout_operator.metrics import Metrics
from tests.support.chart import CHART, ROOT, Manifest, alerts, metrics_in

VALUES: Manifest = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Manifest = json.loads((CHART / "values.schema.json").read_text())
PANELS = [
    panel for row in yaml.safe_load((CHART / "files" / "dashboard.yaml").read_text())["rows"] for panel in row["panels"]
]
DOCUMENT = (ROOT / "docs" / "monitoring.md").read_text()


def test_the_chart_carries_the_one_copy_of_the_crds() -> None:
    assert (CHART / "files" / "crds").resolve() == ROOT / "crds"


def test_a_chart_installs_the_images_of_its_own_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == VERSION
    images = {name: VALUES["images"][name] for name in ("operator", "runtime", "executor")}
    assert images == {name: f"agent-rollouts-{name}:{VERSION}" for name in images}


def objects(schema: Any, path: str = "") -> Iterator[tuple[str, Manifest]]:
    if isinstance(schema, dict):
        if "object" in schema.get("type", ()):
            yield path, schema
        for key, inner in schema.items():
            yield from objects(inner, f"{path}/{key}")


@pytest.mark.parametrize(
    ("path", "node"), [(path, node) for path, node in objects(SCHEMA) if path != "/properties/global"]
)
def test_a_typo_is_refused_at_every_level_of_the_values(path: str, node: Manifest) -> None:
    assert "additionalProperties" in node, f"{path}: a mapping without a rule for unknown keys takes any"
    assert node["additionalProperties"] is False or node["additionalProperties"] == {"type": "string"}


def described(values: Any, schema: Manifest, path: str) -> Iterator[str]:
    """Return settings that are in only one of the two."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if not isinstance(values, dict) or "properties" not in schema:
        return
    for key in values.keys() ^ schema["properties"].keys():
        yield f"{path}{key}"
    for key in values.keys() & schema["properties"].keys():
        yield from described(values[key], schema["properties"][key], f"{path}{key}.")


def test_every_setting_of_the_schema_is_in_values_yaml() -> None:
    # No default for these: without them the scheduler and the kubelet decide.
    quiet = {
        f"{pod}resources.{name}"
        for pod in ("", "proxy.", "viewer.")
        for name in ("requests.ephemeral-storage", "limits.ephemeral-storage", "limits.cpu")
    }
    assert set(described(VALUES, SCHEMA, "")) - quiet == {"global"}


def test_the_defaults_are_those_of_the_operator_itself() -> None:
    config = OperatorConfig.model_validate(
        {"images": {"runtime": "r", "executor": "e"}, "lease": {"namespace": "n"}}
    ).wire()
    for field in ("runner", "budgets", "workers", "resyncSeconds", "watch", "privilegedNamespaces"):
        assert VALUES[field] == config[field]


def exported() -> set[str]:
    """Return the names of all samples that operator and runner export."""
    runner = RunnerMetrics(ShardTally(Shard(0, 1), 1), ["bash"], restarts=0).exposition()
    operator = generate_latest(Metrics(Cache(), lambda: True).registry)
    names = set()
    for text in (runner, operator):
        for family in text_string_to_metric_families(text.decode()):
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}[family.type]
            names |= {family.name + suffix for suffix in suffixes}
    return names


QUERIES = {f"panel {panel['title']}": query["expr"] for panel in PANELS for query in panel["queries"]} | {
    f"alert {alert['alert']}": alert["expr"] for alert in alerts()
}


@pytest.mark.parametrize("name", QUERIES)
def test_no_query_uses_a_missing_metric(name: str) -> None:
    assert metrics_in(QUERIES[name])
    assert metrics_in(QUERIES[name]) <= exported()


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_alert_links_to_its_remedy(alert: Manifest) -> None:
    assert re.search(rf"^### {alert['alert']}$", DOCUMENT, re.MULTILINE)
    assert alert["annotations"]["runbook"] == f"docs/monitoring.md#{alert['alert'].lower()}"
    assert {"summary", "description"} < set(alert["annotations"])
    assert alert["labels"]["severity"] in ("warning", "critical")


def test_panels_have_unique_names_and_descriptions() -> None:
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    assert all(panel["description"] and panel["unit"] for panel in PANELS)
