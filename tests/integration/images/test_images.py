"""What the images guarantee to people who deploy them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
IMPORT_EVERYTHING = """
# Trainers bring their own environment, and run the engine in it; what runs in a sandbox is copied there, file by file.
ELSEWHERE = ("agent_runtime.integrations.verl.", "agent_rollouts.verl.", "agent_runtime.tasks.in_sandbox.")
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__") and not f"{module.name}.".startswith(ELSEWHERE):
            importlib.import_module(module.name)
        print(module.name)
"""
PACKAGES = {
    "operator": ["rollout_api", "rollout_operator"],
    "runtime": ["rollout_api", "agent_runtime", "agent_rollouts"],
    "vllm-standin": ["tests.support.vllm_server"],
}


@pytest.mark.parametrize("target", PACKAGES)
def test_every_module_of_an_image_can_be_imported_by_its_own_user(target: str, mounted: Any) -> None:
    root, configuration = mounted(target)
    assert configuration["User"] == "65532:65532", "restricted Pod Security wants a number, and not 0"
    started = run(root, configuration, "python3", "-c", IMPORT_EVERYTHING, *PACKAGES[target])
    assert started.returncode == 0, started.stderr
    # Compiled when the image was built: this user cannot write there, so each start would compile again.
    for name in started.stdout.split():
        place = root / "app" / name.replace(".", "/")
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert list((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")), source


def test_runtime_image_finds_integrations_by_entry_point(mounted: Any) -> None:
    root, configuration = mounted("runtime")
    program = "from agent_runtime.plugins.registry import registry; print(registry.find('RealWork').__name__)"
    started = run(root, configuration, "python3", "-c", program)
    assert started.stdout == "RealWork\n", started.stderr


def test_the_stand_in_starts_as_vllms_own_image_does(mounted: Any) -> None:
    root, configuration = mounted("vllm-standin")
    assert configuration["Entrypoint"] == ["vllm", "serve"]
    started = run(root, configuration, *configuration["Entrypoint"], "--help")
    assert started.returncode == 0, started.stderr
    assert "--served-model-name" in started.stdout


def test_proxys_image_starts_with_its_settings_and_may_write_sessions(mounted: Any) -> None:
    root, configuration = mounted("proxy")
    assert configuration["User"] == "65532:65532"
    assert (root / "sessions").stat().st_uid == 65532, "what a new volume there takes over"
    started = run(root, configuration, *configuration["Entrypoint"], "/proxy.yaml")
    assert started.returncode == 1
    assert "No such file or directory: '/proxy.yaml'" in started.stderr


def test_quickstart_image_contains_the_programs_that_grade_its_tasks(mounted: Any) -> None:
    root, configuration = mounted("quickstart")
    started = run(root, configuration, "python3", "-m", "pytest", "--version")
    assert started.returncode == 0, started.stderr


@pytest.mark.parametrize("target", [*PACKAGES, "proxy", "quickstart", "executor"])
def test_image_has_labels_and_no_build_secret(target: str, mounted: Any) -> None:
    root, configuration = mounted(target)
    labels = configuration["Labels"]
    assert target in labels["org.opencontainers.image.title"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    secrets = root / "run/secrets"
    assert not secrets.exists() or not list(secrets.iterdir())


def run(root: Path, configuration: dict[str, Any], *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the image's own user, environment and folder."""
    user = configuration.get("User") or "0:0"
    folder = configuration.get("WorkingDir") or "/"
    inside = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', folder, *command]
    chroot = [str(shutil.which("chroot")), "--userspec", user, "--groups=", str(root)]
    return subprocess.run(
        ["env", "-i", *configuration["Env"], *chroot, *inside], capture_output=True, text=True, check=False
    )


def test_an_unchanged_tree_builds_nothing(build_images: Any, tmp_path: Path) -> None:
    built = build_images("executor")
    # No build program is available, so success means that nothing was built.
    again = subprocess.run(
        [sys.executable, REPOSITORY / "hack/images/build", "executor"],
        env={"PATH": str(tmp_path), "HOME": str(Path.home())},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert [Path(line) for line in again.stdout.split()] == built


def test_changed_file_changes_only_the_images_that_contain_it(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".git", ".venv", "out", "tests", "docs", "benchmarks")
    shutil.copytree(REPOSITORY, tmp_path / "tree", ignore=ignored)
    loader = SourceFileLoader("build_script", str(tmp_path / "tree/hack/images/build"))
    specification = importlib.util.spec_from_loader("build_script", loader)
    assert specification is not None
    script = importlib.util.module_from_spec(specification)
    loader.exec_module(script)

    def digests() -> dict[str, str]:
        return {target: script.digest(target, "latest") for target in script.SOURCES}

    def changed_by(path: str) -> set[str]:
        before = digests()
        file = tmp_path / "tree" / path
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(file.read_text() + "\n" if file.exists() else "")
        after = digests()
        return {target for target in before if before[target] != after[target]}

    assert changed_by("README.md") == set()
    assert changed_by("agent_runtime/executor/__pycache__/server.pyc") == set()
    on_runtime = {"proxy", "vllm-standin", "lake-policy"}
    assert changed_by("agent_runtime/executor/http/server.py") == {"executor", "runtime", *on_runtime}
    assert changed_by("rollout_api/base.py") == {"operator", "runtime", *on_runtime}
    assert changed_by("operator/rollout_operator/new_file.py") == {"operator"}
    assert changed_by("hack/images/launcher.c") == {"executor"}
    assert changed_by("constraints.txt") == {"operator", "runtime", "quickstart", *on_runtime}
    assert changed_by("tests/support/vllm_server/model.py") == {"vllm-standin"}
    assert changed_by("examples/train/server.py") == {"lake-policy"}
    of_examples = {"quickstart", "mini-swe-agent", "coding-agents"}
    assert changed_by("agent_runtime/agents/catalog/pi.py") == {"coding-agents", "runtime", *on_runtime}
    assert changed_by("hack/images/examples.Dockerfile") == {*of_examples, "vllm-standin", "lake-policy"}
    everything = {"operator", "runtime", "executor", *of_examples, *on_runtime}
    assert changed_by("Dockerfile") == everything
