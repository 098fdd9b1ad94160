"""A Sandbox that a person applies: used through rolloutctl, reached by the pods that it admits, and removed completely."""

import tarfile
from pathlib import Path

import pytest

from rollout_api.cluster import EXECUTOR_PORT, by_hand_name
from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Object, eventually
from tests.support.full import MODES_ONCE


def apply_sandbox(cluster: Cluster, namespace: str, name: str = "mine", **spec: object) -> Object:
    """Apply a Sandbox, and wait until it is ready."""
    cluster.apply(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "Sandbox",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"image": QUICKSTART_IMAGE, **spec},
        }
    )
    done = cluster.kubectl(
        "wait", "--for=condition=Ready", f"sandbox/{name}", "-n", namespace, "--timeout=120s", check=False
    )
    assert done.returncode == 0, cluster.kubectl("describe", "sandbox,pod", "-n", namespace).stdout
    found = cluster.get("sandbox", name, namespace)
    assert found is not None
    return found


@pytest.mark.parametrize("mode", MODES_ONCE)
def test_a_person_works_in_a_sandbox_from_the_laptop(
    cluster: Cluster, namespace: str, mode: str, tmp_path: Path
) -> None:
    sandbox = apply_sandbox(
        cluster, namespace, workspaces={"mode": mode, "perSandbox": 2}, env=[{"name": "COLOUR", "value": "blue"}]
    )
    assert sandbox["status"]["mode"] == mode

    def run(command: str, *arguments: str) -> str:
        done = cluster.rolloutctl("sandbox", command, "-n", namespace, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "numbers.txt").write_text("3\n1\n2\n")
    run("cp", str(tmp_path / "data"), "mine:data")
    assert (
        run("exec", "mine", "--", "sh", "-c", "sort data/numbers.txt > sorted; echo $COLOUR $PWD")
        == "blue /workspace\n"
    )
    run("cp", "mine:sorted", str(tmp_path / "sorted"))
    assert (tmp_path / "sorted").read_text() == "1\n2\n3\n"

    failed = cluster.rolloutctl("sandbox", "exec", "mine", "-n", namespace, "--", "sh", "-c", "echo no >&2; exit 7")
    assert (failed.returncode, failed.stderr) == (7, "no\n")

    run("snapshot", "mine", str(tmp_path / "changes.tar"))
    # The changes to the image; in Plain, which has no layers, the working folder.
    with tarfile.open(tmp_path / "changes.tar") as archive:
        assert {"workspace/sorted", "workspace/data/numbers.txt"} <= set(archive.getnames())

    # A workspace of its own sees nothing of the first; in Plain there is one place only.
    other = cluster.rolloutctl("sandbox", "exec", "mine", "-n", namespace, "--workspace", "other", "--", "ls")
    if mode == "Overlay":
        assert (other.returncode, other.stdout) == (0, ""), other.stderr
    else:
        assert (other.returncode, "all 1 places are taken" in other.stderr) == (1, True)


CONNECT = f"import socket, sys; socket.create_connection((sys.argv[1], {EXECUTOR_PORT}), timeout=3)"


def client_pod(name: str, namespace: str, labels: Object, address: str) -> Object:
    """Return a pod that succeeds if it reaches the executor of a sandbox."""
    container = {"name": "client", "image": QUICKSTART_IMAGE, "command": ["python3", "-c", CONNECT, address]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }


def test_admitted_pods_reach_a_sandbox_and_its_deletion_removes_everything(cluster: Cluster, namespace: str) -> None:
    sandbox = apply_sandbox(cluster, namespace, clients={"matchLabels": {"app": "notebook"}})
    address = sandbox["status"]["podIP"]
    cluster.apply(
        client_pod("notebook", namespace, {"app": "notebook"}, address),
        client_pod("stranger", namespace, {"app": "other"}, address),
    )

    def end(pod: str) -> str | None:
        found = cluster.get("pod", pod, namespace)
        phase = found["status"]["phase"] if found else ""
        return phase if phase in ("Succeeded", "Failed") else None

    ends = {pod: eventually(lambda pod=pod: end(pod), 90) for pod in ("notebook", "stranger")}  # type: ignore[misc]
    assert ends == {"notebook": "Succeeded", "stranger": "Failed"}, cluster.kubectl("logs", "notebook", "-n", namespace)
    assert "timed out" in cluster.kubectl("logs", "stranger", "-n", namespace).stdout

    owned = [("pod", "mine"), ("secret", by_hand_name("mine")), ("networkpolicy", by_hand_name("mine"))]
    assert all(cluster.get(kind, name, namespace) for kind, name in owned)
    cluster.kubectl("delete", "sandbox", "mine", "-n", namespace)
    gone = lambda: not any(cluster.get(kind, name, namespace) for kind, name in owned) or None  # noqa: E731
    eventually(gone, 60, lambda: cluster.kubectl("get", "pods,secrets,networkpolicies", "-n", namespace).stdout)


def test_unusable_sandbox_gives_the_reason(cluster: Cluster, namespace: str) -> None:
    def why(name: str) -> str:
        done = cluster.rolloutctl("sandbox", "exec", name, "-n", namespace, "--", "true")
        assert done.returncode == 2, done.stdout
        return done.stderr

    assert "Sandbox nobody in namespace" in why("nobody")
    # A local registry that refuses the connection, because looking up an unknown name may take a minute.
    cluster.apply(
        {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "Sandbox",
            "metadata": {"name": "typo", "namespace": namespace},
            "spec": {"image": "127.0.0.1:1/no-such-image:1"},
        }
    )
    told = eventually(lambda: text if "ImagePullBackOff" in (text := why("typo")) else None, 60, lambda: why("typo"))
    assert "no-such-image" in told
    assert "kubectl describe sandbox typo" in told
