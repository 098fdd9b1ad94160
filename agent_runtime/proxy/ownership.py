"""The sessions of several replicas on one store: each session has one owner, and any replica answers for it.

docs/session-proxy.md says how a session changes its owner. The store has a folder for each session, in which everything is
written once and never changed:

    session.json             what fixes the session, with the digest of its key
    <digest>/epoch-<e>.json… its records, as recording/epoch_log.py has them; a claim says where its holder is reached
    completed.json           its end
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from agent_runtime.models.base import Model
from agent_runtime.proxy.http import Incoming, Reply
from agent_runtime.proxy.keys import matches
from agent_runtime.proxy.metrics import Meter
from agent_runtime.proxy.peers import FORWARDED, MISDIRECTED, PeerLost, Peers
from agent_runtime.proxy.session import Session, SessionSettings
from agent_runtime.proxy.sessions import Owner, check_key, ended, unknown_key
from agent_runtime.recording.attempt_folder import AttemptFolder, Claim
from agent_runtime.recording.epoch_log import EpochLog, Superseded
from agent_runtime.recording.segments import RecordCorrupt, json_bytes
from agent_runtime.recording.store import StorageError, Store
from rollout_api.records import Record


@dataclass(frozen=True)
class SessionStore:
    """The sessions below a URI."""

    store: Store

    def folder(self, settings: SessionSettings) -> AttemptFolder:
        """Of this session alone: a holder of an earlier one of its name, which hung meanwhile, may still write."""
        return AttemptFolder(self.store, f"sessions/{settings.id}/{settings.key_digest[:16]}")

    async def register(self, settings: SessionSettings) -> bool:
        """Write what fixes a session; False where one of that name is there."""
        return await self.store.create(self._settings_key(settings.id), json_bytes(settings))

    async def settings(self, session: str) -> SessionSettings | None:
        """What fixes a session; None where there is none. Raises RecordCorrupt."""
        key = self._settings_key(session)
        if (data := await self.store.get(key)) is None:
            return None
        try:
            return SessionSettings.model_validate_json(data)
        except ValidationError as error:
            raise RecordCorrupt(key, str(error.errors(include_url=False)[0]["msg"])) from error

    async def complete(self, session: str) -> None:
        await self.store.create(self._completed_key(session), json.dumps({"time": time.time()}).encode())

    async def is_completed(self, session: str) -> bool:
        return await self.store.get(self._completed_key(session)) is not None

    async def delete(self, session: str) -> None:
        """Remove it; its name is free again. Interrupted, the session has ended, and has to be deleted again."""
        last = [self._settings_key(session), self._completed_key(session)]
        keys = [meta.key for meta in await self.store.list(f"sessions/{session}")]
        # The name stays taken until the records are gone, which would be those of the next session of that name.
        await self.store.delete([key for key in keys if key not in last])
        await self.store.delete(last)

    def _settings_key(self, session: str) -> str:
        return f"sessions/{session}/session.json"

    def _completed_key(self, session: str) -> str:
        return f"sessions/{session}/completed.json"


IDLE_SECONDS: Final = 600.0
"""A session that nobody calls for so long leaves memory; its next call claims it again."""

_SWEEP_SECONDS: Final = 60.0
_MOST_KNOWN: Final = 20_000
"""Sessions of other owners of which settings and claim are remembered, about 1 KB each; others are read again."""

_LOG = logging.getLogger(__name__)


class _Fenced:
    """A session's journal that tells when somebody else has taken the session over."""

    def __init__(self, log: EpochLog, on_superseded: Callable[[], None]) -> None:
        self._log, self._on_superseded = log, on_superseded

    async def append(self, records: Sequence[Record]) -> None:
        try:
            await self._log.append(records)
        except Superseded:
            self._on_superseded()
            raise


@dataclass
class _Held:
    session: Session
    epoch: int
    used: float
    """Monotonic seconds of the latest request."""


