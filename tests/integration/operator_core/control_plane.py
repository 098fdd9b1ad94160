"""A real API server with etcd and garbage collection for this test run only, which can be killed without effect on
others.
"""

import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tests.support.cluster_reader import ClusterReader
from tests.support.ports import free_ports

REPOSITORY = Path(__file__).parents[3]
SERVICE_ACCOUNT = "system:serviceaccount:"
WAIT_SECONDS = 60.0
T = TypeVar("T")

AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, verbs: [get, list, watch]}
- {level: None, resources: [{group: coordination.k8s.io}, {group: "", resources: [events]}]}
- {level: Metadata}
"""


class ControlPlane:
    """etcd, kube-apiserver and the garbage collector on loopback ports.

    It knows the requested users: service accounts (`system:serviceaccount:NAMESPACE:NAME`) have the rights that they
    are given, all others may do everything.
    """

    def __init__(self, folder: Path, users: tuple[str, ...]) -> None:
        done = subprocess.run([REPOSITORY / "hack/cluster/build"], capture_output=True, text=True, check=True)
        self._bin = Path(done.stdout.strip().splitlines()[-1])
        self._folder = folder
        self._tokens = {user: secrets.token_hex(8) for user in (*users, "admin", "system:kube-controller-manager")}
        self._port, self._etcd, peer = free_ports(3)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        groups = {user: "" if user.startswith(SERVICE_ACCOUNT) else ',"system:masters"' for user in self._tokens}
        tokens = (f"{token},{user},{user}{groups[user]}\n" for user, token in self._tokens.items())
        (folder / "tokens.csv").write_text("".join(tokens))
        (folder / "audit.yaml").write_text(AUDIT_POLICY)
        for command in (["genrsa", "-out", "sa.key", "2048"], ["rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"]):
            subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
        etcd, peers = f"http://127.0.0.1:{self._etcd}", f"http://127.0.0.1:{peer}"
        self._start(
            "etcd", f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync", f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )  # fmt: skip
        self.start_api_server()
        kubeconfig = self.kubeconfig("system:kube-controller-manager")
        self._start(
            "kube-controller-manager", f"--kubeconfig={kubeconfig}", "--controllers=garbagecollector,namespace",
            "--leader-elect=false", "--secure-port=0",
        )  # fmt: skip

    def start_api_server(self) -> None:
        """Start the API server and wait until it is ready."""
        self._start(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self._etcd}", f"--secure-port={self._port}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--cert-dir={self._folder / 'certificates'}",
            "--service-account-key-file=sa.pub", "--service-account-signing-key-file=sa.key",
            "--service-account-issuer=https://kubernetes.default.svc", "--token-auth-file=tokens.csv",
            "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
            "--audit-policy-file=audit.yaml", "--audit-log-path=audit.log",
        )  # fmt: skip
        until(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", "the API server is ready")

    def kill_api_server(self) -> None:
        """Kill the API server, as a power failure would."""
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait()

    def kubeconfig(self, user: str) -> Path:
        """Return the path of a user's kubeconfig."""
        path = self._folder / f"{user.replace(':', '-')}.kubeconfig"
        authority = self._folder / "certificates" / "apiserver.crt"
        cluster = {"server": f"https://127.0.0.1:{self._port}", "certificate-authority": str(authority)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": self._tokens[user]}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        path.write_text(json.dumps(config))
        return path

    def kubectl(self, *arguments: str, text: str = "", check: bool = True) -> str:
        """Return the output of kubectl."""
        command = [str(self._bin / "kubectl"), "--kubeconfig", str(self.kubeconfig("admin")), *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    def refusal_of(self, *arguments: str) -> str:
        """Return kubectl's error; empty on success."""
        command = [str(self._bin / "kubectl"), "--kubeconfig", str(self.kubeconfig("admin")), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr

    def helm(self, *arguments: str) -> str:
        """Return the output of Helm."""
        return subprocess.run(
            [str(self._bin / "helm"), *arguments], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    def apply(self, *objects: dict[str, Any]) -> None:
        """kubectl apply."""
        self.kubectl("apply", "-f", "-", text="\n---\n".join(json.dumps(obj) for obj in objects))

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        """Return an object, or None."""
        return self._reader.get(kind.lower(), name, namespace)

    def names(self, kind: str, namespace: str) -> list[str]:
        """Return the names of all objects of a kind."""
        return [found["metadata"]["name"] for found in self._reader.list(kind, namespace)]

    @cached_property
    def _reader(self) -> ClusterReader:
        return ClusterReader(self.kubeconfig("admin"))

    def writes(self, user: str, namespace: str) -> list[str]:
        """Return every successful write of a user, as `verb resource/name[/subresource]`, from the audit log."""
        return self._audited(user, namespace, range(200, 300))

    def forbidden(self, user: str, namespace: str) -> list[str]:
        """Return every write that was refused because the user lacked the right."""
        return self._audited(user, namespace, range(403, 404))

    def _audited(self, user: str, namespace: str, codes: range) -> list[str]:
        found = []
        for line in (self._folder / "audit.log").read_text().splitlines():
            entry = json.loads(line)
            target = entry.get("objectRef", {})
            if entry["user"]["username"] != user or target.get("namespace") != namespace:
                continue
            if entry["responseStatus"]["code"] in codes:
                parts = [target["resource"], target.get("name"), target.get("subresource")]
                found.append(f"{entry['verb']} {'/'.join(part for part in parts if part)}")
        return found

    def close(self) -> None:
        """End everything, and wait for that."""
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()

    def _start(self, program: str, *flags: str) -> None:
        with (self._folder / f"{program}.log").open("ab") as log:
            command = [str(self._bin / program), *flags]
            self._processes[program] = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)


def until(condition: Callable[..., T], what: str, seconds: float = WAIT_SECONDS) -> T:
    """Return the condition's first true value; fail if it never becomes true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not seen within {seconds:.0f} s: {what}"
        time.sleep(0.2)
    return found


def running(folder: Path, users: tuple[str, ...]) -> Iterator[ControlPlane]:
    """A control plane with the CRDs, for as long as a fixture lasts."""
    plane = ControlPlane(folder, users)
    try:
        plane.kubectl("apply", "-f", str(REPOSITORY / "crds"))
        plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        yield plane
    finally:
        plane.close()
