"""How each program of the cluster is built, and all versions; `build.py` builds them."""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass

KUBERNETES = "1.35.4"


@dataclass(frozen=True)
class Recipe:
    """Programs built from one Go module.

    They are built in a generated module that requires the real one, because `go install PACKAGE@VERSION` refuses
    modules with replace lines (Kubernetes, etcd).
    """

    name: str
    module: str
    version: str
    packages: dict[str, str]  # Go package of each program
    variables: tuple[str, ...] = ()  # for the linker's -X: package.variable=value
    staging: str = ""  # version of the modules that this one requires as v0.0.0, because they are in its repository
    tags: str = ""
    cgo: bool = False
    share: tuple[str, ...] = ()  # files and folders of the module that are needed when the programs run

    @property
    def folder(self) -> str:
        """Returns the folder of this recipe in the cache."""
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()
        return f"{self.name}-{self.version}-{digest[:8]}"


VERSITYGW = "github.com/versity/versitygw"
KUBECONFORM = "github.com/yannh/kubeconform"
LEADER_WORKER_SET = "sigs.k8s.io/lws"
INFERENCE_EXTENSION = "sigs.k8s.io/gateway-api-inference-extension"
# The version of the modules that Kubernetes' own repository holds.
STAGING = "0" + KUBERNETES.removeprefix("1")

RECIPES = (
    Recipe("etcd", "go.etcd.io/etcd/server/v3", "3.6.16", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Recipe(
        # User namespaces for pods need runc 1.2 or newer; Debian 12 has 1.1.5.
        "runc",
        "github.com/opencontainers/runc",
        "1.5.2",
        {"runc": "github.com/opencontainers/runc"},
        tags="seccomp",
        cgo=True,
    ),
    Recipe(
        # Image volumes and user namespaces need containerd 2.
        "containerd",
        "github.com/containerd/containerd/v2",
        "2.4.2",
        {
            name: f"github.com/containerd/containerd/v2/cmd/{name}"
            for name in ("containerd", "containerd-shim-runc-v2", "ctr")
        },
    ),
    Recipe("versitygw", VERSITYGW, "1.8.0", {"versitygw": f"{VERSITYGW}/cmd/versitygw"}),
    Recipe(
        "kubernetes",
        "k8s.io/kubernetes",
        KUBERNETES,
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
            )
        },
        variables=tuple(
            f"k8s.io/component-base/version.{variable}={value}"
            for variable, value in zip(
                ("gitVersion", "gitMajor", "gitMinor"), (f"v{KUBERNETES}", *KUBERNETES.split(".")[:2]), strict=True
            )
        ),
        staging=STAGING,
    ),
    Recipe(
        # Kubernetes' own driver for tests of dynamic resource allocation, in the version of the kubelet.
        "dra-test-driver",
        "k8s.io/kubernetes",
        KUBERNETES,
        {"dra-test-driver": "k8s.io/kubernetes/test/e2e/dra/test-driver"},
        staging=STAGING,
    ),
    Recipe("lws", LEADER_WORKER_SET, "0.7.0", {"lws": f"{LEADER_WORKER_SET}/cmd"}, share=("charts/lws",)),
    Recipe("coredns", "github.com/coredns/coredns", "1.15.0", {"coredns": "github.com/coredns/coredns"}),
    Recipe(
        "helm",
        "helm.sh/helm/v3",
        "3.22.0",
        {"helm": "helm.sh/helm/v3/cmd/helm"},
        variables=("helm.sh/helm/v3/internal/version.version=v3.22.0",),
    ),
    Recipe(
        "kwok",
        "sigs.k8s.io/kwok",
        "0.8.0",
        {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
        share=tuple(
            f"kustomize/stage/{stage}.yaml"
            for stage in (
                "node/fast/node-initialize",
                "node/heartbeat-with-lease/node-heartbeat-with-lease",
                "pod/fast/pod-ready",
                "pod/fast/pod-complete",
                "pod/fast/pod-delete",
            )
        ),
    ),
    Recipe("kubeconform", KUBECONFORM, "0.8.0", {"kubeconform": f"{KUBECONFORM}/cmd/kubeconform"}),
)

