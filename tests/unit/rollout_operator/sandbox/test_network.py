"""Destinations of a sandbox pod, judged by a small reader of NetworkPolicies that is independent of their creation."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.network.rules import METADATA
from rollout_api.on_cluster.operator_config import KUBE_DNS, DnsServer
from rollout_api.sandbox import Network
from rollout_operator.sandbox.network import METADATA_V4, METADATA_V6, plain_caveat, policy_spec, problems, reach_of

DNS = [KUBE_DNS]
ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(lambda address: address.exploded)
NAMES = st.sampled_from(["pypi.org", "example.com", "metadata.google.internal", "a-b.c"])
PORTS = st.integers(1, 65_535)
ENTRIES = st.builds(
    lambda host, port: f"[{host}]:{port}" if ":" in host else f"{host}:{port}", st.one_of(ADDRESSES, NAMES), PORTS
)
ACCESS = st.one_of(st.just("None"), st.just("Public"), st.lists(ENTRIES, min_size=1, max_size=4))
NETWORKS = st.builds(Network, setup=ACCESS, agent=ACCESS, verifier=ACCESS)


def reaches(network: Network, address: str, port: int, protocol: str = "TCP") -> bool:
    """Whether a pod with the policy of `network` can reach an address outside the cluster."""
    made = policy_spec({}, [], reach_of(network), DNS)
    assert made["policyTypes"] == ["Ingress", "Egress"]
    host = ipaddress.ip_address(address)
    for rule in made["egress"]:
        ports = rule.get("ports")
        blocks = [peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer]
        if (not ports or {"protocol": protocol, "port": port} in ports) and any(
            _is_in(host, block) for block in blocks
        ):
            return True
    return False


def _is_in(host: ipaddress.IPv4Address | ipaddress.IPv6Address, block: dict[str, Any]) -> bool:
    but = block.get("except", [])
    return host in ipaddress.ip_network(block["cidr"]) and not any(host in ipaddress.ip_network(net) for net in but)


@pytest.mark.parametrize(
    "address",
    # private, link-local, loopback, shared, multicast and none; and the same in IPv6, or wrapped in it
    [
        *(
            "169.254.169.254",
            "168.63.129.16",
            "100.100.100.200",
            "10.96.0.1",
            "192.168.1.1",
            "172.20.0.5",
            "127.0.0.1",
            "100.64.0.1",
            "224.0.0.1",
            "0.0.0.0",
        ),
        *("fd00:ec2::254", "fe80::1", "fc00::1", "2002:a00:1::", "2001:0:1::", "::1", "64:ff9b::a00:1"),
    ],
)
@pytest.mark.parametrize("port", [22, 80, 443, 6443])
def test_public_includes_no_private_link_local_or_cluster_address(address: str, port: int) -> None:
    assert not reaches(Network(agent="Public"), address, port)


@pytest.mark.parametrize("address", ["1.1.1.1", "140.82.112.3", "2606:4700::1111"])
def test_public_includes_the_internet(address: str) -> None:
    assert reaches(Network(agent="Public"), address, 443)
    assert not reaches(Network(), address, 443)


def test_without_network_access_not_even_a_resolver_is_reachable() -> None:
    assert policy_spec({}, [], reach_of(Network()), DNS)["egress"] == []


METADATA_ADDRESSES = (
    *("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192"),
    *("fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42", "fe80::a9fe:a9fe"),
    *("64:ff9b::169.254.169.254", "64:ff9b::168.63.129.16"),
)


@given(NETWORKS)
def test_no_list_of_hosts_allows_the_metadata_address(network: Network) -> None:
    if problems(network):
        return  # refused before a policy is made
    for port in (80, 443, 53, *(p for _, p in reach_of(network).addresses), *reach_of(network).name_ports):
        assert not [address for address in METADATA_ADDRESSES if reaches(network, address, port)]


def test_network_policy_and_executor_refuse_the_same_metadata_addresses() -> None:
    assert sorted(map(str, METADATA)) == sorted(
        str(ipaddress.ip_network(network)) for network in (*METADATA_V4, *METADATA_V6)
    )


@given(st.ip_addresses(v=4).map(str), PORTS, PORTS)
def test_listed_address_is_reachable_only_at_its_port(address: str, port: int, other: int) -> None:
    network = Network(agent=[f"{address}:{port}"])
    if not problems(network):
        assert reaches(network, address, port)
        assert not reaches(network, address, port, "UDP")
        assert other == port or not reaches(network, address, other)
        neighbour = str(ipaddress.ip_address((int(ipaddress.ip_address(address)) + 1) % 2**32))
        assert not reaches(network, neighbour, port)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("169.254.169.254:80", "never reachable"),
        ("[::ffff:a9fe:a9fe]:80", "never reachable"),
        ("[::ffff:169.254.169.254]:80", "never reachable"),
        ("[fd00:ec2::254]:80", "never reachable"),
        ("168.63.129.16:80", "never reachable"),
        ("100.100.100.200:80", "never reachable"),
        ("127.0.0.1:8080", "is not the address of another machine"),
        ("[::1]:8080", "is not the address of another machine"),
        ("example.org:99999", "1 to 65535"),
        ("example.org:0", "1 to 65535"),
        ("10.1.2:80", "not an IPv4 address"),
        ("[fd00:::1]:80", "not an IPv6 address"),
    ],
)
def test_an_entry_that_can_never_work_is_refused_with_its_field(entry: str, says: str) -> None:
    (problem,) = problems(Network(agent=["pypi.org:443", entry]))
    assert problem.startswith("spec.network.agent: ")
    assert says in problem


def test_names_are_resolved_by_the_dns_servers_of_the_chart() -> None:
    openshift = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}
    dns = [KUBE_DNS, DnsServer(peer=openshift, port=5353)]
    rules = policy_spec({}, [], reach_of(Network(agent=["pypi.org:443"])), dns)["egress"]
    both = [(rule["to"], [(port["protocol"], port["port"]) for port in rule["ports"]]) for rule in rules[-2:]]
    assert both == [([KUBE_DNS.peer], [("UDP", 53), ("TCP", 53)]), ([openshift], [("UDP", 5353), ("TCP", 5353)])]


def test_names_may_be_looked_up_and_literal_addresses_need_no_resolver() -> None:
    assert reach_of(Network(setup=["pypi.org:443"])).needs_dns
    assert not reach_of(Network(setup=["10.0.0.1:443"])).needs_dns


@given(NETWORKS, NETWORKS)
def test_pods_share_a_policy_only_with_equal_destinations(one: Network, other: Network) -> None:
    same = reach_of(one) == reach_of(other)
    assert (reach_of(one).digest() == reach_of(other).digest()) == same


def test_only_the_jobs_own_runners_get_in_and_only_to_the_executor() -> None:
    made = policy_spec({"a": "b"}, [{"podSelector": {"matchLabels": {"runner": "mine"}}}], reach_of(Network()), DNS)
    (rule,) = made["ingress"]
    assert rule == {
        "from": [{"podSelector": {"matchLabels": {"runner": "mine"}}}],
        "ports": [{"protocol": "TCP", "port": 8470}],
    }
    assert made["podSelector"] == {"matchLabels": {"a": "b"}}


def test_sandbox_without_clients_admits_no_connection() -> None:
    assert policy_spec({}, [], reach_of(Network()), DNS)["ingress"] == []


def test_plain_mode_reports_what_its_single_policy_cannot_enforce() -> None:
    assert plain_caveat(Network()) == ""
    assert plain_caveat(Network(setup="Public", agent="Public", verifier="Public")) == ""
    said = plain_caveat(Network(setup=["pypi.org:443"]))
    assert "all phases" in said
    assert "port 443 is open to any host" in said