class StoredSessions:
    """`Sessions` that are durable. `address` is the URL at which the other replicas reach this one."""

    def __init__(self, store: SessionStore, model: Model, address: str, peers: Peers, meter: Meter) -> None:
        self.store, self.address = store, address
        self._model, self._peers, self._meter = model, peers, meter
        self._held: dict[str, _Held] = {}
        self._known: OrderedDict[str, tuple[SessionSettings, Claim | None]] = OrderedDict()
        self._taking: dict[str, asyncio.Task[Session | None]] = {}

    @property
    def held(self) -> int:
        """Sessions that this replica owns and has in memory."""
        return len(self._held)

    async def register(self, settings: SessionSettings) -> bool:
        """Make a session, and own it; False where one of that name is there."""
        if not await self.store.register(settings):
            return False
        await self._take(settings, None)
        return True

    async def find(self, session: str, key: str | None) -> Session | Owner:
        held = self._held.get(session)
        if held is not None and _may_have(held.session.settings, key):
            check_key(held.session.settings, key)
            held.used = time.monotonic()
            return held.session
        settings, claim = await self._look_up(session, key)
        check_key(settings, key)
        if claim is not None and claim.address not in (None, self.address):
            return _Elsewhere(self, self._peers, settings, claim)
        # A claim with this address is this process's own from before the session was idle, or that of one before it.
        return await self._take(settings, claim) or await self.find(session, key)

    async def take_over(self, settings: SessionSettings, claim: Claim) -> None:
        _LOG.warning("Session %s: its owner %s does not answer; taking it over.", settings.id, claim.address)
        await self._take(settings, claim)

    def forget(self, session: str) -> None:
        """What is known of its owner is not so any more."""
        self._known.pop(session, None)

    async def complete(self, session: Session) -> None:
        """End a session that is owned here. Raises Superseded where it no longer is."""
        await session.end()
        held = self._held.get(session.settings.id)
        if held is None or await self.store.folder(session.settings).latest_epoch() != held.epoch:
            # An end needs no append, so nothing else would have told.
            self._lose(session)
            raise Superseded(f"session {session.settings.id}: another replica has taken it over")
        await self.store.complete(session.settings.id)
        self._release(session)

    async def sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for held in list(self._held.values()):
                if held.session.is_idle and time.monotonic() - held.used > IDLE_SECONDS:
                    await self._let_go(held.session)

    async def close(self) -> None:
        """Record what is known of all sessions, and give them up, so that other replicas need not find out."""

        async def give_up(held: _Held) -> None:
            await self._let_go(held.session)
            # An epoch without an address is nobody's: whoever is called next takes the one after it.
            folder, name = self.store.folder(held.session.settings), f"session {held.session.settings.id}"
            with contextlib.suppress(StorageError):
                await EpochLog.claim_after(held.epoch, folder, name)

        await asyncio.gather(*(give_up(held) for held in list(self._held.values())))

    async def has_moved(self, settings: SessionSettings, claim: Claim) -> bool:
        return await self.store.folder(settings).latest_claim(claim.epoch) != claim

    async def _let_go(self, session: Session) -> None:
        with contextlib.suppress(Superseded, StorageError):
            await session.flush()
        if session.is_idle:
            self._release(session)

    def _release(self, session: Session) -> None:
        held = self._held.get(session.settings.id)
        if held is not None and held.session is session:
            del self._held[session.settings.id]
        self.forget(session.settings.id)

    async def _look_up(self, session: str, key: str | None) -> tuple[SessionSettings, Claim | None]:
        if (known := self._known.get(session)) is not None and _may_have(known[0], key):
            return known
        if (settings := await self.store.settings(session)) is None:
            raise unknown_key()
        if await self.store.is_completed(session):
            # The key is checked by who asks next, so that only its holder learns of the end.
            return settings, None
        known = settings, await self.store.folder(settings).latest_claim()
        self._known[session] = known
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return known

    async def _take(self, settings: SessionSettings, claim: Claim | None) -> Session | None:
        """Own the session after `claim`; None where somebody else was first. Of several requests one does it."""
        if (taking := self._taking.get(settings.id)) is None:
            taking = self._taking[settings.id] = asyncio.ensure_future(self._claim(settings, claim))
            taking.add_done_callback(lambda _: self._taking.pop(settings.id))
        return await asyncio.shield(taking)

    async def _claim(self, settings: SessionSettings, claim: Claim | None) -> Session | None:
        self.forget(settings.id)
        if await self.store.is_completed(settings.id):
            raise ended(settings.id)
        log = await EpochLog.claim_after(
            claim.epoch if claim else 0, self.store.folder(settings), f"session {settings.id}", self.address
        )
        if log is None:
            return None
        try:
            recorded = await log.begin()
        except Superseded:
            return None
        registered = await self.store.settings(settings.id)
        if registered is None or registered.key_digest != settings.key_digest:
            raise unknown_key()  # deleted meanwhile, and perhaps registered anew
        session = Session(settings, self._model, _Fenced(log, lambda: self._lose(session)), recorded, meter=self._meter)
        self._held[settings.id] = _Held(session, log.epoch, time.monotonic())
        return session

    def _lose(self, session: Session) -> None:
        _LOG.warning("Session %s was taken over by another replica.", session.settings.id)
        session.drop()
        self._release(session)


def _may_have(settings: SessionSettings, key: str | None) -> bool:
    """Whether the key may be that session's: if not, it may have been deleted, and registered anew."""
    return key is None or matches(key, settings.key_digest)


@dataclass(frozen=True)
class _Elsewhere:
    """An `Owner`."""

    sessions: StoredSessions
    peers: Peers
    settings: SessionSettings
    claim: Claim

    async def forward(self, request: Incoming) -> Reply | None:
        if FORWARDED in request.headers:
            return Reply(MISDIRECTED, {}, b"")
        assert self.claim.address is not None  # `find` has looked
        try:
            reply = await self.peers.forward(
                self.claim.address,
                self.settings,
                request,
                lambda: self.sessions.has_moved(self.settings, self.claim),
            )
        except PeerLost:
            await self.sessions.take_over(self.settings, self.claim)
            return None
        if reply.status == MISDIRECTED:
            self.sessions.forget(self.settings.id)
            return None
        return reply
