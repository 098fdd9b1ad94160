"""Source of a ModelServer's servers and its policy state."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from rollout_api.model_server import ModelServerStatus

CONFIRM_SECONDS = 3.0
"""A directory repeats its last status within this time, well below the lease (gate.py), so that one response may be
lost.
"""


@dataclass(frozen=True, slots=True)
class View:
    """A ModelServer's status at `as_of` (the event loop's time) or later."""

    status: ModelServerStatus
    as_of: float


class Directory(Protocol):
    """Follows one ModelServer."""

    def changes(self) -> AsyncIterator[View]:
        """Yield the status whenever it has changed, and every CONFIRM_SECONDS. It may be delayed, but is correct at its
        `as_of`.
        """
