"""The certificate authority of a cluster, and the certificates that it signs, all made with openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from .layout import Layout, Node

# A cluster for tests runs for hours, but a forgotten one may run for weeks.
DAYS = 365


@dataclass(frozen=True)
class Identity:
    """The subject of a certificate: Kubernetes takes the common name as the user and the organization as the group."""

    file: str
    common_name: str
    organization: str = ""
    names: tuple[str, ...] = ()  # of servers: DNS names and addresses that clients may use

    @property
    def subject(self) -> str:
        organization = f"/O={self.organization}" if self.organization else ""
        return f"{organization}/CN={self.common_name}"


def control_plane_identities(layout: Layout) -> tuple[Identity, ...]:
    service = "kubernetes"
    names = [f"DNS:{name}" for name in (service, f"{service}.default", f"{service}.default.svc", "localhost")]
    addresses = [f"IP:{address}" for address in (layout.api_service, layout.node(0).address, "127.0.0.1")]
    return (
        Identity("apiserver", "kube-apiserver", names=(*names, f"DNS:{service}.default.svc.cluster.local", *addresses)),
        Identity("apiserver-kubelet-client", "kube-apiserver-kubelet-client", "system:masters"),
        Identity("front-proxy-client", "front-proxy-client"),
        Identity("admin", "admin", "system:masters"),
        Identity("controller-manager", "system:kube-controller-manager"),
        Identity("scheduler", "system:kube-scheduler"),
        Identity("kube-proxy", "system:kube-proxy"),
        Identity("network-policy", "network-policy"),
        Identity("kwok", "kwok"),
    )


def node_identity(node: Node) -> Identity:
    return Identity(f"node-{node.index}", f"system:node:{node.name}", "system:nodes")


def make_authority(folder: Path) -> None:
    """Writes `ca.crt` and `ca.key`, and the key pair `service-account.key`, `service-account.pub`."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _openssl(
        folder,
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout ca.key -out ca.crt "
        f"-subj /CN=agent-rollouts-test -days {DAYS} -addext keyUsage=critical,keyCertSign,digitalSignature",
    )
    _openssl(folder, "ecparam -name prime256v1 -genkey -noout -out service-account.key")
    _openssl(folder, "ec -in service-account.key -pubout -out service-account.pub")


def sign(folder: Path, identity: Identity) -> None:
    """Writes `FILE.crt` and `FILE.key`, signed by the authority in the folder."""
    names = f" -addext subjectAltName={','.join(identity.names)}" if identity.names else ""
    _openssl(
        folder,
        "req -x509 -CA ca.crt -CAkey ca.key -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
        f"-keyout {identity.file}.key -out {identity.file}.crt -subj {identity.subject} -days {DAYS} "
        "-addext basicConstraints=critical,CA:FALSE -addext extendedKeyUsage=serverAuth,clientAuth" + names,
    )


def _openssl(folder: Path, arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments.split()], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments.split()[0]} failed in {folder}: {done.stderr.strip()}")
