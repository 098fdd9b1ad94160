"""`Plain` on a disk that others write to as well, as every pod's is."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from agent_runtime.executor.host import Limits
from tests.integration.executor_workspaces.helpers import Inside, run

LIMIT = 20_000_000


async def test_what_others_write_to_the_disk_is_not_a_workspaces_fault(plain: Inside) -> None:
    root = Path(plain.host.config.root)  # type: ignore[attr-defined]
    (root / "of the image").write_bytes(b"x" * 3 * LIMIT)
    workspace = await plain.make(limits=Limits(disk_bytes=LIMIT))
    with tempfile.TemporaryDirectory() as elsewhere:
        working = asyncio.create_task(run(workspace, "echo some > own; sleep 1; cat own"))
        for number in range(10):
            (Path(elsewhere) / str(number)).write_bytes(b"x" * LIMIT)
            await asyncio.sleep(0.05)
        ended = await working
    assert (ended.exit.cause, ended.output) == (None, "some\n")
    assert workspace.usage()["diskBytes"] < LIMIT


async def test_what_a_workspace_writes_to_the_disk_ends_it(plain: Inside) -> None:
    workspace = await plain.make(limits=Limits(disk_bytes=LIMIT))
    fill = "mkdir deep; for i in $(seq 100); do head -c 1000000 /dev/zero > deep/$i; sleep 0.02; done; sleep 100"
    assert (await run(workspace, fill)).exit.cause == "Disk"
    assert workspace.usage()["diskBytes"] > LIMIT
