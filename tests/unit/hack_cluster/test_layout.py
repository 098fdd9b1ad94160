import ipaddress
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hack.cluster.harness.layout import MAX_NODES, SLOTS, Layout, LayoutError, State, choose_slot, parse_state

slots = st.integers(0, SLOTS - 1)


def networks(layout: Layout) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(text) for text in (layout.pod_range, layout.service_range)]


@given(slots, slots)
def test_two_clusters_share_no_address_and_no_link(one: int, other: int) -> None:
    a, b = Layout("a", one), Layout("b", other)
    overlap = any(first.overlaps(second) for first, second in itertools.product(networks(a), networks(b)))
    assert overlap == (one == other)
    assert (a.link == b.link) == (one == other)
    assert a.state != b.state


@given(slots)
def test_nodes_share_no_address_with_each_other_or_this_machine(slot: int) -> None:
    layout = Layout("test", slot)
    nodes = [layout.node(index) for index in range(MAX_NODES)]
    ranges = [ipaddress.IPv4Network(node.pod_range) for node in nodes]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(ranges, 2))
    for node, own in zip(nodes, ranges, strict=True):
        assert own.subnet_of(ipaddress.IPv4Network(layout.pod_range))
        assert ipaddress.IPv4Address(node.address) in own
        assert ipaddress.IPv4Address(layout.host) not in own
    assert len({node.cgroup for node in nodes}) == MAX_NODES


@given(slots)
def test_names_of_links_are_as_short_as_the_kernel_wants_them(slot: int) -> None:
    layout = Layout("a-long-cluster-name", slot)
    assert all(len(name) <= 15 for name in (layout.link, *(layout.node(index).link for index in range(MAX_NODES))))


@given(st.sets(slots, max_size=SLOTS - 1))
def test_a_new_cluster_gets_a_slot_that_no_other_has(taken: set[int]) -> None:
    assert choose_slot(taken, []) not in taken


def test_a_new_cluster_keeps_off_the_networks_of_this_machine() -> None:
    assert choose_slot([], ["default", "172.16.0.0/12"]) == 0
    assert choose_slot([], ["default", "192.0.2.0/24", "10.100.7.0/24", "10.201.0.1"]) == 2
    with pytest.raises(LayoutError, match="no free address range"):
        choose_slot([], ["10.0.0.0/8"])


@pytest.mark.parametrize("name", ["", "Test", "a_b", "-a", "a-", "1a", "../x", "a" * 21])
def test_a_name_that_could_not_be_a_folder_and_a_node_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match="cluster name"):
        Layout(name, 0)


@given(slots, st.lists(st.integers(0, MAX_NODES - 1), unique=True))
def test_state_survives_being_written_and_read(slot: int, nodes: list[int]) -> None:
    state = State(Layout("test", slot), tuple(nodes))
    assert parse_state(state.to_json()) == state


@given(
    st.text()
    | st.sampled_from(['{"name": "test"', '{"name": "test", "slot": 0}', '{"name": 1, "slot": 0, "nodes": []}'])
)
def test_truncated_state_file_differs_from_a_good_one(text: str) -> None:
    with pytest.raises(LayoutError, match=r"state\.json"):
        parse_state(text)
