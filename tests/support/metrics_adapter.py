"""Runs in a pod: a cluster's API external.metrics.k8s.io with one metric, instead of prometheus-adapter or KEDA.

`rollout_model_calls{model_server}` is the sum over a namespace's runners, which it lists in the API server and reads.
Arguments: certificate and key of its HTTPS port, 8443. Needs only Python.
"""

import json
import re
import ssl
import sys
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

GROUP = "external.metrics.k8s.io/v1beta1"
METRIC = "rollout_model_calls"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SAMPLE = re.compile(r'^rollout_model_calls_(?:in_flight|waiting)\{model_server="([^"]*)"\} (\S+)$', re.MULTILINE)


def runners(namespace: str) -> list[str]:
    """Return the addresses of the running runners."""
    query = urllib.parse.urlencode(
        {"labelSelector": "rollout.dev/role=runner", "fieldSelector": "status.phase=Running"}
    )
    request = urllib.request.Request(
        f"https://kubernetes.default.svc/api/v1/namespaces/{namespace}/pods?{query}",
        headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"},
    )
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=5, context=trusted) as answer:
        return [pod["status"]["podIP"] for pod in json.load(answer)["items"]]


def calls(namespace: str, server: str) -> float:
    """Return the calls to a ModelServer that run or wait."""
    total = 0.0
    for address in runners(namespace):
        try:
            with urllib.request.urlopen(f"http://{address}:9090/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            continue  # it is starting or ending
        total += sum(float(value) for name, value in SAMPLE.findall(text) if name == server)
    return total


def value_list(namespace: str, query: str) -> object:
    """Return the answer for a label selector `model_server=NAME`."""
    [selector] = urllib.parse.parse_qs(query)["labelSelector"]
    server = selector.removeprefix("model_server=")
    item = {
        "metricName": METRIC,
        "metricLabels": {"model_server": server},
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "value": str(round(calls(namespace, server))),
    }
    return {"kind": "ExternalMetricValueList", "apiVersion": GROUP, "metadata": {}, "items": [item]}


RESOURCES = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": GROUP,
    "resources": [
        {"name": METRIC, "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
    ],
}


class Handler(BaseHTTPRequestHandler):
    """Answers the API server's aggregator."""

    def do_GET(self) -> None:
        """Answer the two requests that an autoscaler makes."""
        path, _, query = self.path.partition("?")
        asked = re.fullmatch(rf"/apis/{re.escape(GROUP)}/namespaces/([^/]+)/{METRIC}", path)
        if asked:
            self._send(200, value_list(asked[1], query))
        elif path.rstrip("/") == f"/apis/{GROUP}":
            self._send(200, RESOURCES)
        else:
            self._send(404, {})

    def _send(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*sys.argv[1:])
    with ThreadingHTTPServer(("", 8443), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
