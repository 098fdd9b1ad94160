"""Pages for people with a cluster: each is typed as shown, and gives what the page says."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.cluster import OPERATOR_NAMESPACE, QUICKSTART_IMAGE, STORAGE_SECRET, Cluster, Object, small_job
from tests.support.documentation import CLUSTER, PAGES, REPOSITORY, Block, blocks
from tests.support.model_server import Server, upload_weights
from tests.support.release import InstalledRelease
from tests.support.terminal import Terminal, checkout

BY_PAGE = {page.stem: blocks(page) for page in PAGES}
INSTALL = ("README", "installing")
"""Pages that start with a cluster in which the chart is not installed."""
TEAM = "team-a"
"""Namespace that these pages create."""
HELM_SECRET = "helm.sh/release.v1"
"""Type of the Secrets in which Helm keeps its releases."""


class Place:
    """A namespace of the cluster, and a terminal in it."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, checkout(folder)
        self.output = {"uri": f"s3://{cluster.bucket}/{namespace}", "secretRef": STORAGE_SECRET}
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_bytes(cluster.kubeconfig.read_bytes())
        kubeconfig.chmod(0o600)
        programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
        if cluster.details:
            programs.insert(1, cluster.details["bin"])
        environ = {
            **os.environ,
            **cluster.environ,
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": os.pathsep.join(map(str, (self.folder, REPOSITORY, REPOSITORY / "operator"))),
            "KUBECONFIG": str(kubeconfig),
            "COLUMNS": "120",
        }
        images = [f"--set images.{name}=agent-rollouts-{name}:test" for name in ("operator", "runtime", "executor")]
        here = {
            "s3://bucket/": f"{self.output['uri']}/",
            "-n team\n": f"-n {namespace}\n",
            "--namespace lab ": f"--namespace {namespace} ",
            "lake-policy:latest": "lake-policy:test",
            "python:3.12-slim": QUICKSTART_IMAGE,
            # Images of this tree, and no registry to pull from.
            "charts/agent-rollouts --": f"charts/agent-rollouts {' '.join(images)} --set runner.cpu=50m --",
        }
        self.terminal = Terminal(self.folder, environ, stand_ins=here)
        self.terminal.run(_typed(f"kubectl config set-context --current --namespace={namespace}"))

    def type_page(self, page: str, given: Callable[["Place"], object]) -> None:
        """Write the files of a page, prepare what the page requires, and type its commands for a cluster."""
        found = BY_PAGE[page]
        for block in found:
            if block.title:
                self.terminal.write(block)
        given(self)
        for block in found:
            if block.needs == CLUSTER:
                self.terminal.run(block)

    def write(self, name: str, value: Object) -> None:
        """Write a manifest."""
        (self.folder / name).write_text(yaml.safe_dump(value))

    def job(self, name: str) -> None:
        """Write job.yaml: some seconds of work, with results in the cluster's storage."""
        self.write("job.yaml", small_job(name, output=self.output))


def _typed(text: str) -> Block:
    return Block("this test", 0, "sh", text)


@pytest.fixture
def place(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Place]:
    made = Place(cluster, namespace, tmp_path)
    yield made
    made.terminal.close()


@pytest.fixture
def bare(place: Place, installed: InstalledRelease) -> Iterator[Place]:
    """Remove the chart and what the pages create. Both are restored after the test."""
    # The pages end with the definitions gone, and with them every job of the cluster.
    if not place.cluster.details and (others := _of_others(place.cluster)):
        pytest.skip(
            f"this page takes the chart and its definitions away, and with them what is not of these tests: {others}"
        )

    def clear() -> None:
        installed.uninstall()
        place.cluster.kubectl("delete", "namespace", OPERATOR_NAMESPACE, TEAM, "--ignore-not-found")

    clear()
    yield place
    clear()
    installed.install()


