"""One model call on its way through the servers: what has arrived of it, and whose time it takes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agent_runtime.models.base import CallHealth, ModelRequest
from agent_runtime.models.pool.gate import CallSpans
from agent_runtime.models.vllm.server import Progress


@dataclass(eq=False)
class Call:
    """Times are of the event loop. A held call's clock stands still, and so does its agent's."""

    request: ModelRequest
    started: float
    spans: CallSpans
    prompt: str | Sequence[int] | None = None
    """A bare prompt in place of the messages."""
    progress: Progress = field(default_factory=Progress)
    failures: int = 0
    """Tries in a row that brought no token."""
    avoided: set[str] = field(default_factory=set)
    """Servers at which it has failed."""
    stream: asyncio.Timeout | None = None
    """Ends the try that is under way."""
    said: int = 0
    """Characters of text that were given out, and cannot be taken back."""
    _held_at: float | None = None
    _heard_at: float = 0.0
    """When this try began, or its last token came; by the call's own clock."""
    _token_at: float = 0.0
    """When the last token came, of whichever try."""
    _begun_with: int = 0
    """Ids that this try goes on from."""

    @property
    def group(self) -> str:
        return self.request.group or self.request.session

    def clock(self, now: float) -> float:
        """Seconds since it began, those left out in which it was held."""
        held = 0.0 if self._held_at is None else now - self._held_at
        return now - self.started - self.request.health.held_seconds - held

    def hold(self, now: float) -> None:
        if self._held_at is None:
            self._held_at = now
            self.request.health.on_hold(True)

    def release(self, now: float) -> None:
        if self._held_at is not None:
            self.request.health.held_seconds += now - self._held_at
            self._held_at = None
            self.request.health.on_hold(False)

    def begin_try(self, now: float) -> None:
        """It is sent. What an earlier try spent since its last token, and the pause after that, came to nothing."""
        clock = self.clock(now)
        if self.request.health.failing is not None:
            self.request.health.lost_seconds += clock - self._heard_at
        self._heard_at = clock
        self._begun_with = len(self.progress.ids)

    def undo_try(self) -> None:
        if len(self.progress.ids) > self._begun_with:
            del self.progress.ids[self._begun_with :], self.progress.logprobs[self._begun_with :]
            self.progress.policy_spans, self.progress.finish_reason = [], None

    def heard(self, now: float) -> None:
        self._heard_at = self._token_at = self.clock(now)
        self.request.health.note(None)
        self.failures = 0

    def silent_seconds(self, now: float) -> float:
        """Since the last token, of whichever try, by its own clock."""
        return self.clock(now) - self._token_at

    def failed(self, server: str, why: str) -> None:
        self.avoided.add(server)
        self.failures += 1
        self.request.health.note(why)

    def asked(self) -> ModelRequest:
        """The request of one try: its troubles are this call's own, and its text begins where the last try's ended."""
        say, heard = self.request.on_text, 0
        on_text: Callable[[str], None] | None = None
        if say is not None:

            def on_text(text: str) -> None:
                nonlocal heard
                heard += len(text)
                if heard > self.said:
                    new, self.said = text[self.said - heard :], heard
                    say(new)

        return replace(self.request, health=CallHealth(on_sign=self.request.health.on_sign), on_text=on_text)
