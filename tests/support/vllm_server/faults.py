"""What goes wrong on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Faults:
    """Set by the constructor, `--fault NAME=VALUE`, POST /_standin/faults, or by assigning to `server.faults`."""

    slow: float = 0.0
    """Seconds before a request reaches the engine."""
    hang: bool = False
    """The engine makes no token and answers nothing; /health says 200 and /metrics stands still."""
    hang_after: int | None = None
    """`hang` is set once a request has so many tokens; none gets more. A test need not catch an answer in its midst."""
    hold_at: int | None = None
    """A request with so many tokens gets no more while this is set; the engine is well, and answers."""
    status: int | None = None
    """Data routes answer this, such as 500, 503 or 429."""
    retry_after: float | None = None
    """Header Retry-After of that answer, in seconds."""
    drop_after: int | None = None
    """The connection is cut once so many tokens of an answer are sent; without streaming, are made."""
    times: int | None = None
    """`status` and `drop_after` hit so many requests and then no more; None: all."""
    claim_version: str | None = None
    """/weight_info says this, whatever is loaded."""
    load_failures: int = 0
    """So many loads of weights fail, whatever way they come."""
    load_hangs: bool = False
    """Loads do not come to an end while this is set, as when a trainer dies while it sends."""
    no_logprobs: bool = False
    """Answers have no logprobs, asked for or not."""
    no_token_ids: bool = False
    """`return_token_ids` has no effect, as in a server that does not know it."""
    cut_tool_call: bool = False
    """A scripted answer's tool call breaks off in its JSON."""

    def update(self, changes: Mapping[str, Any]) -> None:
        """Set the named faults. Raises ValueError naming one that there is none of."""
        known = {field.name for field in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise ValueError(f"no such fault: {name}; there are {', '.join(sorted(known))}")
            setattr(self, name, value)

    def hits(self) -> bool:
        """Whether the faults that are counted hit this request; counts it."""
        if self.status is None and self.drop_after is None:
            return False
        if self.times is None:
            return True
        if self.times <= 0:
            return False
        self.times -= 1
        return True
