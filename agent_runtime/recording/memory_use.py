"""What sandboxes of earlier runs have used of memory: `memory/<kind>.json`, next to the runs.

Runners replace each other's objects. By that a part of a sum over many workspaces may be lost; nothing depends on it.
"""

import logging

from pydantic import ValidationError

from agent_runtime.recording.store import StorageError, Store
from rollout_api.measured_memory import KEPT_SECONDS, Measured

STORAGE_SECONDS = 5.0
"""Time for a request. A sandbox waits for it, and starts without it too."""

log = logging.getLogger(__name__)


class MemoryUse:
    """The measured use in one output. Equal sandboxes are of one kind. `output` should not be patient."""

    def __init__(self, output: Store) -> None:
        self._output = output

    async def read(self, kind: str) -> Measured:
        """Return what is known; nothing if it cannot be read."""
        try:
            found = await self._output.get(_key(kind))
            return Measured() if found is None else Measured.model_validate_json(found)
        except (StorageError, ValidationError) as error:
            log.warning("measured memory of earlier runs cannot be read, so sandboxes request all of it: %s", error)
            return Measured()

    async def write(self, kind: str, used: Measured) -> None:
        """Store what later runs are to know; not if storage cannot be reached."""
        try:
            await self._output.put(_key(kind), used.within(KEPT_SECONDS).model_dump_json(by_alias=True).encode())
        except StorageError as error:
            log.warning("measured memory cannot be stored for later runs: %s", error)


def _key(kind: str) -> str:
    return f"memory/{kind}.json"
