"""What a sandbox of N workspaces asks for: N times one workspace's, and what the executor needs for itself."""

import math
from dataclasses import dataclass

from rollout_api.base import quantity_value
from rollout_api.sandbox import Resources

MEBIBYTE = 2**20
# Measured in a pod: 24 MB for the executor and 3 MB for each workspace's own processes. Twice that, because what the
# executor cannot have it takes from the workspaces: on cgroup v2 going over the pod's limit ends them all.
EXECUTOR_MEMORY = 48 * MEBIBYTE
WORKSPACE_MEMORY = 6 * MEBIBYTE
# Of a command's output the executor keeps up to 64 MiB of each stream in its state folder; a few large ones at once.
EXECUTOR_DISK = 256 * MEBIBYTE
WORKSPACE_DISK = 64 * MEBIBYTE
# Memory that the smallest useful limit of a pod template has to leave to the workspaces.
LEAST_MEMORY = 16 * MEBIBYTE


@dataclass(frozen=True)
class Needs:
    """Of a whole sandbox. None where the user has set no bound."""

    places: int
    cpu_millis: int | None
    memory_bytes: int | None
    """For the workspaces alone; so is `disk_bytes`."""
    disk_bytes: int | None

    @property
    def own_memory(self) -> int:
        """Bytes that the executor needs beside the workspaces."""
        return EXECUTOR_MEMORY + self.places * WORKSPACE_MEMORY

    @property
    def own_disk(self) -> int:
        """Bytes that the executor may write beside the workspaces."""
        return EXECUTOR_DISK + self.places * WORKSPACE_DISK

    def requests(self) -> dict[str, str]:
        """Requests of the container. Without any the pod would be the first to be evicted."""
        return {"memory": quantity(self.own_memory)} | self.limits()

    def limits(self) -> dict[str, str]:
        """Limits of the container."""
        limits = {}
        if self.cpu_millis is not None:
            limits["cpu"] = f"{self.cpu_millis}m"
        if self.memory_bytes is not None:
            limits["memory"] = quantity(self.memory_bytes + self.own_memory)
        if self.disk_bytes is not None:
            limits["ephemeral-storage"] = quantity(self.disk_bytes + self.own_disk)
        return limits


def needs_of(one: Resources, places: int) -> Needs:
    """What a sandbox with so many places needs, when `one` is what each workspace may use."""
    return Needs(
        places=places,
        cpu_millis=None if one.cpu is None else max(1, math.ceil(quantity_value(one.cpu) * 1000 * places)),
        memory_bytes=None if one.memory is None else math.ceil(quantity_value(one.memory) * places),
        disk_bytes=None if one.disk is None else math.ceil(quantity_value(one.disk) * places),
    )


def quantity(count: int) -> str:
    """Bytes as people read them in `kubectl describe`, exactly."""
    return f"{count // MEBIBYTE}Mi" if count % MEBIBYTE == 0 else str(count)


def bytes_of(given: object, where: str) -> int:
    """The bytes of a quantity that nobody has checked yet. Raises ValueError that names `where`."""
    try:
        return math.floor(quantity_value(str(given)))
    except (KeyError, ValueError):
        raise ValueError(f"{where}: {given!r} is not understood; expected a quantity such as 512Mi") from None
