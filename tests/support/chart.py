"""The Helm chart in tests: rendered by the real Helm, its tools from the cluster harness's cache."""

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "agent-rollouts"
RELEASE = "agent-rollouts"
NAMESPACE = "agent-rollouts"
KUBERNETES = "1.35.4"

Manifest = dict[str, Any]


@functools.cache
def tool(name: str) -> str:
    """Return the path of helm, kubeconform, promtool or prometheus, which is built or unpacked if missing."""
    folder = subprocess.run([ROOT / "hack" / "cluster" / "build"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return str(Path(folder.strip()) / name)


@functools.cache
def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Return the output of `helm template`."""
    command = [tool("helm"), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", KUBERNETES]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


def render(*arguments: str) -> list[Manifest]:
    """Return the chart's objects."""
    done = template(*arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]


def of_kind(documents: list[Manifest], kind: str) -> list[Manifest]:
    """Return the objects of a kind."""
    return [document for document in documents if document["kind"] == kind]


def alerts() -> list[Manifest]:
    """Return the alerting rules."""
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> Manifest:
    """Return Grafana's JSON, as the chart renders it."""
    documents = render("--set", "monitoring.dashboard=true")
    [config] = [document for document in of_kind(documents, "ConfigMap") if "agent-rollouts.json" in document["data"]]
    model: Manifest = json.loads(config["data"]["agent-rollouts.json"])
    return model


def dashboard_queries() -> dict[str, str]:
    """Return the dashboard's queries by panel and number, with Grafana's variables filled in: all jobs, a rate over one
    minute.
    """
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$job", ".+").replace("$__rate_interval", "1m")
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


METRIC = re.compile(r"\brollout_[a-z_]+\b")


def metrics_in(query: str) -> set[str]:
    """Return the names of our metrics in a query. `rollout_job` is the label that the PodMonitor adds."""
    return set(METRIC.findall(query)) - {"rollout_job"}
