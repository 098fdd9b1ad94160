"""A model for tests of the session proxy: exact about tokens, and controlled by the test."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent_runtime.models.base import ModelReply, ModelRequest
from agent_runtime.recording.attempt_folder import digest_of
from agent_runtime.recording.epoch_log import Superseded
from rollout_api.records import ObjectDigest, Record, ResponseRecord, Usage


@dataclass
class TokenModel:
    """Takes token ids: its prompt is the given prefix and 3 new ids for each message. Each answer has different ids."""

    name: str = "tiny"
    token_capture: str = "Tokens"
    asked: list[ModelRequest] = field(default_factory=list)
    cancelled: int = 0
    hold: asyncio.Event | None = None
    """If given, an answer's first word comes at once, and the rest when this is set."""
    failures: list[Exception] = field(default_factory=list)
    """Raised by the next calls, in order."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return two words, and ids that no other answer has."""
        self.asked.append(request)
        number = len(self.asked)
        if self.failures:
            raise self.failures.pop(0)
        say = request.on_text or (lambda piece: None)
        say("word ")
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        say(f"{number}")
        prefix = request.prefix
        ids = list(prefix.ids) if prefix else []
        ids += [7] * 3 * (len(request.messages) - (prefix.messages if prefix else 0))
        return ModelReply(
            message={"role": "assistant", "content": f"word {number}"},
            finish_reason="stop",
            model=self.name,
            usage=Usage(prompt_tokens=len(ids), completion_tokens=2),
            prompt_token_ids=ids,
            completion_token_ids=[1000 + 2 * number, 1001 + 2 * number],
            logprobs=[-0.5, -0.25],
        )

    async def check(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class MemoryJournal:
    """A journal in a list."""

    records: list[Record] = field(default_factory=list)
    hold: asyncio.Event | None = None
    """If given, appends wait for it."""
    superseded: bool = False
    failures: list[Exception] = field(default_factory=list)
    """Raised by the next appends of answers, in order."""

    async def append(self, records: Sequence[Record]) -> None:
        """See `SessionJournal.append`."""
        if self.hold is not None:
            await self.hold.wait()
        if self.superseded:
            raise Superseded("session s, epoch 1: a later epoch has closed it")
        if self.failures and any(isinstance(record, ResponseRecord) for record in records):
            raise self.failures.pop(0)
        self.records += records

    async def store(self, name: str, data: bytes) -> ObjectDigest:
        """See `SessionJournal.store`."""
        return digest_of(name, data)
