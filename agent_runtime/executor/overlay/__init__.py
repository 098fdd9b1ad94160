"""Hosts of workspaces: many isolated ones (`Overlay`), or one on the container's own root (`Plain`).

start_zygote()                                # first thing in the process
    host, reason = await open_host(HostConfig(state_dir="/var/lib/executor"))
    workspace = await host.create(WorkspaceSpec("w1"))

docs/workspaces.md says how it works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_runtime.executor.host import HostFailure
from agent_runtime.executor.overlay.zygote import start_zygote

if TYPE_CHECKING:
    from agent_runtime.executor.overlay.config import HostConfig
    from agent_runtime.executor.overlay.hosts import Host

__all__ = ["HostFailure", "open_host", "start_zygote"]


async def open_host(config: HostConfig) -> tuple[Host, str | None]:
    """Open the host for `config.mode`; return it with, in `Auto`, why it is `Plain` and not `Overlay`.

    Raises HostFailure if the trial of a requested `Overlay` failed, or another executor uses the state folder.
    """
    # Here and not above, so that the zygote is forked before asyncio is imported.
    from agent_runtime.executor.overlay.hosts import open_overlay_or_plain

    return await open_overlay_or_plain(config)
