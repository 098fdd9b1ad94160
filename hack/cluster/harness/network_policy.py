"""Computes one nftables ruleset from NetworkPolicies, pods and namespaces; `policy_daemon.py` applies it.

The published network plugins need kernel features that a test machine may lack; this implements them for IPv4.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TABLE = "network-policy"


@dataclass(frozen=True)
class Pod:
    """What policies need to know about a pod that has its own address."""

    namespace: str
    labels: Mapping[str, str]
    address: str
    ports: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (name, protocol): number


@dataclass(frozen=True, order=True)
class Ports:
    """A range of ports of a protocol."""

    protocol: str
    first: int
    last: int


@dataclass(frozen=True)
class Allow:
    """Allowed traffic: to or from these networks (None: any) except the excluded, on these ports (None: all)."""

    networks: tuple[str, ...] | None
    excluded: tuple[str, ...] = ()
    ports: tuple[Ports, ...] | None = None


Allows = tuple[Allow, ...]


@dataclass(frozen=True)
class Isolation:
    """Pods, by address, with restricted traffic; a pod that is not listed is unrestricted in that direction."""

    ingress: Mapping[str, Allows]
    egress: Mapping[str, Allows]


def parse_pod(manifest: Mapping[str, Any]) -> Pod | None:
    """Parses a pod of the API; None if it has no address (not yet, or no longer) or uses that of its node."""
    spec, status, metadata = manifest["spec"], manifest.get("status", {}), manifest["metadata"]
    if not status.get("podIP") or spec.get("hostNetwork") or status.get("phase") in ("Succeeded", "Failed"):
        return None
    # A sidecar is an init container that keeps running.
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    ports = {
        (port["name"], port.get("protocol", "TCP")): port["containerPort"]
        for container in containers
        for port in container.get("ports", [])
        if "name" in port
    }
    return Pod(metadata["namespace"], metadata.get("labels", {}), status["podIP"], ports)


def isolate(
    policies: Iterable[Mapping[str, Any]], pods: Iterable[Pod], namespaces: Mapping[str, Mapping[str, str]]
) -> Isolation:
    """Returns the effect of the policies (manifests of the API) on the pods; `namespaces` maps names to labels."""
    everyone = sorted(pods, key=lambda pod: ipaddress.ip_address(pod.address))
    ingress: defaultdict[str, set[Allow]] = defaultdict(set)
    egress: defaultdict[str, set[Allow]] = defaultdict(set)
    for policy in policies:
        spec, namespace = policy["spec"], policy["metadata"]["namespace"]
        selected = [
            pod for pod in everyone if pod.namespace == namespace and matches(spec.get("podSelector", {}), pod.labels)
        ]
        for pod in selected:
            if "Ingress" in spec["policyTypes"]:
                ingress[pod.address].update(
                    allow
                    for rule in spec.get("ingress") or []
                    for allow in _ingress_allows(rule, pod, namespace, everyone, namespaces)
                )
            if "Egress" in spec["policyTypes"]:
                egress[pod.address].update(
                    allow
                    for rule in spec.get("egress") or []
                    for allow in _egress_allows(rule, namespace, everyone, namespaces)
                )
    return Isolation(_sorted(ingress), _sorted(egress))


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Kubernetes selects these labels; an empty selector selects everything."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for expression in selector.get("matchExpressions") or []:
        key, operator, values = expression["key"], expression["operator"], expression.get("values") or []
        selected = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[operator]
        if not selected:
            return False
    return True


def ruleset(isolation: Isolation) -> str:
    """Returns the input of `nft -f -` that replaces the table in one transaction.

    Forwarded packets, including those between pods of one bridge, are filtered after the address of a Service was
    translated. Packets from a pod to its node are filtered in `input`; packets from the node itself to its pods (probes)
    are not filtered.
    """
    chains: dict[tuple[str, ...], str] = {}
    verdicts = []
    for direction, end, isolated in (("egress", "d", isolation.egress), ("ingress", "s", isolation.ingress)):
        jumps = []
        for address, allows in isolated.items():
            rules = tuple(line for allow in allows for line in _rules(allow, f"ip {end}addr"))
            chain = chains.setdefault((direction, *rules), f"{direction}-{len(chains)}")
            jumps.append(f"{address} : jump {chain}")
        if jumps:
            # The packet's other address is that of the pod itself.
            verdicts.append(f"ip {'s' if end == 'd' else 'd'}addr vmap {{ {', '.join(jumps)} }}")
    # A pod may always connect to itself, as it does through its Service.
    itself = [f"{address} . {address}" for address in sorted({*isolation.ingress, *isolation.egress})]
    lines = [
        "ct state established,related accept",
        *([f"ip saddr . ip daddr {{ {', '.join(itself)} }} return"] if itself else []),
        *verdicts,
    ]
    parts = [_chain(name, [*key[1:], "drop"]) for key, name in chains.items()]
    parts += [
        _chain("policies", lines),
        # The cluster has only IPv4; over IPv6, pods of one bridge would not be subject to any policy.
        _chain("forward", ["type filter hook forward priority filter;", "meta nfproto ipv6 drop", "jump policies"]),
        _chain("input", ["type filter hook input priority filter;", "jump policies"]),
    ]
    head = f"table inet {TABLE}\ndelete table inet {TABLE}\n"
    return f"{head}table inet {TABLE} {{\n{''.join(parts)}}}\n"


def _ingress_allows(
    rule: Mapping[str, Any],
    target: Pod,
    namespace: str,
    everyone: list[Pod],
    namespaces: Mapping[str, Mapping[str, str]],
) -> Iterable[Allow]:
    ports = _ports(rule.get("ports"), target)
    for peers in _peers(rule.get("from"), namespace, everyone, namespaces):
        yield Allow(peers.networks, peers.excluded, ports)


def _egress_allows(
    rule: Mapping[str, Any], namespace: str, everyone: list[Pod], namespaces: Mapping[str, Mapping[str, str]]
) -> Iterable[Allow]:
    numbered = [port for port in rule.get("ports") or [] if not isinstance(port.get("port"), str)]
    named = [port for port in rule.get("ports") or [] if isinstance(port.get("port"), str)]
    for peers in _peers(rule.get("to"), namespace, everyone, namespaces):
        if numbered or not named:
            yield Allow(peers.networks, peers.excluded, _ports(numbered, None))
        # A name means a number only for a pod that has a port of that name.
        for pod in everyone if named else ():
            if _covers(peers, pod.address) and (ports := _ports(named, pod)):
                yield Allow((pod.address,), (), ports)


def _peers(
    peers: list[dict[str, Any]] | None, namespace: str, everyone: list[Pod], namespaces: Mapping[str, Mapping[str, str]]
) -> Iterable[Allow]:
    """Returns the selected peers, ignoring ports; empty if there are none."""
    if not peers:
        yield Allow(None)
        return
    addresses: set[str] = set()
    for peer in peers:
        if block := peer.get("ipBlock"):
            if ipaddress.ip_network(block["cidr"], strict=False).version == 4:
                # nft refuses a set in which one network contains another.
                excluded = ipaddress.collapse_addresses(
                    ipaddress.IPv4Network(text) for text in block.get("except") or ()
                )
                yield Allow((block["cidr"],), tuple(str(network) for network in excluded))
            continue
        selector = peer.get("namespaceSelector")
        for pod in everyone:
            if selector is None:
                in_namespace = pod.namespace == namespace
            else:
                in_namespace = matches(selector, namespaces.get(pod.namespace, {}))
            if in_namespace and matches(peer.get("podSelector") or {}, pod.labels):
                addresses.add(pod.address)
    if addresses:
        yield Allow(tuple(sorted(addresses, key=ipaddress.ip_address)))


def _covers(peers: Allow, address: str) -> bool:
    def inside(networks: tuple[str, ...]) -> bool:
        return any(ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False) for network in networks)

    return (peers.networks is None or inside(peers.networks)) and not inside(peers.excluded)


def _ports(ports: list[dict[str, Any]] | None, named_by: Pod | None) -> tuple[Ports, ...] | None:
    """Returns ranges of numbers; None for all ports, () if only unresolvable names are given."""
    if not ports:
        return None
    found = set()
    for item in ports:
        protocol, port = item.get("protocol", "TCP"), item.get("port")
        if isinstance(port, str):
            port = named_by.ports.get((port, protocol)) if named_by else None
            if port is None:
                continue
        found.add(Ports(protocol, 0, 65535) if port is None else Ports(protocol, port, item.get("endPort") or port))
    return tuple(sorted(found))


def _rules(allow: Allow, other_end: str) -> list[str]:
    addresses = "" if allow.networks is None else f"{other_end} {{ {', '.join(allow.networks)} }} "
    if allow.excluded:
        addresses += f"{other_end} != {{ {', '.join(allow.excluded)} }} "
    if allow.ports is None:
        return [f"{addresses}return"]
    by_protocol: defaultdict[str, list[Ports]] = defaultdict(list)
    for ports in allow.ports:
        by_protocol[ports.protocol.lower()].append(ports)
    return [
        f"{addresses}{protocol} dport {{ {', '.join(_merge(ranges))} }} return"
        for protocol, ranges in by_protocol.items()
    ]


def _merge(ranges: list[Ports]) -> list[str]:
    """Merges ranges, because nft refuses overlapping ones."""
    merged: list[tuple[int, int]] = []
    for ports in sorted(ranges):
        if merged and ports.first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ports.last))
        else:
            merged.append((ports.first, ports.last))
    return [str(first) if first == last else f"{first}-{last}" for first, last in merged]


def _sorted(isolated: Mapping[str, set[Allow]]) -> dict[str, Allows]:
    return {address: tuple(sorted(allows, key=repr)) for address, allows in sorted(isolated.items())}


def _chain(name: str, lines: list[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"  chain {name} {{\n{body}  }}\n"
