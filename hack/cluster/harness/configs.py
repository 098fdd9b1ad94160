"""The configuration files of all components, as text. YAML files are written as JSON, which is valid YAML."""

import json
from pathlib import Path
from typing import Any

from .layout import INTERNET, INTERNET_NAME, Layout, Node

PAUSE_IMAGE = "localhost/pause:1"
COREDNS_IMAGE = "localhost/coredns:1"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CNI_PLUGINS = "/usr/lib/cni"  # where Debian has them
FEATURES = {"UserNamespacesSupport": True, "ImageVolume": True}
# 110 is the kubelet's default; a rollout job's sandboxes are many and small.
MAX_PODS = 250
RBAC = "rbac.authorization.k8s.io"


def kubeconfig(layout: Layout, user: str) -> str:
    """Returns a kubeconfig for a user whose certificate is in the cluster's `pki` folder."""
    pki = layout.state / "pki"
    value = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": layout.name, "cluster": {"server": layout.server, "certificate-authority": str(pki / "ca.crt")}}
        ],
        "users": [
            {
                "name": user,
                "user": {"client-certificate": str(pki / f"{user}.crt"), "client-key": str(pki / f"{user}.key")},
            }
        ],
        "contexts": [{"name": layout.name, "context": {"cluster": layout.name, "user": user}}],
        "current-context": layout.name,
    }
    return _json(value)


def audit_policy() -> str:
    """Returns an audit policy that logs the metadata of every write except leases and events, once, when it is answered."""
    return _json(
        {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "None", "verbs": ["get", "list", "watch"]},
                {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
                {
                    "level": "None",
                    "resources": [{"group": group, "resources": ["events"]} for group in ("", "events.k8s.io")],
                },
                {"level": "None", "nonResourceURLs": ["*"]},
                {"level": "Metadata"},
            ],
        }
    )


def containerd(node: Node, programs: Path) -> str:
    return f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt"]

[grpc]
address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
# Without CAP_SYS_RESOURCE a process cannot set an OOM score below its parent's.
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{CNI_PLUGINS}"]
conf_dir = "{node.state}/cni"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{programs}/runc"
"""


def cni(node: Node) -> str:
    """Returns the configuration of the node's pod network: a bridge with addresses of the node's range."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": node.pod_range, "gateway": node.address}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "ipMasq": False,  # so that policies see the address of a pod on another node
        "hairpinMode": True,
        "ipam": ipam,
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return _json({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, portmap]})


def kubelet(node: Node) -> str:
    """Returns KubeletConfiguration without eviction for a full disk and without limits on image pulls; cgroup v1 is
    accepted.
    """
    pki = node.cluster.state / "pki"
    return _json(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": node.cgroup,
            "clusterDNS": [node.cluster.dns_service],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "enforceNodeAllocatable": [],
            "evictionHard": {
                "memory.available": "50Mi",
                "nodefs.available": "1%",
                "nodefs.inodesFree": "1%",
                "imagefs.available": "1%",
            },
            "failCgroupV1": False,
            "failSwapOn": False,
            "featureGates": FEATURES,
            "imageGCHighThresholdPercent": 100,
            "maxPods": MAX_PODS,
            "registryPullQPS": 0,
            "resolvConf": str(node.state / "resolv.conf"),
            "serializeImagePulls": False,
            "volumePluginDir": "/var/lib/kubelet/plugins/volume",
        }
    )


def resolv_conf(node: Node) -> str:
    return f"nameserver {node.cluster.dns_service}\n"


def kube_proxy(node: Node) -> str:
    layout = node.cluster
    return _json(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "bindAddress": "0.0.0.0",
            "clientConnection": {"kubeconfig": str(layout.state / "config" / "kube-proxy.kubeconfig")},
            "clusterCIDR": layout.pod_range,
            # Leaves the limits of connection tracking as they are: they belong to the host, not to a namespace.
            "conntrack": {"maxPerCore": 0, "min": 0},
            "hostnameOverride": node.name,
            "mode": "nftables",
        }
    )


def cluster_objects(layout: Layout) -> list[dict[str, Any]]:
    """Returns the objects that a new cluster starts with: CoreDNS, and RBAC of the network-policy daemon and of kwok."""
    policies = {"": ["namespaces", "pods"], "networking.k8s.io": ["networkpolicies"]}
    names = {"": ["endpoints", "namespaces", "pods", "services"], "discovery.k8s.io": ["endpointslices"]}
    user = {"kind": "User", "apiGroup": RBAC, "name": "network-policy"}
    return [
        _role("network-policy", policies),
        _role("coredns", names),
        _binding("network-policy", "network-policy", user),
        _binding("coredns", "coredns", {"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}),
        _binding("kwok", "cluster-admin", user | {"name": "kwok"}),
        *_coredns(layout),
    ]


def _role(name: str, resources: dict[str, list[str]]) -> dict[str, Any]:
    rules = [
        {"apiGroups": [group], "resources": kinds, "verbs": ["list", "watch"]} for group, kinds in resources.items()
    ]
    return _object(f"{RBAC}/v1", "ClusterRole", name) | {"rules": rules}


def _binding(name: str, role: str, subject: dict[str, str]) -> dict[str, Any]:
    reference = {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}
    return _object(f"{RBAC}/v1", "ClusterRoleBinding", name) | {"roleRef": reference, "subjects": [subject]}


def _coredns(layout: Layout) -> list[dict[str, Any]]:
    labels = {"k8s-app": "kube-dns"}
    corefile = f"""\
.:53 {{
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa {{
        pods insecure
        ttl 5
    }}
    hosts {{
        {INTERNET} {INTERNET_NAME}
        fallthrough
    }}
    cache 5
    loadbalance
}}
"""
    container = {
        "name": "coredns",
        "image": COREDNS_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/coredns", "-conf", "/etc/coredns/Corefile"],
        "ports": [
            {"name": "dns", "containerPort": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "containerPort": 53, "protocol": "TCP"},
        ],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        # Tests never kill the first node, because it has the control plane.
        "nodeName": layout.node(0).name,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    ports = [{"name": f"dns{suffix}", "port": 53, "protocol": p} for suffix, p in (("", "UDP"), ("-tcp", "TCP"))]
    return [
        _object("v1", "ServiceAccount", "coredns", "kube-system"),
        _object("v1", "ConfigMap", "coredns", "kube-system") | {"data": {"Corefile": corefile}},
        _object("v1", "Service", "kube-dns", "kube-system", labels)
        | {"spec": {"clusterIP": layout.dns_service, "selector": labels, "ports": ports}},
        _object("apps/v1", "Deployment", "coredns", "kube-system", labels)
        | {"spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}},
    ]


def _object(
    api_version: str, kind: str, name: str, namespace: str = "", labels: dict[str, str] | None = None
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    if labels:
        metadata["labels"] = labels
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