# Only few tests need these, so they are built on request.
# The program that chooses a server for each request of a Gateway.
ENDPOINT_PICKER = Recipe(
    "endpoint-picker",
    INFERENCE_EXTENSION,
    "1.5.0",
    {"endpoint-picker": f"{INFERENCE_EXTENSION}/cmd/epp"},
    share=("config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",),
)
# An ingress controller, which configures Envoy.
CONTOUR = Recipe(
    "contour",
    "github.com/projectcontour/contour",
    "1.33.8",
    {"contour": "github.com/projectcontour/contour/cmd/contour"},
    share=tuple(f"examples/contour/{name}.yaml" for name in ("00-common", "01-crds", "02-rbac", "02-role-contour")),
)
OAUTH2_PROXY = Recipe(
    "oauth2-proxy",
    "github.com/oauth2-proxy/oauth2-proxy/v7",
    "7.15.6",
    {"oauth2-proxy": "github.com/oauth2-proxy/oauth2-proxy/v7"},
)
# The controller that a benchmark compares jobs with.
AGENT_SANDBOX = Recipe(
    "agent-sandbox",
    "sigs.k8s.io/agent-sandbox",
    "1.0.3",
    {"agent-sandbox": "sigs.k8s.io/agent-sandbox/cmd/agent-sandbox-controller"},
    share=("helm",),
)
ON_REQUEST = (ENDPOINT_PICKER, CONTOUR, OAUTH2_PROXY, AGENT_SANDBOX)

# The pause container holds a pod's namespaces open, reaps orphans, and ends on a signal.
PAUSE_SOURCE = """
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int signal) { (void)signal; _exit(0); }
static void reap(int signal) { (void)signal; while (waitpid(-1, NULL, WNOHANG) > 0) {} }
int main(void) {
  signal(SIGTERM, end);
  signal(SIGINT, end);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
"""
PAUSE_FOLDER = f"pause-{hashlib.sha256(PAUSE_SOURCE.encode()).hexdigest()[:8]}"
# Debian's package with Prometheus and promtool, because a build from source needs Node.js.
PROMETHEUS_FOLDER = "prometheus-debian"

# Debian packages that the programs above need to run or to be built, each with a file that exists if it is installed.
DEBIAN_PACKAGES = {
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "nftables": "/usr/sbin/nft",
    "iptables": "/usr/sbin/iptables",  # the CNI portmap plugin
    "conntrack": "/usr/sbin/conntrack",  # kube-proxy
    "socat": "/usr/bin/socat",
    "ethtool": "/usr/sbin/ethtool",
    "iproute2": "/usr/sbin/ip",
    "openssl": "/usr/bin/openssl",
    "gcc": "/usr/bin/gcc",
    "pkg-config": "/usr/bin/pkg-config",
    "libseccomp-dev": "/usr/include/seccomp.h",
    "buildah": "/usr/bin/buildah",
    "debootstrap": "/usr/sbin/debootstrap",
}


def all_folders() -> list[str]:
    """Returns the names of the folders of the cache, one for each build."""
    return [*(recipe.folder for recipe in RECIPES), PAUSE_FOLDER, PROMETHEUS_FOLDER]


def cache_digest() -> str:
    """Returns the name of the folder with all programs of these recipes."""
    return hashlib.sha256(" ".join(all_folders()).encode()).hexdigest()[:12]


def module_file(recipe: Recipe, staging_modules: list[str]) -> str:
    lines = ["module build", "", "go 1.24", "", f"require {recipe.module} v{recipe.version}"]
    lines += [f"replace {module} => {module} v{recipe.staging}" for module in staging_modules]
    return "\n".join(lines) + "\n"


def staging_modules(go_mod: str) -> list[str]:
    """Returns the modules that a go.mod requires as v0.0.0; their real version is that of their repository."""
    return sorted(set(re.findall(r"^\s*(?:require\s+)?(\S+) v0\.0\.0(?:\s|$)", go_mod, re.MULTILINE)))
