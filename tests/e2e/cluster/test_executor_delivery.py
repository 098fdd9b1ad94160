"""If a sandbox's pod cannot mount the executor as an image volume, an init container copies it.

Each test restarts the operator, which remembers for all namespaces whether image volumes work.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import OPERATOR_LABEL, OPERATOR_NAMESPACE, QUICKSTART_IMAGE, Cluster, eventually
from tests.support.images import build, unpack
from tests.support.sandboxes import ByHand

pytestmark = [pytest.mark.alone, pytest.mark.full]


def assert_copied(sandbox: ByHand) -> None:
    """Check that an init container has copied the executor, and that it works."""
    pod = sandbox.wait_ready().pod["spec"]
    assert [container["command"][1] for container in pod["initContainers"]] == ["--copy-to"]
    assert not [volume for volume in pod["volumes"] if "image" in volume]
    assert sandbox.run("echo", "works") == "works\n"


@pytest.fixture
def refused_image_volumes(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Have the API server refuse image volumes in the namespace during the test. Yields its message."""
    words = "no image volumes here"
    api = "admissionregistration.k8s.io/v1"
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "resourceRules": [pods],
        },
        "validations": [{"expression": "object.spec.volumes.all(v, !has(v.image))", "message": words}],
    }
    kind, metadata = "ValidatingAdmissionPolicy", {"name": namespace}
    binding = {"policyName": namespace, "validationActions": ["Deny"]}
    cluster.apply(
        {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": policy},
        {"apiVersion": api, "kind": f"{kind}Binding", "metadata": metadata, "spec": binding},
    )
    yield words
    for part in (kind, f"{kind}Binding"):
        cluster.kubectl("delete", part, namespace)
    cluster.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, "-l", OPERATOR_LABEL)
    cluster.wait_for_operator()


def test_where_image_volumes_are_refused_the_executor_is_copied_and_the_mode_stays(
    cluster: Cluster, namespace: str, refused_image_volumes: str
) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "refused", "namespace": namespace},
        "spec": {
            "containers": [{"name": "main", "image": QUICKSTART_IMAGE}],
            "volumes": [{"name": "image", "image": {"reference": QUICKSTART_IMAGE}}],
        },
    }

    def refusal() -> str:
        return cluster.kubectl("create", "--dry-run=server", "-f", "-", text=json.dumps(pod), check=False).stderr

    # A new policy takes effect after some moments.
    eventually(lambda: refused_image_volumes in refusal() or None, 60, refusal)
    sandboxes = {mode: ByHand(cluster, namespace, mode.lower()) for mode in ("Overlay", "Plain")}
    for mode, sandbox in sandboxes.items():
        sandbox.apply(workspaces={"mode": mode})
    for mode, sandbox in sandboxes.items():
        assert_copied(sandbox)
        assert sandbox.object["status"]["mode"] == mode


def test_where_the_image_volume_cannot_be_executed_the_executor_is_copied(
    cluster: Cluster, namespace: str, load_image: Callable[..., str], chart_values: Callable[..., None], tmp_path: Path
) -> None:
    # Simulates a runtime that mounts image volumes noexec: only root and users in group root may execute the files.
    (archive,) = build("executor")
    (bundle,), _ = unpack(archive, tmp_path)
    files = {f"/{path.relative_to(bundle)}": path for path in bundle.rglob("*") if path.is_file()}
    image = load_image("executor-for-few", files, {"/executor": 0o750})
    chart_values("--set", f"images.executor={image}")

    sandbox = ByHand(cluster, namespace, "copied")
    # The copy is the copying container's own.
    sandbox.apply(user="65532:65532", workingDir="/tmp/workspace", workspaces={"mode": "Plain"})
    assert_copied(sandbox)
    told = cluster.kubectl("get", "events", "-n", namespace, "--field-selector=reason=ImageVolumeNotExecutable").stdout
    assert "permission denied" in told, "its first pod was not the one that could not be started"