def _of_others(cluster: Cluster) -> list[str]:
    """Return names of objects in the cluster that belong to others and that the test would delete."""
    objects = [*cluster.list("rolloutjobs,sandboxes,modelservers", ""), *cluster.list("secrets", OPERATOR_NAMESPACE)]
    found = [thing["metadata"] for thing in objects if thing.get("type") != HELM_SECRET]
    names = [f"{metadata['namespace']}/{metadata['name']}" for metadata in found]
    return [name for name in names if not name.startswith("e2e-")] + [TEAM] * bool(cluster.get("namespace", TEAM, ""))


def storage_settings(place: Place) -> None:
    """Write storage.env and a job."""
    place.job("fix-bugs")
    storage_variables(place)


def storage_variables(place: Place) -> None:
    """Write storage.env; the page itself creates the Secret."""
    lines = [f"{name}={value}\n" for name, value in place.cluster.environ.items()]
    (place.folder / "storage.env").write_text("".join(lines))
    place.terminal.run(_typed(f"kubectl delete secret {STORAGE_SECRET}"))


def questions(place: Place) -> None:
    """Write the page's job, with a model and an output that pods can reach."""
    rows = [{"id": "q", "question": "?", "level": "hard", "check": ["true"]}]
    pq.write_table(pa.Table.from_pylist(rows), place.folder / "questions.parquet")
    job: dict[str, Any] = yaml.safe_load((place.folder / "job.yaml").read_text())
    job["spec"] |= {"output": place.output, "sandbox": {"image": QUICKSTART_IMAGE}, "agent": {"type": "Oracle"}}
    job["spec"]["model"]["endpoint"]["baseURL"] = "http://models.example:8000/v1"
    place.write("job.yaml", job)


def sandbox_to_copy_into(place: Place) -> None:
    """Write sandbox.yaml and a folder to copy."""
    header = {"apiVersion": "rollout.dev/v1alpha1", "kind": "Sandbox", "metadata": {"name": "my-sandbox"}}
    place.write("sandbox.yaml", header | {"spec": {"image": QUICKSTART_IMAGE}})
    (place.folder / "data").mkdir()
    (place.folder / "data" / "numbers.txt").write_text("3\n1\n2\n")


def two_servers(place: Place) -> None:
    """Start the ModelServer `qwen`, two servers of the stand-in at policy 12."""
    server = Server(place.cluster, place.namespace, "qwen")
    weights = upload_weights(place.cluster, place.namespace, "model", 0)
    server.apply(model={"name": "Qwen/Qwen3-8B", "uri": weights, "secretRef": STORAGE_SECRET}, replicas=2)
    server.wait_ready(2)
    server.ask_for(12)
    server.wait_policy(12)


def one_server(place: Place) -> None:
    """Start the ModelServer `qwen`, and upload new weights."""
    for version in (7, 8):
        upload_weights(place.cluster, place.namespace, f"step-{version}", version)
    Server(place.cluster, place.namespace, "qwen").apply().wait_ready(1)


GIVEN: dict[str, Callable[[Place], object]] = {
    "README": storage_settings,
    "bringing-tasks": questions,
    "cli": sandbox_to_copy_into,
    "first-cluster-job": storage_variables,
    "installing": storage_settings,
    "jobs-on-a-cluster": lambda place: place.job("my-job"),
    "model-servers": two_servers,
    "policy-updates": one_server,
    "training-a-policy": lambda place: None,
}


def test_every_page_for_a_cluster_has_a_test() -> None:
    assert {page for page, found in BY_PAGE.items() if any(block.needs == CLUSTER for block in found)} == GIVEN.keys()


@pytest.mark.full
@pytest.mark.parametrize("page", sorted(GIVEN.keys() - INSTALL))
def test_commands_of_a_page_for_a_cluster_work(page: str, place: Place) -> None:
    place.type_page(page, GIVEN[page])


@pytest.mark.alone
@pytest.mark.parametrize("page", ["README", pytest.param("installing", marks=pytest.mark.full)])
def test_a_cluster_is_set_up_as_the_page_says(page: str, bare: Place) -> None:
    bare.type_page(page, GIVEN[page])
