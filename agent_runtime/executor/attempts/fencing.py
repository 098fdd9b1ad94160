"""Fencing of an attempt: only the newest (epoch, holder) may use it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from agent_runtime.executor.errors import ApiError, bad_request

MAX_EPOCH = 2**53
# Valid names of a holder, and of an attempt.
NAME = r"[!-~]{1,200}"
_FENCE = re.compile(rf"(\d{{1,16}}):({NAME})", re.ASCII)


class Hold(NamedTuple):
    """One runner's claim to an attempt."""

    epoch: int
    holder: str

    def __str__(self) -> str:
        return f"epoch {self.epoch} of {self.holder!r}"


# A runner repeats this with every call of an attempt.
@lru_cache(maxsize=1024)
def read_hold(value: str) -> Hold:
    """Parse a Rollout-Fence header. Raises BadRequest."""
    found = _FENCE.fullmatch(value)
    if not found or int(found[1]) > MAX_EPOCH:
        raise bad_request(
            f"Rollout-Fence: EPOCH:HOLDER expected, a whole number and 1 to 200 visible characters, got {value!r}"
        )
    return Hold(int(found[1]), found[2])


class Fence:
    """The fence of one attempt. It only decides; `Attempt` waits. `current` only increases."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self.current: Hold | None = None

    def raise_to(self, hold: Hold) -> bool:
        """Make `hold` the current one; False if it already was. Raises Fenced if a newer one, or another of the same
        epoch, is current.
        """
        current = self.current
        if current == hold:
            return False
        if current is not None and hold.epoch <= current.epoch:
            raise self._fenced(hold)
        self.current = hold
        return True

    def require(self, hold: Hold) -> None:
        """Raise Fenced unless `hold` is the current one."""
        if hold != self.current:
            raise self._fenced(hold)

    def _fenced(self, hold: Hold) -> ApiError:
        if self.current is None:
            return ApiError(
                "Fenced",
                f"attempt {self._attempt!r} was never fenced here; PUT /v1/attempts/{{attempt}}/fence comes first",
            )
        advice = (
            "PUT its fence before using it" if hold.epoch > self.current.epoch else "another runner has taken it over"
        )
        return ApiError(
            "Fenced", f"attempt {self._attempt!r} is held by {self.current}, and this call is of {hold}: {advice}"
        )
