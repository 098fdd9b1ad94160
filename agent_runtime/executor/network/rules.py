"""Which destinations a workspace may reach in a phase. Pure; `proxy` opens the connections."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# RFC 6052: IPv6 addresses that contain an IPv4 address, for a translator. Python considers all of them global.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Addresses at which clouds serve credentials to any caller; rollout_operator/sandbox/network.py has the same list, with
# sources.
METADATA = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("169.254.0.0/16", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32"),
        *("fe80::/10", "fd00:ec2::/32", "fd20:ce::254/128", "fd00:c1::a9fe:a9fe/128", "fd00:42::42/128"),
        *("64:ff9b::a9fe:0/112", "64:ff9b::a83f:8110/128", "64:ff9b::6464:64c8/128", "64:ff9b::c000:c0/128"),
    )
)


PUBLIC_ONLY = "public:"
"""Prefix of a listed destination that must have a public address."""


@dataclass(frozen=True)
class NetworkRule:
    """One phase's rule: nothing, public addresses, or exactly these names and ports, of which `public` must have public
    addresses.
    """

    kind: Literal["None", "Public", "List"]
    allowed: frozenset[tuple[str, int]] = frozenset()
    public: frozenset[tuple[str, int]] = frozenset()

    def as_json(self) -> str | list[str]:
        """Return the format of docs/executor.md, which `read_rule` parses."""
        if self.kind != "List":
            return self.kind
        return sorted(PUBLIC_ONLY * (pair in self.public) + join_authority(*pair) for pair in self.allowed)

    def refusal_of_name(self, host: str, port: int) -> str | None:
        """Return why this name must not even be looked up; None if it may."""
        match self.kind:
            case "None":
                return "the network of this phase is None: nothing can be reached"
            case "List" if (normal_host(host), port) not in self.allowed:
                return f"{host}:{port} is not in this phase's list: {', '.join(self.as_json()) or 'which is empty'}"
        return None

    def refusal_of_address(self, host: str, port: int, address: Address) -> str | None:
        """Return why an allowed name must not resolve to this address; None if it may."""
        if is_metadata(address):
            return f"{address} is a link-local or cloud metadata address, which no sandbox may reach"
        if is_public(address):
            return None
        if self.kind == "Public":
            return f"the network of this phase is Public, and {address} is a private, local or reserved address"
        if (normal_host(host), port) in self.public:
            return (
                f"{address} is a private, local or reserved address, and only a data set lists {host}:{port}; list it in "
                "the job's sandbox.network"
            )
        return None


NO_NETWORK = NetworkRule("None")


def read_rule(value: Any) -> NetworkRule | None:
    """Parse `"None"`, `"Public"` or a list of `host:port`; None if malformed."""
    if value in ("None", "Public"):
        return NetworkRule(value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return None
    allowed, public = set[tuple[str, int]](), set[tuple[str, int]]()
    for item in value:
        pair = split_authority(item.removeprefix(PUBLIC_ONLY))
        if pair is None or not pair[1]:
            return None
        listed = normal_host(pair[0]), pair[1]
        (public if item.startswith(PUBLIC_ONLY) and listed not in allowed else allowed).add(listed)
    return NetworkRule("List", frozenset(allowed | public), frozenset(public - allowed))


def split_authority(text: str, default_port: int = 0) -> tuple[str, int] | None:
    """Split `host:443` or `[::1]:443` into `("host", 443)`; None if malformed."""
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        host, port = text, str(default_port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if _literal(host) is None:
            return None
    elif ":" in host:
        return None
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        return None
    # Labels must not be empty, except for the root's dot at the end.
    if not all(host.removesuffix(".").split(".")):
        return None
    if not host.isascii() or any(char.isspace() or char in "/@?#%\\[]" for char in host) or len(host) > 253:
        return None
    return host, int(port)


def join_authority(host: str, port: int) -> str:
    """Return the inverse of `split_authority`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def normal_host(host: str) -> str:
    """Normalise a name: lower case, no root dot, addresses in their shortest form."""
    literal = _literal(host)
    return str(literal) if literal is not None else host.lower().removesuffix(".")


def is_metadata(address: Address) -> bool:
    """Whether a cloud may serve credentials at this address."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any((mapped or address) in network for network in METADATA)


def is_public(address: Address) -> bool:
    """Whether an address is public, considering every known way to wrap an IPv4 address."""
    if is_metadata(address):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        wrapped: Sequence[Address] = [
            inner for inner in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ())) if inner is not None
        ]
        if wrapped:
            return all(is_public(inner) for inner in wrapped)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
