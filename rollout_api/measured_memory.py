"""Memory requests by measured use: what executors report, and what a sandbox requests for each workspace because of it.

docs/memory.md explains the formula. A Sandbox gets the request as a number, and an annotation that says that it is measured.
So Sandboxes of one spec count as equal, whatever had been measured when each was created.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from rollout_api.base import MEBIBYTE, ApiModel, quantity
from rollout_api.cluster import MEASURED_ANNOTATION
from rollout_api.sandbox import MEASURED

LEAST_SECONDS: Final = 600.0
"""Workspace-seconds from which on measured use counts."""
LEAST_REQUEST: Final = 16 * MEBIBYTE
QUANTILE: Final = 2.33
"""Standard deviations up to the 99th percentile of a normal distribution, which the sum over many places approaches."""
MARGIN: Final = 1.8
"""Workspaces pause at 0.9 of a sandbox's memory, less a reserve of at most 0.25, less 0.1 for growth between measurements:
at 0.55 = 1 / 1.8. With 1.25, rollouts of `python -m benchmarks memory_overcommit` took 1.25 times as long.
"""
STEP: Final = 0.1
"""Part by which a request must differ from the previous one to replace it."""
KEPT_SECONDS: Final = 1_000_000.0
"""Most workspace-seconds of ended sandboxes that count, so that old use fades."""
_ROUNDING: Final = 1e-6

_MOST: Final = 1e32
"""Most of each sum: beyond all that can be measured, so that hostile reports give no infinite values."""
# No maximum in the schema: API servers compare integral values as 64-bit integers, also with a larger maximum.
_Sum = Annotated[float, Field(ge=0), AfterValidator(lambda value: min(value, _MOST))]


class Measured(ApiModel):
    """Memory of workspaces over time. A workspace and those that joined it count as one."""

    seconds: _Sum = 0.0
    """Time of all workspaces, in seconds."""
    byte_seconds: _Sum = 0.0
    """Sum of the bytes of each, times seconds."""
    square_seconds: _Sum = 0.0
    """Sum of the squares of the bytes of each, times seconds."""

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(
            seconds=self.seconds + other.seconds,
            byte_seconds=self.byte_seconds + other.byte_seconds,
            square_seconds=self.square_seconds + other.square_seconds,
        )

    def within(self, most_seconds: float) -> "Measured":
        """Return the same mean and variance, of at most this time."""
        if self.seconds <= most_seconds:
            return self
        weight = most_seconds / self.seconds
        return Measured(
            seconds=self.seconds * weight,
            byte_seconds=self.byte_seconds * weight,
            square_seconds=self.square_seconds * weight,
        )

    def believed(self, memory: float, most_seconds: float) -> "Measured":
        """Return what counts of an executor's report, which an agent may have forged: nothing if workspaces with a limit of
        `memory` bytes cannot have used that, and no more time than the sandbox can have had.
        """
        most = memory * (1 + _ROUNDING)
        is_possible = (
            self.byte_seconds <= most * self.seconds
            and self.square_seconds <= most * self.byte_seconds
            and self.byte_seconds**2 <= self.square_seconds * self.seconds * (1 + _ROUNDING)
        )
        return self.within(most_seconds) if is_possible else Measured()


def request_of(measured: Measured, memory: float, places: int) -> int | None:
    """Return the bytes to request for each of so many places with a limit of `memory` bytes; None if too little is known."""
    if measured.seconds < LEAST_SECONDS:
        return None
    mean = measured.byte_seconds / measured.seconds
    variance = max(0.0, measured.square_seconds / measured.seconds - mean**2)
    needed = (mean + QUANTILE * math.sqrt(variance / places)) * MARGIN
    rounded = math.ceil(max(needed, LEAST_REQUEST) / MEBIBYTE) * MEBIBYTE
    return min(rounded, math.floor(memory))


def stepped(before: int | None, fresh: int | None) -> int | None:
    """Return the new request, or the one before if the new one is not known or differs little."""
    if fresh is None or (before is not None and abs(fresh - before) < STEP * before):
        return before
    return fresh


def set_request(sandbox: dict[str, Any], request: int | None) -> None:
    """Set the measured request of a new Sandbox, in bytes; None: nothing is known yet."""
    if request is not None:
        sandbox["spec"]["resources"]["memoryRequest"] = quantity(request)
        sandbox["metadata"].setdefault("annotations", {})[MEASURED_ANNOTATION] = MEASURED


def declared_spec(sandbox: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the spec of a Sandbox before `set_request`."""
    spec: Mapping[str, Any] = sandbox.get("spec") or {}
    if MEASURED_ANNOTATION not in (sandbox["metadata"].get("annotations") or {}):
        return spec
    return {**spec, "resources": {**(spec.get("resources") or {}), "memoryRequest": MEASURED}}
