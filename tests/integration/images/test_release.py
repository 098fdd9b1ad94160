"""The files of `make release`, used as people use them, without a checkout."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_api.version import VERSION
from tests.support.chart import tool
from tests.support.cluster import REPOSITORY
from tests.support.docker_registry import DockerRegistry, serve_docker_registry

IMAGE = "operator"


def run(*command: object, **options: Any) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    run(sys.executable, REPOSITORY / "hack" / "release", "--into", folder, "--images", IMAGE)
    return folder


@pytest.fixture
def registry() -> Iterator[DockerRegistry]:
    with serve_docker_registry() as server:
        yield server


def test_the_wheel_runs_the_quickstart_in_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    [wheel] = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", REPOSITORY / "constraints.txt", f"{wheel}[quickstart]")
    job = tmp_path / "job.yaml"
    alone = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    rolloutctl = tmp_path / "env" / "bin" / "rolloutctl"
    run(rolloutctl, "init", job, env=alone, cwd=tmp_path)
    assert "mean" in run(rolloutctl, "run", job, env=alone, cwd=tmp_path)
    run(rolloutctl, "report", "starter", "-o", "report.html", env=alone, cwd=tmp_path)
    assert '<div id="app">' in (tmp_path / "report.html").read_text(), "the wheel has the pages"
    compiled = "from agent_runtime.executor.init.native import is_compiled; print(is_compiled())"
    assert run(python, "-c", compiled, env=alone, cwd=tmp_path) == "True\n"


def test_the_source_distribution_can_be_built_from(dist: Path, tmp_path: Path) -> None:
    [source] = dist.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source)
    assert [path.name for path in tmp_path.iterdir()] == [path.name for path in dist.glob("*.whl")]


def test_published_chart_is_found_by_helm_in_the_registry(dist: Path, registry: DockerRegistry, tmp_path: Path) -> None:
    there = f"{registry.host}/charts/agent-rollouts"
    machine = registry.machine(tmp_path)
    run("skopeo", "copy", "--dest-tls-verify=false", f"oci:{dist}/chart", f"docker://{there}:{VERSION}", env=machine)
    config = ["--registry-config", tmp_path / ".docker" / "config.json", "--plain-http"]
    run(tool("helm"), "pull", f"oci://{there}", "--version", VERSION, "-d", tmp_path, *config)
    name = f"agent-rollouts-{VERSION}.tgz"
    assert (tmp_path / name).read_bytes() == (dist / name).read_bytes()
    assert f"version: {VERSION}" in run(tool("helm"), "show", "chart", tmp_path / name)


def test_an_image_is_listed_down_to_its_packages(dist: Path) -> None:
    found = json.loads((dist / "images" / f"agent-rollouts-{IMAGE}.cdx.json").read_text())
    assert (found["bomFormat"], found["metadata"]["component"]["version"]) == ("CycloneDX", VERSION)
    pinned = dict(line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().split())
    purls = {component["purl"] for component in found["components"]}
    assert f"pkg:pypi/kopf@{pinned['kopf']}" in purls
    assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in purls)


def test_provenance_names_every_file_with_its_digest_and_the_commit(dist: Path) -> None:
    statement = json.loads((dist / "provenance.json").read_text())
    named = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    made = [path for path in dist.rglob("*") if path.is_file() and path.name != "provenance.json"]
    assert named == {str(path.relative_to(dist)): hashlib.sha256(path.read_bytes()).hexdigest() for path in made}
    commit, _ = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert commit["digest"]["gitCommit"] == run("git", "rev-parse", "HEAD", cwd=REPOSITORY).strip()
