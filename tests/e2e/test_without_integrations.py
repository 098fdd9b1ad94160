"""The core works without the optional integrations, and names what to install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "examples" / "quickstart" / "job.yaml"
INTEGRATIONS = Path("agent_runtime/integrations")
FACADES = ("verl.py", "environments.py")
"""Modules of `agent_rollouts` with the public names of integrations."""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages, but without the integrations, their public names and their entry points."""
    root = tmp_path_factory.mktemp("core")
    for package in ("agent_rollouts", "agent_runtime", "rollout_api", "rolloutctl"):
        shutil.copytree(REPOSITORY / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(root / INTEGRATIONS)
    for name in FACADES:
        (root / "agent_rollouts" / name).unlink()
    # It comes before the metadata of the installed distribution, whose entry points are then not read.
    metadata = root / "agent_rollouts-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: agent-rollouts\nVersion: 1\n")
    return root


def rolloutctl(core: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core)}
    command = [sys.executable, "-m", "rolloutctl.main", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_core_names_no_module_of_an_integration(core: Path) -> None:
    name = str(INTEGRATIONS).replace("/", ".")
    assert not [path for path in core.rglob("*.py") if name in path.read_text()]


def test_job_runs_without_integrations(core: Path, tmp_path: Path) -> None:
    job = yaml.safe_load(QUICKSTART.read_text())
    job["spec"]["tasks"]["inline"] = job["spec"]["tasks"]["inline"][:1]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    run = rolloutctl(core, tmp_path, "run", "job.yaml")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["dataset", "--help"], ["plugins"]])
def test_command_works_without_integrations(core: Path, tmp_path: Path, arguments: list[str]) -> None:
    run = rolloutctl(core, tmp_path, *arguments)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("change", "arguments", "missing", "requirement"),
    [
        ({"plugins": [{"name": "RealWork"}]}, ["validate", "job.yaml"], "plugin 'RealWork'", "agent-rollouts[plugins]"),
        (
            {"sandbox": {"provider": "Kodo", "kodo": {"backend": "Docker"}, "image": "debian"}},
            ["run", "job.yaml"],
            "sandbox.provider 'Kodo'",
            "agent-rollouts[kodo]",
        ),
        ({}, ["serve", "job.yaml"], "integration 'harbor-server'", "agent-rollouts"),
        ({}, ["dataset", "tasks"], "integration 'harbor-dataset'", "agent-rollouts[parquet]"),
    ],
    ids=["plugin", "provider", "server", "dataset"],
)
def test_missing_integration_names_its_installation(
    core: Path, tmp_path: Path, change: dict[str, object], arguments: list[str], missing: str, requirement: str
) -> None:
    job = yaml.safe_load(QUICKSTART.read_text())
    job["spec"].update(change)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    run = rolloutctl(core, tmp_path, *arguments)
    told = " ".join(run.stderr.split())
    assert run.returncode == 2, told
    assert f"{missing} is not installed" in told
    assert f"pip install '{requirement}'" in told
