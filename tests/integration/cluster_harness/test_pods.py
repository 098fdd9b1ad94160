import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hack.cluster.harness.archives import write_archive
from tests.integration.cluster_harness.pods import IMAGE, PORT, pod, reach, run_harness, run_pods
from tests.support.cluster import Cluster, eventually

pytestmark = pytest.mark.full


def test_pods_services_and_names_work_and_this_machine_reaches_both(cluster: Cluster, namespace: str) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "echo", "namespace": namespace},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": "echo"}]},
    }
    cluster.apply(service)
    addresses = run_pods(cluster, pod("server", namespace), pod("client", namespace))
    found = cluster.get("service", "echo", namespace)
    assert found is not None
    by_address, by_name = f"{found['spec']['clusterIP']}:80", f"echo.{namespace}:80"
    eventually(
        lambda: (
            reach(cluster, namespace, "client", by_address, by_name) == {by_address: "open", by_name: "open"} or None
        ),
        60,
    )
    for target in ((addresses["server"], PORT), (found["spec"]["clusterIP"], 80)):
        with socket.create_connection(target, 10) as connection:
            assert connection.recv(64).decode() == cluster.details["hostAddress"]


def test_command_runs_in_a_pod_and_its_exit_code_is_returned(cluster: Cluster, namespace: str) -> None:
    run_pods(cluster, pod("server", namespace))
    done = cluster.kubectl("exec", "-n", namespace, "server", "--", "sh", "-c", "id -u; exit 7", check=False)
    assert (done.returncode, done.stdout) == (7, "0\n")


def test_user_namespace_root_may_mount_an_overlay_without_rights_on_the_node(cluster: Cluster, namespace: str) -> None:
    script = """
    set -e
    cat /proc/self/uid_map
    mkdir /state/upper /state/work /state/merged
    mount -t overlay overlay -o lowerdir=/,upperdir=/state/upper,workdir=/state/work,userxattr /state/merged
    touch /state/merged/etc/new
    test ! -e /etc/new && test -e /state/upper/etc/new && echo overlay works
    """
    container = {
        "securityContext": {"runAsUser": 0, "procMount": "Unmasked", "capabilities": {"add": ["SYS_ADMIN"]}},
        "volumeMounts": [{"name": "state", "mountPath": "/state"}],
    }
    manifest = pod(
        "overlay",
        namespace,
        ("sh", "-c", script),
        hostUsers=False,
        restartPolicy="Never",
        container=container,
        volumes=[{"name": "state", "emptyDir": {}}],
    )
    cluster.apply(manifest)
    cluster.kubectl(
        "wait", "pod/overlay", "-n", namespace, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s"
    )
    uid_map, said = cluster.kubectl("logs", "overlay", "-n", namespace).stdout.splitlines()
    inside, outside, length = (int(number) for number in uid_map.split())
    assert (inside, length, said) == (0, 65536, "overlay works")
    assert outside >= 65536


def test_an_image_is_mounted_as_a_read_only_volume_and_its_programs_run(cluster: Cluster, namespace: str) -> None:
    manifest = pod(
        "volume",
        namespace,
        ("sh", "-c", "/image/usr/bin/python3 -c 'print(6 * 7)'; touch /image/new"),
        restartPolicy="Never",
        container={"volumeMounts": [{"name": "image", "mountPath": "/image"}]},
        volumes=[{"name": "image", "image": {"reference": IMAGE, "pullPolicy": "Never"}}],
    )
    cluster.apply(manifest)
    cluster.kubectl("wait", "pod/volume", "-n", namespace, "--for=jsonpath={.status.phase}=Failed", "--timeout=120s")
    said = cluster.kubectl("logs", "volume", "-n", namespace).stdout
    assert "42" in said.splitlines()
    assert "Read-only file system" in said


def test_an_image_loaded_again_under_its_name_is_the_new_one_for_the_next_pod(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    reference = f"localhost/{namespace}:1"
    for content in ("first", "second"):
        (tmp_path / "content").write_text(content)
        write_archive(tmp_path / "image.tar", reference, {"/content": tmp_path / "content"})
        assert run_harness("load-image", str(tmp_path / "image.tar")) == f"{reference}\n"
        manifest = pod(
            content,
            namespace,
            ("cat", "/image/content"),
            restartPolicy="Never",
            container={"volumeMounts": [{"name": "image", "mountPath": "/image"}]},
            volumes=[{"name": "image", "image": {"reference": reference, "pullPolicy": "Never"}}],
        )
        cluster.apply(manifest)
        succeeded = "--for=jsonpath={.status.phase}=Succeeded"
        cluster.kubectl("wait", f"pod/{content}", "-n", namespace, succeeded, "--timeout=120s")
        assert cluster.kubectl("logs", content, "-n", namespace).stdout == content


def test_object_storage_is_at_one_address_for_this_machine_and_for_pods(cluster: Cluster, namespace: str) -> None:
    endpoint = cluster.details["s3"]["endpoint"]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(endpoint, timeout=10)
    run_pods(cluster, pod("client", namespace))
    target = endpoint.removeprefix("http://")
    assert reach(cluster, namespace, "client", target) == {target: "open"}


def test_every_write_is_in_the_audit_log_with_its_user_and_no_read(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "configmap", "audited", "-n", namespace)
    cluster.kubectl("get", "configmap", "audited", "-n", namespace)
    with open(cluster.details["auditLog"]) as log:
        events = [event for line in log if namespace in line for event in [json.loads(line)]]
    ours = [event for event in events if (event.get("objectRef") or {}).get("name") == "audited"]
    assert [(event["verb"], event["user"]["username"]) for event in ours] == [("create", "admin")]
    assert not {event["objectRef"]["resource"] for event in events} & {"events", "leases"}
