"""Where the servers of a ModelServer, and the state of its policy, are looked up."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from rollout_api.model_server import ModelServerStatus

CONFIRM_SECONDS = 3.0
"""A directory says again what it said last within this time: well below the lease (gate.py), so that one answer may fail."""


@dataclass(frozen=True, slots=True)
class View:
    """What a ModelServer's status was at `as_of` (the event loop's time) or later."""

    status: ModelServerStatus
    as_of: float


class Directory(Protocol):
    """Follows one ModelServer."""

    def changes(self) -> AsyncIterator[View]:
        """The status whenever it has changed, and every CONFIRM_SECONDS; late, but never wrong, while nobody answers."""
