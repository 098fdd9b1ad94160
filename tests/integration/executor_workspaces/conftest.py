"""Real hosts in this process. `overlay` needs root on Linux, or a kernel that lets users create namespaces."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_runtime.executor.overlay import open_host
from agent_runtime.executor.overlay.config import HostConfig
from agent_runtime.executor.overlay.hosts import Host
from tests.integration.executor_workspaces.helpers import Inside


@contextlib.asynccontextmanager
async def opened(config: HostConfig) -> AsyncIterator[Host]:
    host, _ = await open_host(config)
    try:
        yield host
    finally:
        await host.close()


@pytest.fixture
async def overlay(tmp_path: Path) -> AsyncIterator[Inside]:
    async with opened(HostConfig(state_dir=str(tmp_path), mode="Overlay", places=300)) as host:
        yield Inside(host)


@pytest.fixture
async def plain(tmp_path: Path) -> AsyncIterator[Inside]:
    # Not below tmp_path, whose parents nobody but its owner may enter: commands run as another user.
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o777)
        async with opened(HostConfig(state_dir=str(tmp_path), mode="Plain", root=root)) as host:
            yield Inside(host)
