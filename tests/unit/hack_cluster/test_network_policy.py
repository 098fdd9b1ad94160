"""A small interpreter reads the ruleset, and the results are compared with the NetworkPolicy documentation."""

import ipaddress
import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hack.cluster.harness.network_policy import Pod, isolate, matches, parse_pod, ruleset
from tests.support.full import examples

Labels = dict[str, str]
NAMESPACES: dict[str, Labels] = {"red": {"team": "a"}, "blue": {}}
OUTSIDE = "203.0.113.7"


def passes(rules: str, source: str, destination: str, protocol: str, port: int) -> bool:
    """Whether the kernel would let the first packet of a connection pass."""
    chains = {name: body.strip().splitlines() for name, body in re.findall(r"chain (\S+) \{\n(.*?)\n  \}", rules, re.S)}
    packet = {"ip saddr": source, "ip daddr": destination}

    def run(chain: str) -> bool:
        for line in map(str.strip, chains[chain]):
            if line.startswith("ct state"):
                continue  # not the first packet
            if vmap := re.fullmatch(r"(ip [sd]addr) vmap \{ (.*) \}", line):
                jumps = dict(item.split(" : jump ") for item in vmap[2].split(", "))
                if (target := jumps.get(packet[vmap[1]])) and not run(target):
                    return False
                continue
            *conditions, verdict = re.findall(r"ip saddr \. ip daddr \{.*?\}|\S+ \S+ (?:!= )?\{.*?\}|return|drop", line)
            assert verdict in ("return", "drop"), line
            if all(holds(condition) for condition in conditions):
                return bool(verdict == "return")
        return True

    def holds(condition: str) -> bool:
        key, negated, values = re.fullmatch(r"(.*?) (!= )?\{ (.*) \}", condition).groups()  # type: ignore[union-attr]
        elements = values.split(", ")
        if key == "ip saddr . ip daddr":
            return f"{source} . {destination}" in elements
        if key.startswith("ip "):
            address = ipaddress.ip_address(packet[key])
            return any(address in ipaddress.ip_network(element) for element in elements) != bool(negated)
        ranges = [(int(first), int(last or first)) for first, _, last in (e.partition("-") for e in elements)]
        return key == f"{protocol.lower()} dport" and any(first <= port <= last for first, last in ranges)

    return run("policies")


def is_allowed(policies: list[Any], pods: list[Pod], source: str, destination: str, protocol: str, port: int) -> bool:
    """Whether the documentation allows it: a pod that policies select for a direction gets what any of them allows, and
    nothing else.
    """
    by_address = {pod.address: pod for pod in pods}

    def selects(peer: dict[str, Any], namespace: str, address: str) -> bool:
        if block := peer.get("ipBlock"):
            inside = [
                ipaddress.ip_address(address) in ipaddress.ip_network(n) for n in (block["cidr"], *block["except"])
            ]
            return inside[0] and not any(inside[1:])
        if (pod := by_address.get(address)) is None:
            return False
        if "namespaceSelector" in peer:
            if not matches(peer["namespaceSelector"], NAMESPACES[pod.namespace]):
                return False
        elif pod.namespace != namespace:
            return False
        return matches(peer.get("podSelector", {}), pod.labels)

    def opens(item: dict[str, Any]) -> bool:
        number = item.get("port")
        if isinstance(number, str):
            target = by_address.get(destination)
            number = target.ports.get((number, item["protocol"])) if target else None
            return item["protocol"] == protocol and number == port
        return item["protocol"] == protocol and (number is None or number <= port <= item.get("endPort", number))

    def direction(kind: str, subject: str, other: str) -> bool:
        pod = by_address.get(subject)
        chosen = [
            policy
            for policy in policies
            if pod is not None
            and policy["metadata"]["namespace"] == pod.namespace
            and matches(policy["spec"]["podSelector"], pod.labels)
            and kind in policy["spec"]["policyTypes"]
        ]
        return not chosen or any(
            (not rule[end] or any(selects(peer, policy["metadata"]["namespace"], other) for peer in rule[end]))
            and (not rule["ports"] or any(opens(item) for item in rule["ports"]))
            for policy in chosen
            for end in (("from",) if kind == "Ingress" else ("to",))
            for rule in policy["spec"][kind.lower()]
        )

    if source == destination:
        return True
    return direction("Egress", source, destination) and direction("Ingress", destination, source)


# Few values, so that selectors often meet pods and rules often meet ports.
labels = st.sampled_from([{}, {"app": "a"}, {"app": "b"}, {"app": "a", "team": "a"}])
expressions = st.sampled_from(
    [
        {"key": "app", "operator": "In", "values": ["a"]},
        {"key": "app", "operator": "NotIn", "values": ["a"]},
        {"key": "team", "operator": "Exists"},
        {"key": "team", "operator": "DoesNotExist"},
    ]
)
selectors: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"matchLabels": labels}),
    st.fixed_dictionaries({"matchExpressions": st.lists(expressions, min_size=1, max_size=2)}),
)
blocks = st.fixed_dictionaries(
    {
        "cidr": st.sampled_from(["0.0.0.0/0", "10.100.0.0/16", "203.0.113.0/24"]),
        "except": st.lists(st.sampled_from(["10.100.0.0/30", "10.100.0.2/32", "203.0.113.0/28"]), max_size=3),
    }
)
peers = st.one_of(
    st.fixed_dictionaries({"ipBlock": blocks}),
    st.fixed_dictionaries({"podSelector": selectors}),
    st.fixed_dictionaries({"namespaceSelector": selectors}, optional={"podSelector": selectors}),
)
numbers = st.sampled_from([80, 85, 90])
protocols = st.sampled_from(["TCP", "UDP"])
port_items = st.one_of(
    st.fixed_dictionaries({"protocol": protocols}, optional={"port": numbers}),
    st.fixed_dictionaries({"protocol": protocols, "port": st.just(80), "endPort": st.sampled_from([80, 84, 85])}),
    st.fixed_dictionaries({"protocol": st.just("TCP"), "port": st.just("web")}),
)


