"""The programs of a cluster and their flags."""

import sys
from dataclasses import dataclass
from pathlib import Path

from . import configs
from .layout import API_PORT, MAX_NODES, S3_ACCESS_KEY, S3_PORT, S3_SECRET_KEY, Layout, Node

MODULES = Path(__file__).parents[1]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FEATURES = ",".join(f"{name}={str(on).lower()}" for name, on in configs.FEATURES.items())
# Time until a silent node counts as lost: 50 s by default. Tests wait for it, and a kubelet renews its lease every 10 s.
NODE_GRACE_SECONDS = 30
# Kubernetes' default is 15.
AUTOSCALER_SECONDS = 3
DRA_DRIVER, DRA_DRIVER_NAME = "dra-driver", "test-driver.cdi.k8s.io"
# Few, so that a test can take all of them.
DEVICES_OF_A_NODE = 2


@dataclass(frozen=True)
class Component:
    """A program that runs on a node."""

    name: str
    argv: tuple[str, ...]
    environ: tuple[tuple[str, str], ...] = ()


def control_plane(layout: Layout, programs: Path) -> tuple[Component, ...]:
    """Returns the components of the first node, in start order."""
    pki, config = layout.state / "pki", layout.state / "config"

    def manager(name: str, *flags: str) -> Component:
        kubeconfig = config / f"{name}.kubeconfig"
        kinds = ("authentication-kubeconfig", "authorization-kubeconfig", "kubeconfig")
        own = (*(f"--{kind}={kubeconfig}" for kind in kinds), "--leader-elect=false")
        return Component(name, (str(programs / f"kube-{name}"), *own, *flags))

    return (
        Component(
            "etcd",
            (
                # Without TLS: it listens on the loopback of the node's own network namespace.
                str(programs / "etcd"),
                f"--data-dir={layout.state / 'etcd'}",
                "--unsafe-no-fsync",
                "--quota-backend-bytes=8589934592",
                "--log-level=warn",
            ),
        ),
        Component(
            "apiserver",
            (
                str(programs / "kube-apiserver"),
                f"--advertise-address={layout.node(0).address}",
                "--allow-privileged",
                f"--audit-log-path={layout.audit_log}",
                "--audit-log-maxsize=10240",
                f"--audit-policy-file={config / 'audit.json'}",
                "--authorization-mode=Node,RBAC",
                f"--client-ca-file={pki / 'ca.crt'}",
                "--enable-admission-plugins=NodeRestriction",
                "--etcd-servers=http://127.0.0.1:2379",
                f"--feature-gates={FEATURES}",
                f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
                f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
                "--kubelet-preferred-address-types=InternalIP",
                # The API server calls APIs that pods serve, such as metrics for autoscalers, as this client.
                f"--proxy-client-cert-file={pki / 'front-proxy-client.crt'}",
                f"--proxy-client-key-file={pki / 'front-proxy-client.key'}",
                "--requestheader-allowed-names=front-proxy-client",
                f"--requestheader-client-ca-file={pki / 'ca.crt'}",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-username-headers=X-Remote-User",
                f"--secure-port={API_PORT}",
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
                f"--service-account-key-file={pki / 'service-account.pub'}",
                f"--service-account-signing-key-file={pki / 'service-account.key'}",
                f"--service-cluster-ip-range={layout.service_range}",
                f"--tls-cert-file={pki / 'apiserver.crt'}",
                f"--tls-private-key-file={pki / 'apiserver.key'}",
            ),
        ),
        manager(
            "controller-manager",
            f"--client-ca-file={pki / 'ca.crt'}",
            "--controllers=*,-node-ipam-controller,-node-route-controller,-cloud-node-lifecycle-controller",
            f"--horizontal-pod-autoscaler-sync-period={AUTOSCALER_SECONDS}s",
            f"--node-monitor-grace-period={NODE_GRACE_SECONDS}s",
            f"--root-ca-file={pki / 'ca.crt'}",
            f"--service-account-private-key-file={pki / 'service-account.key'}",
            "--use-service-account-credentials",
        ),
        manager("scheduler"),
        Component(
            "s3",
            (
                str(programs / "versitygw"),
                *("--access", S3_ACCESS_KEY, "--secret", S3_SECRET_KEY),
                *("--port", f"{layout.node(0).address}:{S3_PORT}"),
                *("posix", str(layout.state / "s3")),
            ),
        ),
    )


def node_components(node: Node, programs: Path) -> tuple[Component, ...]:
    """Returns the components of every node, in start order."""
    layout = node.cluster
    return (
        Component(
            "containerd",
            (str(programs / "containerd"), "--config", str(node.state / "containerd.toml")),
            # containerd finds its shim by PATH.
            (("PATH", f"{programs}:{PATH}"),),
        ),
        Component(
            "kubelet",
            (
                str(programs / "kubelet"),
                f"--config={node.state / 'kubelet.json'}",
                f"--kubeconfig={layout.state / 'config' / f'node-{node.index}.kubeconfig'}",
                f"--hostname-override={node.name}",
                f"--node-ip={node.address}",
            ),
        ),
        Component("kube-proxy", (str(programs / "kube-proxy"), f"--config={node.state / 'kube-proxy.json'}")),
        Component(
            "network-policy",
            (
                *(sys.executable, "-m", "harness.policy_daemon"),
                *("--server", layout.server, "--pki", str(layout.state / "pki")),
                *("--nodes", *(layout.node(index).name for index in range(MAX_NODES))),
            ),
            (("PATH", PATH), ("PYTHONPATH", str(MODULES)), ("PYTHONDONTWRITEBYTECODE", "1")),
        ),
    )


def kwok(layout: Layout, programs: Path) -> Component:
    """Returns the component that simulates the kubelet of all nodes labelled `type: kwok`."""
    state = layout.state
    return Component(
        "kwok",
        (
            str(programs / "kwok"),
            f"--kubeconfig={state / 'config' / 'kwok.kubeconfig'}",
            f"--config={state / 'config' / 'kwok-stages.yaml'}",
            "--manage-nodes-with-label-selector=type=kwok",
            "--node-lease-duration-seconds=40",
        ),
    )


def dra_driver(node: Node, programs: Path) -> Component:
    """Returns the component that offers devices of a node for dynamic resource allocation; containers see theirs as
    environment variables (CDI).
    """
    return Component(
        DRA_DRIVER,
        (
            str(programs / "dra-test-driver"),
            "kubelet-plugin",
            f"--kubeconfig={node.cluster.kubeconfig}",
            f"--drivername={DRA_DRIVER_NAME}",
            f"--node-name={node.name}",
            f"--num-devices={DEVICES_OF_A_NODE}",
        ),
    )


def find(layout: Layout, name: str, node: int, programs: Path) -> Component:
    """Returns the component of that name. Raises KeyError with the existing names if the node has none."""
    known = {component.name: component for component in node_components(layout.node(node), programs)}
    if node == 0:
        known |= {component.name: component for component in (*control_plane(layout, programs), kwok(layout, programs))}
    if name not in known:
        raise KeyError(f"component {name!r} on node {node}: expected one of {', '.join(sorted(known))}")
    return known[name]
