"""`rolloutctl images` with a registry: existing images are neither built nor pushed again."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.docker_registry import DockerRegistry, serve_docker_registry
from tests.support.harbor_tasks import hello_world
from tests.support.preloaded import run_rolloutctl

JOB = """\
apiVersion: rollout.dev/v1alpha1
kind: RolloutJob
metadata: {{name: demo}}
spec:
  mode: Eval
  tasks: {{from: {{uri: tasks, format: Harbor}}, imageTemplate: '{host}/tasks/{{name}}:{{digest}}'}}
  agent: {{type: Oracle}}
  output: {{uri: out}}
"""


@pytest.fixture
def registry() -> Iterator[DockerRegistry]:
    with serve_docker_registry() as server:
        yield server


def task(folder: Path, name: str) -> None:
    dockerfile: dict[str, str | bytes] = {
        "environment/Dockerfile": "FROM nowhere.example/base:1\nCOPY data /app/data\nWORKDIR /app\n",
        "environment/data": name,
    }
    hello_world(folder / "tasks" / name, **dockerfile)


def images(folder: Path, tool: str, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each image with what was done for it."""
    arguments = ["images", "job.yaml", "--tool", tool, "--base", "nowhere.example/base:1=scratch", "-o", "json"]
    done = run_rolloutctl(*arguments, folder=folder, environ=environ)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return [(answer["image"].partition("/")[2], answer["state"]) for answer in answers]


def programs_without(name: str, folder: Path) -> Path:
    """Return a folder with all programs of this machine except one."""
    folder.mkdir()
    for place in os.environ["PATH"].split(":"):
        for program in Path(place).glob("*"):
            if program.name != name and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return folder


@pytest.mark.parametrize(
    ("tool", "skopeo"),
    [
        pytest.param("buildah", True, id="buildah with skopeo"),
        pytest.param("podman", False, id="podman without skopeo"),
        pytest.param("buildah", False, id="buildah without skopeo", marks=pytest.mark.full),
        pytest.param("podman", True, id="podman with skopeo", marks=pytest.mark.full),
    ],
)
def test_an_image_pushed_by_one_machine_is_not_built_by_another(
    tool: str, skopeo: bool, registry: DockerRegistry, tmp_path: Path
) -> None:
    for program in (tool, "skopeo"):
        assert shutil.which(program), f"{program} is missing; run hack/install-test-tools"
    task(tmp_path, "one")
    (tmp_path / "job.yaml").write_text(JOB.format(host=registry.host))
    one, other = (registry.machine(tmp_path / name) for name in ("machine", "other-machine"))
    if not skopeo:
        one["PATH"] = other["PATH"] = str(programs_without("skopeo", tmp_path / "programs"))
    first = images(tmp_path, tool, one)
    assert [state for _, state in first] == ["built"]
    assert registry.images() == [name for name, _ in first]
    written = registry.writes()
    assert written
    assert images(tmp_path, tool, other) == [(name, "exists") for name, _ in first]
    assert registry.writes() == written


def test_unpushed_image_is_not_an_existing_one(registry: DockerRegistry, tmp_path: Path) -> None:
    """A cluster could not pull an image that only the builder has."""
    task(tmp_path, "one")
    (tmp_path / "job.yaml").write_text(JOB.format(host=registry.host))
    machine = registry.machine(tmp_path / "machine")
    machine["PATH"] = str(programs_without("skopeo", tmp_path / "programs"))
    ((name, _),) = images(tmp_path, "buildah", machine)
    shutil.rmtree(registry.folder / "images")
    assert images(tmp_path, "buildah", machine) == [(name, "built")]
    assert registry.images() == [name]
