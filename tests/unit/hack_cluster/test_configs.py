import ipaddress
import json
import tomllib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hack.cluster.harness import configs, kwok
from hack.cluster.harness.layout import MAX_NODES, SLOTS, Layout

layouts = st.builds(Layout, st.just("test"), st.integers(0, SLOTS - 1))


@given(layouts, st.integers(0, MAX_NODES - 1))
def test_pods_get_addresses_of_their_node_and_names_from_the_clusters_dns(layout: Layout, index: int) -> None:
    node = layout.node(index)
    bridge = json.loads(configs.cni(node))["plugins"][0]
    assert bridge["ipam"]["ranges"][0][0] == {"subnet": node.pod_range, "gateway": node.address}
    dns = json.loads(configs.kubelet(node))["clusterDNS"]
    services = [item["spec"]["clusterIP"] for item in configs.cluster_objects(layout) if item["kind"] == "Service"]
    assert dns == services
    assert ipaddress.ip_address(dns[0]) in ipaddress.ip_network(layout.service_range)


def test_node_has_an_address_for_every_pod() -> None:
    node = Layout("test", 0).node(0)
    limit = json.loads(configs.kubelet(node))["maxPods"]
    # Network, broadcast and node addresses are reserved, and as many pods again may still be ending.
    assert ipaddress.ip_network(node.pod_range).num_addresses - 3 >= 2 * limit


def test_containerd_gets_the_nodes_network_and_the_built_runc() -> None:
    node = Layout("test", 0).node(1)
    runtime = tomllib.loads(configs.containerd(node, Path("/programs")))["plugins"]["io.containerd.cri.v1.runtime"]
    assert runtime["cni"]["conf_dir"] == f"{node.state}/cni"
    assert runtime["containerd"]["runtimes"]["runc"]["options"]["BinaryName"] == "/programs/runc"


def test_fake_node_has_a_taint_against_pods_and_supports_user_namespaces() -> None:
    node = kwok.fake_node(7)
    assert [taint["effect"] for taint in node["spec"]["taints"]] == ["NoSchedule"]
    assert all(handler["features"]["userNamespaces"] for handler in node["status"]["runtimeHandlers"])
