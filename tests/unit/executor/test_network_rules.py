"""What a phase's network rule allows."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.network import rules
from agent_runtime.executor.network.proxy import Refusal, read_request
from agent_runtime.executor.network.rules import NetworkRule, is_public, read_rule, split_authority
from rollout_api import sandbox

PRIVATE = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1",
    "192.168.1.1", "198.18.0.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fc00::1", "fd12::1", "fe80::1", "fec0::1", "ff02::1", "2001:db8::1",
    "::ffff:10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254", "2002:0a00:0001::1",
    "2001:0:a00:1:0:0:f5ff:fffe", "168.63.129.16", "::ffff:168.63.129.16", "64:ff9b::168.63.129.16",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_public_never_includes_a_private_address_in_any_notation(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    assert NetworkRule("Public").refusal_of_address("mirror.internal", 80, ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "64:ff9b::8.8.8.8", "172.32.0.1"])
def test_public_leads_to_the_open_internet(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192", "fe80::a9fe:a9fe", "fd00:ec2::254"),
        *("fd20:ce::254", "fd00:c1::a9fe:a9fe", "::ffff:168.63.129.16", "64:ff9b::100.100.100.200", "fd00:42::42"),
    ],
)
def test_listed_name_leads_to_no_metadata_address(address: str) -> None:
    """Otherwise the owner of the name could have the agent read the node's credentials."""
    rule = read_rule(["mirror.internal:80"])
    assert rule is not None
    assert "metadata" in (rule.refusal_of_address("mirror.internal", 80, ipaddress.ip_address(address)) or "")


def test_listed_name_may_lead_to_a_shared_address() -> None:
    """Clusters use 100.64.0.0/10 (RFC 6598) for pods and Services."""
    rule = read_rule(["mirror.internal:80"])
    assert rule is not None
    assert rule.refusal_of_address("mirror.internal", 80, ipaddress.ip_address("100.64.0.1")) is None


def test_a_listed_name_may_be_private_and_its_neighbours_stay_closed() -> None:
    rule = read_rule(["Mirror.Internal:8080", "[fd00::0:1]:443"])
    assert rule is not None
    assert rule.refusal_of_name("mirror.internal.", 8080) is None
    assert rule.refusal_of_name("fd00::1", 443) is None
    assert rule.refusal_of_address("mirror.internal", 80, ipaddress.ip_address("10.0.0.1")) is None
    for host, port in (("mirror.internal", 80), ("internal", 8080), ("x.mirror.internal", 8080)):
        assert rule.refusal_of_name(host, port)


def test_what_only_a_data_set_lists_must_be_public() -> None:
    rule = read_rule(["public:localhost:80", "public:Mirror.Internal:80", "own.internal:80", "public:own.internal:80"])
    assert rule is not None
    assert rule.as_json() == ["own.internal:80", "public:localhost:80", "public:mirror.internal:80"]
    assert read_rule(rule.as_json()) == rule
    assert rules.PUBLIC_ONLY == sandbox.PUBLIC_ONLY, "executors import nothing of rollout_api"
    for host in ("localhost", "mirror.internal"):
        assert rule.refusal_of_name(host, 80) is None
        refusal = rule.refusal_of_address(host, 80, ipaddress.ip_address("127.0.0.1"))
        assert "list it in the job's sandbox.network" in (refusal or "")
        assert rule.refusal_of_address(host, 80, ipaddress.ip_address("1.1.1.1")) is None
    assert rule.refusal_of_address("own.internal", 80, ipaddress.ip_address("10.0.0.1")) is None


def test_none_refuses_everything() -> None:
    assert NetworkRule("None").refusal_of_name("example.org", 443)


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z0-9-]{1,9}(\.[a-z0-9-]{1,9}){0,2}\.?", fullmatch=True), st.integers(1, 65535)),
        max_size=5,
    )
)
def test_a_rule_shown_and_read_again_is_the_same(pairs: list[tuple[str, int]]) -> None:
    rule = read_rule([f"{host}:{port}" for host, port in pairs])
    assert rule is not None
    assert read_rule(rule.as_json()) == rule


@given(st.text(max_size=40))
def test_an_authority_is_parsed_or_refused(text: str) -> None:
    pair = split_authority(text, 80)
    assert pair is None or (pair[0] and 0 <= pair[1] <= 65535)


@given(st.binary(max_size=200))
def test_a_proxy_request_is_parsed_or_refused(data: bytes) -> None:
    for method in (b"", b"CONNECT ", b"GET http://"):
        outcomes = []
        try:
            outcomes.append(read_request(method + data + b"\r\n\r\n").host)
        except Refusal as refusal:
            outcomes.append(refusal.status)
        assert all(outcomes)


@given(st.from_regex(r"[A-Za-z-]{1,12}: [ -~]{0,30}", fullmatch=True))
def test_server_gets_only_the_checked_host(header: str) -> None:
    data = f"GET http://listed.example:8080/p HTTP/1.1\r\nHost: other\r\n{header}\r\n\r\n".encode()
    try:
        request = read_request(data)
    except Refusal:
        return
    assert request.head is not None
    lines = request.head.decode().split("\r\n")
    assert [line for line in lines if line.lower().startswith("host:")] == ["Host: listed.example:8080"]
    assert lines[0] == "GET /p HTTP/1.1"
