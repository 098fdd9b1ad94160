"""The NetworkPolicy of a sandbox pod. It allows the destinations of all phases together, because a NetworkPolicy cannot
distinguish phases.

In Overlay the executor's proxy also enforces host names and phases. In Plain the NetworkPolicy is the only restriction.
"""

import hashlib
import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout_api.cluster import EXECUTOR_PORT
from rollout_api.on_cluster.objects import Json
from rollout_api.on_cluster.operator_config import DnsServer
from rollout_api.sandbox import Network, NetworkAccess
from rollout_operator.world import tcp

# IANA's special-purpose registries: addresses outside the public internet. Cluster networks are in the private ranges.
NOT_PUBLIC_V4 = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "168.63.129.16/32",  # among METADATA_V4, and of the open internet by its number
)
# All global unicast addresses, and the excluded ranges in them. For example, Teredo and 6to4 contain IPv4 addresses.
PUBLIC_V6 = "2000::/3"
NOT_PUBLIC_V6 = ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
# Addresses at which clouds serve credentials to any caller. They are never reachable, even if a manifest lists them. The
# executor's proxy has the same list (agent_runtime/executor/network/rules.py cannot import this one); a test compares them.
METADATA_V4 = (
    "169.254.0.0/16",  # RFC 3927; AWS, Google, Azure, Oracle and others: 169.254.169.254
    "168.63.129.16/32",  # Azure WireServer: learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16
    "100.100.100.200/32",  # Alibaba Cloud: alibabacloud.com/help/en/ecs/user-guide/view-instance-metadata
    "192.0.0.192/32",  # Oracle Cloud Infrastructure Classic
)
METADATA_V6 = (
    "fe80::/10",  # RFC 4291; OpenStack: fe80::a9fe:a9fe
    "fd00:ec2::/32",  # AWS: docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
    "fd20:ce::254/128",  # Google: cloud.google.com/compute/docs/metadata/querying-metadata
    "fd00:c1::a9fe:a9fe/128",  # Oracle: docs.oracle.com/iaas/Content/Compute/Tasks/gettingmetadata.htm
    "fd00:42::42/128",  # Scaleway: scaleway.com/en/docs/instances/how-to/use-instance-metadata
    # The IPv4 addresses above behind a translator (RFC 6052).
    "64:ff9b::a9fe:0/112",
    "64:ff9b::a83f:8110/128",
    "64:ff9b::6464:64c8/128",
    "64:ff9b::c000:c0/128",
)


@dataclass(frozen=True)
class Reach:
    """Destinations that a pod may reach in any phase."""

    public: bool
    addresses: frozenset[tuple[str, int]]
    """(address, TCP port)"""
    name_ports: frozenset[int]
    """TCP ports of listed names. A NetworkPolicy cannot match names, so these ports are open to all addresses except
    those of metadata services.
    """

    @property
    def needs_dns(self) -> bool:
        """Whether the pod may need to resolve names."""
        return self.public or bool(self.name_ports)

    def digest(self) -> str:
        """Return a digest of 8 hexadecimal digits. Pods with equal digests share a NetworkPolicy."""
        content = [self.public, sorted(self.addresses), sorted(self.name_ports)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]


def reach_of(network: Network) -> Reach:
    public = False
    addresses: set[tuple[str, int]] = set()
    ports: set[int] = set()
    for access in network.by_phase().values():
        public |= access == "Public"
        for host, port in _pairs(access):
            address = _literal(host)
            if address is None:
                ports.add(port)
            else:
                addresses.add((str(address), port))
    return Reach(public, frozenset(addresses), frozenset(ports))


def problems(network: Network) -> list[str]:
    """Return problems of listed destinations that are invalid or never reachable, by field."""
    found = []
    for phase, access in network.by_phase().items():
        for host, port in _pairs(access):
            where = f"spec.network.{phase}: {host}:{port}"
            address = _literal(host)
            if not 1 <= port <= 65_535:
                found.append(f"{where}: the port is out of range; expected 1 to 65535")
            elif address is None:
                if ":" in host:
                    found.append(f"{where}: {host} is not an IPv6 address; expected one as in RFC 4291, or a name")
                elif all(part.isdigit() for part in host.split(".")):
                    found.append(f"{where}: {host} is not an IPv4 address; expected four numbers up to 255, or a name")
            elif address.is_link_local or any(
                address in ipaddress.ip_network(net) for net in (*METADATA_V4, *METADATA_V6)
            ):
                found.append(
                    f"{where}: link-local and cloud metadata addresses are never reachable from a sandbox; remove it"
                )
            elif address.is_loopback or address.is_unspecified or address.is_multicast:
                found.append(f"{where}: is not the address of another machine; remove it")
    return found


def plain_caveat(network: Network) -> str:
    """Return which parts of `network` the NetworkPolicy of a Plain pod cannot enforce; empty if it enforces all."""
    caveats = []
    if any(access != network.agent for access in network.by_phase().values()):
        caveats.append("destinations of one phase are open in all phases")
    if ports := reach_of(network).name_ports:
        listed = ", ".join(map(str, sorted(ports)))
        caveats.append(f"host names cannot be enforced, so port {listed} is open to any host")
    return f"Network in Plain mode: {'; '.join(caveats)}" if caveats else ""


def policy_spec(pods: Mapping[str, str], clients: Sequence[Json], reach: Reach, dns: Sequence[DnsServer]) -> Json:
    """Return the spec of a NetworkPolicy for the pods with labels `pods`.

    `clients` are the peers that may connect to the executors. A port-forward needs no rule.
    """
    admitted = [{"from": list(clients), "ports": [tcp(EXECUTOR_PORT)]}] if clients else []
    return {
        "podSelector": {"matchLabels": dict(pods)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": admitted,
        "egress": egress_of(reach, dns),
    }


def egress_of(reach: Reach, dns: Sequence[DnsServer]) -> list[Json]:
    """Return the egress rules; an empty list forbids everything."""
    rules: list[Json] = []
    if reach.public:
        rules.append({"to": [_block("0.0.0.0/0", NOT_PUBLIC_V4), _block(PUBLIC_V6, NOT_PUBLIC_V6)]})
    by_port: dict[int, list[str]] = {}
    for address, port in sorted(reach.addresses):
        by_port.setdefault(port, []).append(address)
    for port, addresses in sorted(by_port.items()):
        blocks = [_block(f"{address}/{ipaddress.ip_address(address).max_prefixlen}") for address in addresses]
        rules.append({"to": blocks, "ports": [tcp(port)]})
    if reach.name_ports:
        anywhere = [_block("0.0.0.0/0", METADATA_V4), _block("::/0", METADATA_V6)]
        rules.append({"to": anywhere, "ports": [tcp(port) for port in sorted(reach.name_ports)]})
    if reach.needs_dns:
        for server in dns:
            rules.append({"to": [server.peer], "ports": [{"protocol": "UDP", "port": server.port}, tcp(server.port)]})
    return rules


def _block(cidr: str, but: tuple[str, ...] = ()) -> Json:
    return {"ipBlock": {"cidr": cidr, **({"except": list(but)} if but else {})}}


def _pairs(access: NetworkAccess) -> list[tuple[str, int]]:
    if isinstance(access, str):
        return []
    return [(host.strip("[]"), int(port)) for host, _, port in (entry.rpartition(":") for entry in access)]


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
