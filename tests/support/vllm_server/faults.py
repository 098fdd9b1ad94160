"""Faults on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Faults:
    """Faults, set by the constructor, `--fault NAME=VALUE`, POST /_standin/faults, or `server.faults`."""

    slow: float = 0.0
    """Seconds before a request reaches the engine."""
    hang: bool = False
    """Whether the engine hangs: it samples no tokens and answers nothing. /health says 200, and /metrics does not
    change.
    """
    hang_after: int | None = None
    """Number of tokens of a request after which `hang` is set and no request gets more, so that a test need not hit the
    middle of an answer.
    """
    hold_at: int | None = None
    """Number of tokens after which a request gets no more while this is set. The engine still works and answers."""
    status: int | None = None
    """Status with which data routes answer, such as 500, 503 or 429."""
    longer_than: int = 0
    """`status` affects only prompts of more tokens, such as all but the client's own test request."""
    retry_after: float | None = None
    """Header Retry-After of that answer, in seconds."""
    drop_after: int | None = None
    """Number of tokens after which the connection is cut: sent ones of a stream, else sampled ones."""
    times: int | None = None
    """Number of requests that `status` and `drop_after` affect; None: all."""
    claim_version: str | None = None
    """What /weight_info says, whatever is loaded."""
    load_failures: int = 0
    """Number of loads of weights that fail, of any kind."""
    load_hangs: bool = False
    """Whether loads hang, as when a trainer dies while it sends."""
    no_logprobs: bool = False
    """Answers have no logprobs, even if requested."""
    no_token_ids: bool = False
    """`return_token_ids` has no effect, as in a server that does not know it."""
    cut_tool_call: bool = False
    """A scripted answer's tool call breaks off in its JSON."""

    def update(self, changes: Mapping[str, Any]) -> None:
        """Set the named faults. Raises ValueError for an unknown name."""
        known = {field.name for field in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise ValueError(f"no such fault: {name}; there are {', '.join(sorted(known))}")
            setattr(self, name, value)

    def hits(self) -> bool:
        """Whether the counted faults affect this request; counts it."""
        if self.status is None and self.drop_after is None:
            return False
        if self.times is None:
            return True
        if self.times <= 0:
            return False
        self.times -= 1
        return True
