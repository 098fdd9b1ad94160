"""A Sandbox that is parked has no pod, and all of its files when it is back; also if its pod or node is lost meanwhile."""

import contextlib
import json
import time

import pytest

from rollout_api.cluster import SANDBOX_LABEL
from tests.e2e.cluster.test_node_loss import cordoned
from tests.support.cluster import STORAGE_SECRET, Cluster, eventually
from tests.support.outages import Outages
from tests.support.sandboxes import ByHand

CHANGES = """
import os, shutil
os.makedirs("/srv/theirs")
with open("/srv/theirs/file", "w") as file:
    file.write("theirs")
os.chown("/srv/theirs/file", 1000, 1001)
os.chmod("/srv/theirs/file", 0o640)
os.symlink("nowhere", "/srv/link")
os.remove(sorted("/etc/" + name for name in os.listdir("/etc") if name.endswith(".conf"))[0])
with open("/srv/large", "wb") as file:
    file.write(os.urandom(64 << 20))
"""
LIST = """
import hashlib, os
for top in ("/etc", "/srv", "/workspace"):
    for folder, folders, files in sorted(os.walk(top)):
        for path in sorted(os.path.join(folder, name) for name in folders + files):
            found = os.lstat(path)
            with open(path if os.path.isfile(path) else "/dev/null", "rb") as file:
                print(path, found.st_mode, found.st_uid, found.st_gid, hashlib.file_digest(file, "sha256").hexdigest())
"""


def parkable(cluster: Cluster, namespace: str) -> ByHand:
    """Return a Ready Sandbox with files in two workspaces."""
    storage = {"uri": f"s3://{cluster.bucket}/{namespace}", "secretRef": STORAGE_SECRET}
    made = ByHand(cluster, namespace, "mine").apply(
        parking=storage, workspaces={"mode": "Overlay", "perSandbox": 2}, idleSeconds=3600
    )
    made.wait_ready()
    made.run("python3", "-c", CHANGES)
    made.run("sh", "-c", "echo other > other", workspace="other")
    return made


def set_running(sandbox: ByHand, running: bool) -> None:
    patch = json.dumps({"spec": {"running": running}})
    names = ("sandbox", sandbox.name, "-n", sandbox.namespace)
    sandbox.cluster.kubectl("patch", *names, "--type=merge", "-p", patch)


def describe(sandbox: ByHand) -> str:
    """Return what helps to understand a failed test."""
    cluster, selector = sandbox.cluster, f"{SANDBOX_LABEL}={sandbox.name}"
    jobs = cluster.kubectl("describe", "jobs,pods", "-l", selector, "-n", sandbox.namespace, check=False).stdout
    logs = cluster.kubectl("logs", "-l", "rollout.dev/role=parking", "-n", sandbox.namespace, check=False).stdout
    return f"{sandbox.describe()}\n{jobs[-6000:]}\n{logs}"


def park(sandbox: ByHand) -> None:
    """Park it, and wait until nothing of it runs."""
    set_running(sandbox, False)
    eventually(lambda: sandbox.condition("Parked").get("status") == "True" or None, 120, lambda: describe(sandbox))
    left = ("pods,jobs", sandbox.namespace, f"{SANDBOX_LABEL}={sandbox.name}")
    eventually(lambda: not sandbox.cluster.list(*left) or None, 60, lambda: describe(sandbox))


def wait_for_unpark_job(sandbox: ByHand) -> None:
    job = f"{sandbox.name}-unpark"
    eventually(lambda: sandbox.cluster.get("job", job, sandbox.namespace), 120, lambda: describe(sandbox))


def wait_until_back(sandbox: ByHand) -> None:
    eventually(lambda: sandbox.condition("Ready").get("status") == "True" or None, 300, lambda: describe(sandbox))


def test_parked_sandbox_comes_back_with_its_files_also_if_its_pod_is_deleted_meanwhile(
    cluster: Cluster, namespace: str
) -> None:
    sandbox = parkable(cluster, namespace)
    files, uid = sandbox.run("python3", "-c", LIST), sandbox.pod["metadata"]["uid"]
    park(sandbox)
    refused = sandbox.try_to_run("true")
    assert (refused.returncode, "kubectl patch sandbox mine" in refused.stderr) == (2, True), refused.stderr
    set_running(sandbox, True)
    wait_for_unpark_job(sandbox)
    cluster.kubectl("delete", "pod", sandbox.name, "-n", namespace, "--wait=false")
    wait_until_back(sandbox)
    assert sandbox.pod["metadata"]["uid"] != uid
    assert sandbox.run("python3", "-c", LIST) == files
    assert sandbox.run("cat", "other", workspace="other") == "other\n"
    assert (sandbox.condition("Parked")["reason"], sandbox.condition("Finished")) == ("Restored", {})
    events = json.loads(cluster.kubectl("get", "events", "-n", namespace, "-o", "json").stdout)["items"]
    told = {event["reason"] for event in events if event["involvedObject"]["kind"] == "Sandbox"}
    assert {"Parking", "Parked", "PodDeleted", "Restored"} <= told


