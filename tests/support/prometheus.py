"""A real Prometheus that scrapes a cluster by the chart's ServiceMonitor and PodMonitor, through the API server's
proxy.

Debian's Prometheus lacks discovery in Kubernetes, so a small server here provides the same targets over HTTP.
"""

import contextlib
import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.support.chart import CHART, Manifest, of_kind, tool
from tests.support.cluster import Cluster, eventually
from tests.support.ports import free_ports


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    port: int

    def query(self, expression: str) -> list[Manifest]:
        """Return the current value of an expression: a list of series, each with one value."""
        found: list[Manifest] = self._get(f"query?{urllib.parse.urlencode({'query': expression})}")["result"]
        return found

    def rules(self) -> list[Manifest]:
        """Return the alerting rules with their state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str) -> Any:
        return get(f"http://127.0.0.1:{self.port}/api/v1/{path}")["data"]


@contextlib.contextmanager
def scrape(cluster: Cluster, monitors: list[Manifest], folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus with the chart's monitors and alerts; its data and logs are in the folder."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        api, port = free_ports(2)
        command = [cluster.program("kubectl"), "--kubeconfig", str(cluster.kubeconfig), "proxy", "--port", str(api)]
        stack.enter_context(running(command, log))
        discovery = stack.enter_context(serve_discovery(f"http://127.0.0.1:{api}"))
        config = {
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "5s"},
            "rule_files": [str(CHART / "files" / "alerts.yaml")],
            "scrape_configs": [scrape_config(monitor, api, discovery) for monitor in monitors],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            tool("prometheus"),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        stack.enter_context(running(command, log))
        eventually(lambda: answers(f"http://127.0.0.1:{port}/-/ready") or None, 30, (folder / "log").read_text)
        yield Prometheus(port)


def scrape_config(monitor: Manifest, api: int, discovery: str) -> Manifest:
    """Return the Prometheus operator's configuration for a ServiceMonitor or PodMonitor, with a local proxy in between."""
    spec = monitor["spec"]
    if monitor["kind"] == "PodMonitor":
        role, label, [endpoint] = "pods", "pod_label", spec["podMetricsEndpoints"]
    else:
        role, label, [endpoint] = "services", "service_label", spec["endpoints"]
    selected = {f"{label}_{key}": value for key, value in spec["selector"]["matchLabels"].items()}
    keep = [
        {"source_labels": [meta(name)], "regex": re.escape(value), "action": "keep"}
        for name, value in {**selected, "port_name": endpoint["port"]}.items()
    ]
    relabel = [
        {"source_labels": rule["sourceLabels"], "target_label": rule["targetLabel"]}
        for rule in endpoint.get("relabelings", ())
    ]
    way = [
        {
            "source_labels": [meta("namespace"), meta("pod_name"), "__address__"],
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
        "http_sd_configs": [{"url": f"{discovery}/{role}", "refresh_interval": "5s"}],
        "relabel_configs": [*keep, *relabel, *way],
    }


@contextlib.contextmanager
def serve_discovery(api: str) -> Iterator[str]:
    """Serve `/pods` and `/services`: the targets of a cluster whose API answers at that URL."""
    targets = {"/pods": partial(pod_targets, api), "/services": partial(service_targets, api)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(targets[self.path]()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def pod_targets(api: str) -> list[Manifest]:
    """Return every port of every running pod, as Prometheus' own discovery describes it."""
    return [
        target(pod["status"]["podIP"], port, pod["metadata"]["namespace"], pod["metadata"]["name"], "pod_label", pod)
        for pod in get(f"{api}/api/v1/pods")["items"]
        if pod["status"]["phase"] == "Running" and "podIP" in pod["status"]
        for container in pod["spec"]["containers"]
        for port in (
            {"name": port.get("name", ""), "port": port["containerPort"]} for port in container.get("ports", ())
        )
    ]


def service_targets(api: str) -> list[Manifest]:
    """Return every port of every pod behind a Service. Slices have the labels of their Service."""
    return [
        target(
            one["addresses"][0], port, part["metadata"]["namespace"], one["targetRef"]["name"], "service_label", part
        )
        for part in get(f"{api}/apis/discovery.k8s.io/v1/endpointslices")["items"]
        for one in part["endpoints"] or ()
        if "targetRef" in one
        for port in part["ports"]
    ]


def target(address: str, port: Manifest, namespace: str, pod: str, label: str, labelled: Manifest) -> Manifest:
    """Return one address to scrape."""
    facts = {"namespace": namespace, "pod_name": pod, "port_name": port["name"]}
    labels = {f"{label}_{key}": value for key, value in labelled["metadata"].get("labels", {}).items()}
    return {
        "targets": [f"{address}:{port['port']}"],
        "labels": {meta(name): value for name, value in {**facts, **labels}.items()},
    }


def get(url: str) -> Any:
    """Return a JSON answer."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def meta(name: str) -> str:
    """Return Prometheus' name for a property of a Kubernetes object."""
    return "__meta_kubernetes_" + re.sub(r"\W", "_", name)


def monitors_of(documents: list[Manifest]) -> list[Manifest]:
    """Return the chart's ServiceMonitor and PodMonitor."""
    return [*of_kind(documents, "ServiceMonitor"), *of_kind(documents, "PodMonitor")]


@contextlib.contextmanager
def running(command: list[str], log: Any) -> Iterator[None]:
    """Run a child process, which is ended with the context."""
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    """Whether a server answers there with success."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
