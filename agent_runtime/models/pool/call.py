"""One model call to the pool: the received part of its answer, and the time that counts for the agent."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agent_runtime.models.base import CallHealth, ModelRequest
from agent_runtime.models.pool.gate import CallSpans
from agent_runtime.models.token_exact.routes import Progress


@dataclass
class Sent:
    """Characters that were sent and cannot be revoked."""

    characters: int = 0


@dataclass(eq=False)
class Call:
    """Times are those of the event loop. While a call is on hold, its clock and its agent's clock are stopped."""

    request: ModelRequest
    started: float
    spans: CallSpans
    prompt: str | Sequence[int] | None = None
    """A bare prompt instead of the messages."""
    progress: Progress = field(default_factory=Progress)
    failures: int = 0
    """Consecutive attempts without a token."""
    avoided: set[str] = field(default_factory=set)
    """Servers at which it has failed."""
    stream: asyncio.Timeout | None = None
    """Ends the running attempt."""
    said: Sent = field(default_factory=Sent)
    """Text that was sent to the client."""
    thought: Sent = field(default_factory=Sent)
    """Reasoning that was sent to the client."""
    _held_before: float = field(init=False)
    """Seconds on hold of earlier calls for the same request."""
    _held_at: float | None = None
    _heard_at: float = 0.0
    """When this attempt began or its last token arrived, by the call's clock."""
    _token_at: float = 0.0
    """When the last token of any attempt arrived."""
    _begun_with: tuple[int, float, int] = 0, 0.0, 0
    """Number of token ids, time of the last token, and failures with which this attempt began."""
    _begun_at: float = 0.0

    def __post_init__(self) -> None:
        self._held_before = self.request.health.held_seconds

    @property
    def has_spoken(self) -> bool:
        """Whether the client has a part of the answer."""
        return bool(self.said.characters or self.thought.characters)

    @property
    def group(self) -> str:
        return self.request.group or self.request.session

    def clock(self, now: float) -> float:
        """Return the seconds since the call began, without time on hold."""
        held = 0.0 if self._held_at is None else now - self._held_at
        return now - self.started - (self.request.health.held_seconds - self._held_before) - held

    def hold(self, now: float) -> None:
        if self._held_at is None:
            self._held_at = now
            self.request.health.on_hold(True)

    def release(self, now: float) -> None:
        if self._held_at is not None:
            self.request.health.held_seconds += now - self._held_at
            self._held_at = None
            self.request.health.on_hold(False)

    def begin_attempt(self, now: float) -> None:
        """Begin an attempt. The time since the last token of the earlier attempt counts as lost."""
        clock = self.clock(now)
        if self.request.health.failing is not None:
            self.request.health.lost_seconds += clock - self._heard_at
        self._heard_at = clock
        self._begun_with, self._begun_at = (len(self.progress.ids), self._token_at, self.failures), clock

    def discard_attempt(self) -> None:
        """Discard the tokens of the failed attempt. Its whole time counts as lost."""
        tokens, self._token_at, failures = self._begun_with
        self.progress.keep(tokens)
        self.failures, self._heard_at = failures + 1, self._begun_at

    def heard(self, now: float) -> None:
        self._heard_at = self._token_at = self.clock(now)
        self.request.health.note(None)
        self.failures = 0

    def silent_seconds(self, now: float) -> float:
        """Return the seconds since the last token of any attempt, by the call's own clock."""
        return self.clock(now) - self._token_at

    def excuse(self, seconds: float) -> None:
        """Do not count so many seconds as silence."""
        self._token_at += seconds

    def failed(self, server: str, why: str) -> None:
        self.avoided.add(server)
        self.failures += 1
        self.request.health.note(why)

    def asked(self) -> ModelRequest:
        """Return the request of one attempt, which reports to this call and whose text continues after the last
        attempt's.
        """
        request = self.request
        health = CallHealth(
            on_sign=request.health.on_sign, on_prompt=request.health.on_prompt, on_tokens=request.health.on_tokens
        )
        on_text = _continued(request.on_text, self.said)
        return replace(
            request, health=health, on_text=on_text, on_reasoning=_continued(request.on_reasoning, self.thought)
        )


def _continued(say: Callable[[str], None] | None, said: Sent) -> Callable[[str], None] | None:
    """Return a callback for an attempt that begins at the start of the answer and skips what was sent."""
    if say is None:
        return None
    heard = 0

    def on_piece(text: str) -> None:
        nonlocal heard
        heard += len(text)
        if heard > said.characters:
            new, said.characters = text[said.characters - heard :], heard
            say(new)

    return on_piece