def test_idle_sandbox_is_parked_by_itself_and_not_while_a_command_runs(cluster: Cluster, namespace: str) -> None:
    storage = {"uri": f"s3://{cluster.bucket}/{namespace}", "secretRef": STORAGE_SECRET, "whenIdle": True}
    sandbox = ByHand(cluster, namespace, "mine").apply(parking=storage, idleSeconds=6)
    sandbox.wait_ready()
    sandbox.run("sh", "-c", "sleep 20; echo mine > file")
    assert sandbox.condition("Ready")["status"] == "True"
    eventually(lambda: sandbox.condition("Parked").get("status") == "True" or None, 120, lambda: describe(sandbox))

    def content() -> str | None:
        set_running(sandbox, True)
        wait_until_back(sandbox)
        # On a busy machine it may be idle again before the command starts, and be parked.
        with contextlib.suppress(AssertionError):
            return sandbox.run("cat", "file")
        return None

    assert eventually(content, 300, lambda: describe(sandbox)) == "mine\n"


def test_parking_that_cannot_begin_says_why_and_can_be_taken_back(cluster: Cluster, namespace: str) -> None:
    storage = {"uri": f"s3://{cluster.bucket}/{namespace}", "secretRef": "no-such-secret"}
    sandbox = ByHand(cluster, namespace, "mine").apply(parking=storage, idleSeconds=10)
    sandbox.wait_ready()
    sandbox.run("sh", "-c", "echo mine > file")
    set_running(sandbox, False)
    eventually(lambda: sandbox.condition("Ready")["reason"] == "ParkingWaits" or None, 120, lambda: describe(sandbox))
    assert "no-such-secret" in sandbox.condition("Ready")["message"]
    time.sleep(15)  # longer than `idleSeconds`
    set_running(sandbox, True)
    wait_until_back(sandbox)
    assert sandbox.run("cat", "file") == "mine\n"


DEEP = """
import os
for _ in range(60):
    os.mkdir("d" * 90)
    os.chdir("d" * 90)
"""


def test_workspace_that_cannot_be_stored_keeps_the_pod_and_the_others_outlive_it(
    cluster: Cluster, namespace: str
) -> None:
    sandbox = parkable(cluster, namespace)
    sandbox.run("python3", "-c", DEEP)

    def store_in_part() -> None:
        set_running(sandbox, False)
        is_done = lambda: sandbox.condition("Parked").get("reason") == "StoredInPart" or None  # noqa: E731
        eventually(is_done, 120, lambda: describe(sandbox))
        assert "left out main: " in sandbox.condition("Parked")["message"]

    store_in_part()
    set_running(sandbox, True)
    wait_until_back(sandbox)
    assert sandbox.run("cat", "/srv/theirs/file") == "theirs"
    store_in_part()
    cluster.kubectl("delete", "pod", sandbox.name, "-n", namespace, "--wait=false")
    eventually(lambda: sandbox.condition("Parked").get("status") == "True" or None, 120, lambda: describe(sandbox))
    set_running(sandbox, True)
    wait_until_back(sandbox)
    assert sandbox.run("cat", "other", workspace="other") == "other\n"
    assert sandbox.object["status"]["parking"] == 2


@pytest.mark.alone
@pytest.mark.full
def test_parked_sandbox_comes_back_on_another_node_and_after_the_loss_of_that_one(
    cluster: Cluster, outages: Outages, namespace: str
) -> None:
    first = cluster.details["nodes"][0]["name"]
    sandbox = parkable(cluster, namespace)
    files = sandbox.run("python3", "-c", LIST)
    assert sandbox.pod["spec"]["nodeName"] == first
    park(sandbox)
    second = outages.add_node()
    with cordoned(cluster, first):
        set_running(sandbox, True)
        wait_for_unpark_job(sandbox)
        assert sandbox.pod["spec"]["nodeName"] == second
        outages.kill_node(second)
    wait_until_back(sandbox)
    assert sandbox.pod["spec"]["nodeName"] == first
    assert sandbox.run("python3", "-c", LIST) == files
