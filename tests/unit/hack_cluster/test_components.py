from pathlib import Path

import pytest

from hack.cluster.harness.components import Component, control_plane, dra_driver, find, node_components
from hack.cluster.harness.layout import Layout

PROGRAMS = Path("/programs")


def flags(component: Component) -> str:
    return " ".join(component.argv)


def test_components_of_another_cluster_have_other_folders_and_addresses() -> None:
    one, other = Layout("one", 1), Layout("other", 2)
    for component in (*control_plane(one, PROGRAMS), *node_components(one.node(1), PROGRAMS)):
        for foreign in (str(other.state), "10.102.", "10.202."):
            assert foreign not in flags(component)


def test_each_node_has_its_own_files() -> None:
    layout = Layout("test", 0)
    for component in node_components(layout.node(1), PROGRAMS):
        assert "/nodes/0/" not in flags(component)
        assert "node-0.kubeconfig" not in flags(component)


@pytest.mark.parametrize("name", ["apiserver", "etcd", "s3", "scheduler", "controller-manager", "kubelet", "kwok"])
def test_every_component_that_tests_stop_is_found_by_its_name(name: str) -> None:
    assert find(Layout("test", 0), name, 0, PROGRAMS).name == name


def test_unknown_component_of_a_node_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="expected one of containerd, kube-proxy, kubelet, network-policy"):
        find(Layout("test", 0), "etcd", 1, PROGRAMS)


def test_device_driver_of_a_node_names_that_node() -> None:
    layout = Layout("test", 0)
    assert [f"--node-name=test-{index}" in dra_driver(layout.node(index), PROGRAMS).argv for index in (0, 1)] == [
        True
    ] * 2
