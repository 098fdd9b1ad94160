"""Policies on real packets: between pods of one bridge, to Services, to this machine, and to the API server."""

from typing import Any

import pytest

from tests.integration.cluster_harness.pods import PORT, pod, reach, run_pods
from tests.support.cluster import Cluster, eventually

pytestmark = pytest.mark.full


def policy(name: str, namespace: str, app: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"podSelector": {"matchLabels": {"app": app}}, **spec},
    }


def becomes(cluster: Cluster, namespace: str, client: str, expected: dict[str, bool]) -> None:
    """Wait until a pod reaches exactly these addresses, twice in a row, so that a coincidence does not count."""

    def seen() -> dict[str, bool]:
        return {target: answer is not None for target, answer in reach(cluster, namespace, client, *expected).items()}

    eventually(lambda: seen() == expected or None, 60, lambda: f"{client} reaches {seen()}, expected {expected}")
    assert seen() == expected


def test_ingress_is_denied_by_default_and_opened_by_label_namespace_and_named_port(
    cluster: Cluster, namespace: str
) -> None:
    addresses = run_pods(cluster, *(pod(name, namespace) for name in ("server", "friend", "stranger")))
    target = f"{addresses['server']}:{PORT}"
    becomes(cluster, namespace, "stranger", {target: True})
    cluster.apply(policy("closed", namespace, "server", policyTypes=["Ingress"]))
    becomes(cluster, namespace, "stranger", {target: False})
    becomes(cluster, namespace, "friend", {target: False})
    friend = {"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["friend"]}]}}
    opened = {"from": [friend], "ports": [{"port": "echo"}]}
    cluster.apply(policy("open", namespace, "server", policyTypes=["Ingress"], ingress=[opened]))
    becomes(cluster, namespace, "friend", {target: True})
    becomes(cluster, namespace, "stranger", {target: False})
    # The server's own connections are not restricted, and their answers arrive.
    assert reach(cluster, namespace, "server", f"{addresses['friend']}:{PORT}") == {
        f"{addresses['friend']}:{PORT}": addresses["server"]
    }
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    cluster.apply(policy("open", namespace, "server", policyTypes=["Ingress"], ingress=[{"from": [here]}]))
    becomes(cluster, namespace, "stranger", {target: True})
    cluster.kubectl("delete", "networkpolicy", "--all", "-n", namespace)
    becomes(cluster, namespace, "stranger", {target: True})


def test_pod_without_egress_reaches_no_pod_service_dns_storage_or_api_server(cluster: Cluster, namespace: str) -> None:
    addresses = run_pods(cluster, pod("server", namespace), pod("prisoner", namespace))
    cluster.kubectl("expose", "pod", "server", "-n", namespace, "--port", str(PORT))
    service = cluster.get("service", "server", namespace)
    api = cluster.get("service", "kubernetes", "default")
    dns = cluster.get("service", "kube-dns", "kube-system")
    assert service is not None
    assert api is not None
    assert dns is not None
    targets = [
        f"{addresses['server']}:{PORT}",
        f"{service['spec']['clusterIP']}:{PORT}",
        f"{dns['spec']['clusterIP']}:53",
        cluster.details["s3"]["endpoint"].removeprefix("http://"),
        cluster.details["server"].removeprefix("https://"),
        f"{api['spec']['clusterIP']}:443",
    ]
    becomes(cluster, namespace, "prisoner", dict.fromkeys(targets, True))
    cluster.apply(policy("no-egress", namespace, "prisoner", policyTypes=["Egress"]))
    becomes(cluster, namespace, "prisoner", dict.fromkeys(targets, False))
    # Others may still call it: the answers belong to their connections.
    prisoner = f"{addresses['prisoner']}:{PORT}"
    assert reach(cluster, namespace, "server", prisoner) == {prisoner: addresses["server"]}


def test_egress_to_networks_leaves_out_the_exceptions(cluster: Cluster, namespace: str) -> None:
    addresses = run_pods(cluster, *(pod(name, namespace) for name in ("first", "second", "client")))
    block = {"cidr": "0.0.0.0/0", "except": [f"{addresses['second']}/32", "169.254.0.0/16"]}
    rule = {"to": [{"ipBlock": block}], "ports": [{"port": PORT - 10, "endPort": PORT + 10}]}
    cluster.apply(policy("most", namespace, "client", policyTypes=["Egress"], egress=[rule]))
    s3 = cluster.details["s3"]["endpoint"].removeprefix("http://")
    expected = {f"{addresses['first']}:{PORT}": True, f"{addresses['second']}:{PORT}": False, s3: False}
    becomes(cluster, namespace, "client", expected)


def test_kubelet_probe_reaches_an_otherwise_closed_pod(cluster: Cluster, namespace: str) -> None:
    cluster.apply(policy("closed", namespace, "probed", policyTypes=["Ingress", "Egress"]))
    probe = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}
    run_pods(cluster, pod("probed", namespace, container=probe))
    cluster.kubectl("wait", "pod/probed", "-n", namespace, "--for=condition=Ready", "--timeout=60s")


def test_a_closed_pod_reaches_itself_through_its_own_service(cluster: Cluster, namespace: str) -> None:
    cluster.apply(policy("closed", namespace, "alone", policyTypes=["Ingress", "Egress"]))
    run_pods(cluster, pod("alone", namespace))
    cluster.kubectl("expose", "pod", "alone", "-n", namespace, "--port", str(PORT))
    service = cluster.get("service", "alone", namespace)
    assert service is not None
    becomes(cluster, namespace, "alone", {f"{service['spec']['clusterIP']}:{PORT}": True})
