"""A real Prometheus that scrapes a cluster as the chart's ServiceMonitor and PodMonitor ask, through the API server's proxy."""

import contextlib
import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.chart import CHART, Manifest, of_kind, tool
from tests.support.cluster import Cluster, eventually


@dataclass(frozen=True)
class Prometheus:
    """A server that runs."""

    port: int

    def query(self, expression: str) -> list[Manifest]:
        """What an expression is now: a list of series, each with one value."""
        found: list[Manifest] = self._get(f"query?{urllib.parse.urlencode({'query': expression})}")["result"]
        return found

    def rules(self) -> list[Manifest]:
        """The alerting rules with their state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=30) as answer:
            return json.load(answer)["data"]


@contextlib.contextmanager
def scrape(cluster: Cluster, monitors: list[Manifest], folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the chart's monitors and alerts; its data and logs lie in the folder."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        api = free_port()
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "5s"},
            "rule_files": [str(CHART / "files" / "alerts.yaml")],
            "scrape_configs": [scrape_config(monitor, api) for monitor in monitors],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = ["kubectl", "--kubeconfig", str(cluster.kubeconfig), "proxy", "--port", str(api)]
        stack.enter_context(running(command, log))
        command = [
            tool("prometheus"),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        stack.enter_context(running(command, log))
        eventually(lambda: answers(f"http://127.0.0.1:{port}/-/ready") or None, 30, (folder / "log").read_text)
        yield Prometheus(port)


def scrape_config(monitor: Manifest, api: int) -> Manifest:
    """What the Prometheus operator makes of a ServiceMonitor or PodMonitor; but the way leads through a local proxy."""
    spec = monitor["spec"]
    if monitor["kind"] == "PodMonitor":
        role, label, port = "pod", "pod_label", "pod_container_port_name"
        [endpoint], namespaces = spec["podMetricsEndpoints"], spec["namespaceSelector"].get("matchNames", [])
    else:
        role, label, port = "endpointslice", "service_label", "endpointslice_port_name"
        [endpoint], namespaces = spec["endpoints"], [monitor["metadata"]["namespace"]]
    selected = {f"{label}_{key}": value for key, value in spec["selector"]["matchLabels"].items()}
    keep = [
        {"source_labels": [meta(name)], "regex": re.escape(value), "action": "keep"}
        for name, value in {**selected, port: endpoint["port"]}.items()
    ]
    relabel = [
        {"source_labels": rule["sourceLabels"], "target_label": rule["targetLabel"]}
        for rule in endpoint.get("relabelings", ())
    ]
    pod = [meta("namespace"), meta("pod_name"), "__address__"]
    way = [
        {
            "source_labels": pod,
            "regex": "(.+);(.+);.+:([0-9]+)",
            "target_label": "__metrics_path__",
            "replacement": "/api/v1/namespaces/$1/pods/$2:$3/proxy/metrics",
        },
        {"target_label": "__address__", "replacement": f"127.0.0.1:{api}"},
        {"source_labels": [meta("pod_name")], "target_label": "instance"},
        {"source_labels": [meta("pod_name")], "target_label": "pod"},
    ]
    return {
        "job_name": monitor["metadata"]["name"],
        "kubernetes_sd_configs": [
            {"role": role, "api_server": f"http://127.0.0.1:{api}", "namespaces": {"names": namespaces}}
        ],
        "relabel_configs": [*keep, *relabel, *way],
    }


def meta(name: str) -> str:
    """Prometheus' name for a fact about a Kubernetes object."""
    return "__meta_kubernetes_" + re.sub(r"\W", "_", name)


def monitors_of(documents: list[Manifest]) -> list[Manifest]:
    """The chart's ServiceMonitor and PodMonitor."""
    return [*of_kind(documents, "ServiceMonitor"), *of_kind(documents, "PodMonitor")]


@contextlib.contextmanager
def running(command: list[str], log: Any) -> Iterator[None]:
    """A child process, ended at the end."""
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a server answers there with success."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
