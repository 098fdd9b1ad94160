"""The entry points by which the core finds the optional integrations."""

import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from agent_runtime.plugins.registry import registry as plugins
from agent_runtime.sandboxes.factory import registry as providers
from rolloutctl.integrations import integrations

ROOT = Path(__file__).parents[2]


@pytest.fixture
def distribution(tmp_path: Path) -> Distribution:
    """Return an image's metadata of this distribution, from pyproject.toml."""
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    subprocess.run([sys.executable, ROOT / "hack/images/entry_points.py"], cwd=tmp_path, check=True)
    return Distribution.at(tmp_path / "agent_rollouts.dist-info")


def test_every_entry_point_can_be_loaded(distribution: Distribution) -> None:
    assert distribution.name == "agent-rollouts"
    assert all(callable(entry.load()) for entry in distribution.entry_points)


def test_every_optional_name_has_an_entry_point(distribution: Distribution) -> None:
    declared = {(entry.group, entry.name) for entry in distribution.entry_points}
    assert declared == {
        (registry.group, str(name)) for registry in (plugins, providers, integrations) for name in registry.optional
    }