def rules_of(end: str) -> Any:
    one = st.fixed_dictionaries({end: st.lists(peers, max_size=2), "ports": st.lists(port_items, max_size=2)})
    return st.lists(one, min_size=1, max_size=2)


policies_strategy = st.lists(
    st.builds(
        lambda namespace, selector, types, ingress, egress: {
            "metadata": {"namespace": namespace},
            "spec": {"podSelector": selector, "policyTypes": types, "ingress": ingress, "egress": egress},
        },
        st.sampled_from(sorted(NAMESPACES)),
        selectors,
        st.sampled_from([["Ingress"], ["Egress"], ["Ingress", "Egress"]]),
        rules_of("from"),
        rules_of("to"),
    ),
    min_size=1,
    max_size=2,
)
pods_strategy = st.lists(
    st.tuples(
        st.sampled_from(sorted(NAMESPACES)),
        labels,
        st.one_of(st.just({}), st.builds(lambda n: {("web", "TCP"): n}, numbers)),
    ),
    min_size=2,
    max_size=4,
).map(lambda found: [Pod(ns, labelled, f"10.100.0.{2 + i}", ports) for i, (ns, labelled, ports) in enumerate(found)])


@settings(max_examples=examples(300))
@given(policies_strategy, pods_strategy)
def test_admitted_connections_are_those_that_kubernetes_documents(policies: list[Any], pods: list[Pod]) -> None:
    rules = ruleset(isolate(policies, pods, NAMESPACES))
    ends = [*(pod.address for pod in pods), OUTSIDE]
    for connection in itertools.product(ends, ends, ("TCP", "UDP"), (80, 85, 90)):
        assert passes(rules, *connection) == is_allowed(policies, pods, *connection), (connection, rules)


@given(policies_strategy, pods_strategy, st.randoms())
def test_rules_are_the_same_text_for_any_order_of_the_clusters_objects(
    policies: list[Any], pods: list[Pod], random: Any
) -> None:
    rules = ruleset(isolate(policies, pods, NAMESPACES))
    random.shuffle(policies)
    random.shuffle(pods)
    assert ruleset(isolate(policies, pods, NAMESPACES)) == rules


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ({}, [{}, {"app": "a"}, {"app": "b"}]),
        ({"matchLabels": {"app": "a"}}, [{"app": "a"}]),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["a", "b"]}]}, [{"app": "a"}, {"app": "b"}]),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["a"]}]}, [{}, {"app": "b"}]),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, [{"app": "a"}, {"app": "b"}]),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, [{}]),
        ({"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, []),
    ],
)
def test_selectors_match_as_in_kubernetes(selector: dict[str, Any], selected: list[Labels]) -> None:
    assert [labels for labels in ({}, {"app": "a"}, {"app": "b"}) if matches(selector, labels)] == selected


def test_adjacent_port_ranges_are_merged() -> None:
    ports = [{"port": 80, "endPort": 84}, {"port": 84, "endPort": 86}, {"port": 87}, {"port": 90}]
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"ports": ports}]}
    rules = ruleset(
        isolate([{"metadata": {"namespace": "red"}, "spec": spec}], [Pod("red", {}, "10.0.0.1")], NAMESPACES)
    )
    assert "tcp dport { 80-87, 90 } return" in rules


def test_cluster_without_policies_drops_only_ipv6() -> None:
    rules = ruleset(isolate([], [Pod("red", {}, "10.100.0.2")], NAMESPACES))
    assert [line.strip() for line in rules.splitlines() if "drop" in line] == ["meta nfproto ipv6 drop"]


def test_a_thousand_pods_of_one_policy_share_a_chain() -> None:
    policy = {"metadata": {"namespace": "red"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}
    pods = [Pod("red", {}, f"10.100.{i // 250}.{i % 250 + 1}") for i in range(1000)]
    assert ruleset(isolate([policy], pods, NAMESPACES)).count("chain ") == 4


def manifest(**status: Any) -> dict[str, Any]:
    container = {"ports": [{"name": "web", "containerPort": 80}, {"containerPort": 81}]}
    sidecar = {"ports": [{"name": "dns", "containerPort": 53, "protocol": "UDP"}]}
    spec = {"containers": [container], "initContainers": [sidecar]}
    return {"metadata": {"namespace": "red", "labels": {"app": "a"}}, "spec": spec, "status": status}


def test_pod_has_its_address_and_named_ports() -> None:
    expected = Pod("red", {"app": "a"}, "10.100.0.2", {("web", "TCP"): 80, ("dns", "UDP"): 53})
    assert parse_pod(manifest(phase="Running", podIP="10.100.0.2")) == expected


def test_pod_without_an_address_matches_no_peer() -> None:
    assert parse_pod(manifest(phase="Pending")) is None
    assert parse_pod(manifest(phase="Failed", podIP="10.100.0.2")) is None
    on_the_node = manifest(phase="Running", podIP="10.100.0.1")
    on_the_node["spec"]["hostNetwork"] = True
    assert parse_pod(on_the_node) is None
