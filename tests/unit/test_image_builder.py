"""`hack/images/build` builds with a tool that works on this machine, not with one that is merely installed."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).parents[2] / "hack" / "images" / "build"


@pytest.fixture
def script() -> Any:
    loader = SourceFileLoader("build_script", str(BUILD))
    specification = importlib.util.spec_from_loader("build_script", loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    return module


def install(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("docker", "podman", "chosen"),
    [
        ("true", "true", "docker"),
        ('[ "$1" = info ]', "true", "podman"),
        ("false", "true", "podman"),
        ("false", "false", ""),
    ],
    ids=["docker with buildx", "docker without buildx", "docker without daemon", "nothing"],
)
def test_builder_is_a_working_tool(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, docker: str, podman: str, chosen: str
) -> None:
    install(tmp_path, "docker", docker)
    install(tmp_path, "podman", podman)
    monkeypatch.setenv("PATH", str(tmp_path))
    if chosen:
        assert script.builder() == chosen
    else:
        with pytest.raises(SystemExit, match="`docker info` fails, `podman info` fails, buildah is not installed"):
            script.builder()
