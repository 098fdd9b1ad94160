"""The sessions of several replicas on one store: each session has one owner, and any replica accepts its requests.

docs/session-proxy.md says how a session changes its owner. The store has a folder for each session, in which everything is
written once and never changed:

    session.json the session's settings, with the digest of its key
    <digest>/epoch-<e>.json… its records in the format of recording/epoch_log.py; a claim has the address of its holder
    <digest>/completed.json  its end

`replicas/secret`, next to these folders, authenticates requests between replicas.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from agent_runtime.models.base import Model
from agent_runtime.proxy.http import Incoming, Reply
from agent_runtime.proxy.keys import matches
from agent_runtime.proxy.metrics import Meter
from agent_runtime.proxy.peers import MISDIRECTED, PeerLost, Peers
from agent_runtime.proxy.session import Session, SessionSettings, ended
from agent_runtime.proxy.sessions import Owner, check_key, unknown_key
from agent_runtime.recording.attempt_folder import AttemptFolder, Claim
from agent_runtime.recording.epoch_log import EpochLog, Superseded
from agent_runtime.recording.segments import RecordCorrupt, json_bytes
from agent_runtime.recording.store import StorageError, Store
from rollout_api.records import ObjectDigest, Record


def _folder_of(settings: SessionSettings) -> str:
    return settings.key_digest[:16]


@dataclass(frozen=True)
class SessionStore:
    """The sessions below a URI."""

    store: Store

    def folder(self, settings: SessionSettings) -> AttemptFolder:
        """Return the folder of this session. An earlier session of the same name has another folder, to which a hung
        owner may still write.
        """
        return AttemptFolder(self.store, f"sessions/{settings.id}/{_folder_of(settings)}")

    async def replica_secret(self) -> bytes:
        """Return the secret that the replicas on this store share; the first of them creates it."""
        await self.store.create(_SECRET_KEY, secrets.token_bytes(32))
        found = await self.store.get(_SECRET_KEY)
        if found is None or len(found) != 32:
            raise RecordCorrupt(_SECRET_KEY, "expected 32 bytes; delete it, and restart all replicas")
        return found

    async def register(self, settings: SessionSettings) -> bool:
        """Write the settings of a session; False if its name is taken."""
        return await self.store.create(self._settings_key(settings.id), json_bytes(settings))

    async def settings(self, session: str) -> SessionSettings | None:
        """Return the settings of a session; None if it does not exist. Raises RecordCorrupt."""
        key = self._settings_key(session)
        if (data := await self.store.get(key)) is None:
            return None
        try:
            return SessionSettings.model_validate_json(data)
        except ValidationError as error:
            raise RecordCorrupt(key, str(error.errors(include_url=False)[0]["msg"])) from error

    async def complete(self, settings: SessionSettings) -> None:
        await self.store.create(self._completed_key(settings), json.dumps({"time": time.time()}).encode())

    async def is_completed(self, settings: SessionSettings) -> bool:
        return await self.store.get(self._completed_key(settings)) is not None

    async def delete(self, settings: SessionSettings) -> None:
        """Delete the session, which frees its name. After an interruption the session has ended and must be deleted
        again. If another replica has already deleted it, a later session of the same name is not changed.
        """
        name, completed = self._settings_key(settings.id), self._completed_key(settings)
        # List the keys first, so that a session registered later keeps its objects.
        keys = [meta.key for meta in await self.store.list(f"sessions/{settings.id}")]
        if not await self._is_registered(settings):
            return
        # Free the name last, so that an interrupted deletion can be repeated.
        await self.store.delete([key for key in keys if key not in (name, completed)])
        if await self._is_registered(settings):
            await self.store.delete([name])
        await self.store.delete([completed])

    async def _is_registered(self, settings: SessionSettings) -> bool:
        standing = await self.settings(settings.id)
        return standing is not None and standing.key_digest == settings.key_digest

    def _settings_key(self, session: str) -> str:
        return f"sessions/{session}/session.json"

    def _completed_key(self, settings: SessionSettings) -> str:
        return f"sessions/{settings.id}/{_folder_of(settings)}/completed.json"


_SECRET_KEY: Final = "replicas/secret"

IDLE_SECONDS: Final = 600.0
"""A session without calls for this time leaves memory; its next call claims it again."""

_SWEEP_SECONDS: Final = 60.0
_MOST_KNOWN: Final = 20_000
"""Sessions of other owners whose settings and claim are cached, about 1 KB each; others are read again."""

_LOG = logging.getLogger(__name__)


class _Fenced:
    """A session's journal that reports when another replica has taken the session over."""

    def __init__(self, log: EpochLog, on_superseded: Callable[[], None]) -> None:
        self._log, self._on_superseded = log, on_superseded

    async def append(self, records: Sequence[Record]) -> None:
        try:
            await self._log.append(records)
        except Superseded:
            self._on_superseded()
            raise

    async def store(self, name: str, data: bytes) -> ObjectDigest:
        return await self._log.store(name, data)

    async def test_storage(self) -> None:
        await self._log.test_storage()


@dataclass
class _OwnedSession:
    session: Session
    epoch: int
    used: float
    """Monotonic time of the latest request."""


class StoredSessions:
    """`Sessions` in storage. Other replicas reach this one at the URL `address`."""

    def __init__(self, store: SessionStore, model: Model, address: str, peers: Peers, meter: Meter) -> None:
        self.store, self.address = store, address
        self._model, self._peers, self._meter = model, peers, meter
        self._held: dict[str, _OwnedSession] = {}
        self._known: OrderedDict[str, tuple[SessionSettings, Claim | None]] = OrderedDict()
        self._taking: dict[str, asyncio.Task[Session | None]] = {}

    @property
    def held(self) -> int:
        """Return the sessions that this replica owns and has in memory."""
        return len(self._held)

    async def register(self, settings: SessionSettings) -> bool:
        """Create a session, and own it; False if its name is taken."""
        if not await self.store.register(settings):
            return False
        await self._take(settings, None)
        return True

    def of_replica(self, session: str, headers: Mapping[str, str]) -> Session | None:
        """See `Sessions.of_replica`."""
        held = self._held.get(session)
        return held.session if held is not None and self._peers.sent(headers, held.session.settings) else None

    def proof(self, headers: Mapping[str, str]) -> dict[str, str]:
        """See `Sessions.proof`."""
        return self._peers.proof(headers, self.address)

    async def find(self, session: str, key: str | None) -> Session | Owner:
        held = self._held.get(session)
        if held is not None:
            if await self._is_latest(held.session.settings, key):
                check_key(held.session.settings, key)
                held.used = time.monotonic()
                return held.session
            if key is None:
                self._handle_takeover(held.session)
        settings, claim = await self._look_up(session, key)
        check_key(settings, key)
        if claim is not None and claim.address not in (None, self.address):
            return RemoteOwner(self, self._peers, settings, claim)
        # If the claim has this replica's address, this process released the idle session, or its predecessor owned it.
        return await self._take(settings, claim) or await self.find(session, key)

    async def take_over(self, settings: SessionSettings, claim: Claim) -> None:
        _LOG.warning("Session %s: its owner %s does not answer; taking it over.", settings.id, claim.address)
        await self._take(settings, claim)

    def forget(self, session: str) -> None:
        """Remove the owner from the cache, because it has changed."""
        self._known.pop(session, None)

    async def complete(self, session: Session) -> None:
        """End a session that this replica owns. Raises Superseded if another replica has taken it over."""
        await session.end()
        held = self._held.get(session.settings.id)
        if held is None or await self.store.folder(session.settings).latest_epoch() != held.epoch:
            # Ending a session appends nothing, so only this check detects a takeover.
            self._handle_takeover(session)
            raise Superseded(f"session {session.settings.id}: another replica has taken it over")
        await self.store.complete(session.settings)
        self._release(session)

    async def sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for held in list(self._held.values()):
                if held.session.is_idle and time.monotonic() - held.used > IDLE_SECONDS:
                    await self._release_idle(held.session)

    async def close(self) -> None:
        """Record the state of all sessions and release them, so that other replicas can take over at once."""

        async def give_up(held: _OwnedSession) -> None:
            await self._release_idle(held.session)
            # Claim an epoch without an address: the session then has no owner, and the next replica that gets a request
            # claims it.
            folder, name = self.store.folder(held.session.settings), f"session {held.session.settings.id}"
            with contextlib.suppress(StorageError):
                await EpochLog.claim_after(held.epoch, folder, name)

        await asyncio.gather(*(give_up(held) for held in list(self._held.values())))

    async def has_moved(self, settings: SessionSettings, claim: Claim) -> bool:
        return await self.store.folder(settings).latest_claim(claim.epoch) != claim

    async def _release_idle(self, session: Session) -> None:
        with contextlib.suppress(Superseded, StorageError):
            await session.flush()
        if session.is_idle:
            self._release(session)

    def _release(self, session: Session) -> None:
        held = self._held.get(session.settings.id)
        if held is not None and held.session is session:
            del self._held[session.settings.id]
        self.forget(session.settings.id)

    async def _is_latest(self, settings: SessionSettings, key: str | None) -> bool:
        """Whether a request is for that session, and not for a later one of the same name. The key determines that.
        Without a key, at a keyless proxy or for its administrator, the store is read.
        """
        return await self.store.settings(settings.id) == settings if key is None else matches(key, settings.key_digest)

    async def _look_up(self, session: str, key: str | None) -> tuple[SessionSettings, Claim | None]:
        if (known := self._known.get(session)) is not None and await self._is_latest(known[0], key):
            return known
        if (settings := await self.store.settings(session)) is None:
            raise unknown_key()
        if await self.store.is_completed(settings):
            # The caller checks the key, so that only its holder learns that the session has ended.
            return settings, None
        known = settings, await self.store.folder(settings).latest_claim()
        self._known[session] = known
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return known

    async def _take(self, settings: SessionSettings, claim: Claim | None) -> Session | None:
        """Take the session over from the holder of `claim`; None if another replica was faster. Concurrent requests
        share one takeover.
        """
        if (taking := self._taking.get(settings.key_digest)) is None:
            taking = self._taking[settings.key_digest] = asyncio.ensure_future(self._claim(settings, claim))
            taking.add_done_callback(lambda _: self._taking.pop(settings.key_digest))
        return await asyncio.shield(taking)

    async def _claim(self, settings: SessionSettings, claim: Claim | None) -> Session | None:
        self.forget(settings.id)
        if await self.store.is_completed(settings):
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
            raise unknown_key()  # it was deleted, and maybe registered again
        session = Session(
            settings, self._model, _Fenced(log, lambda: self._handle_takeover(session)), recorded, meter=self._meter
        )
        self._held[settings.id] = _OwnedSession(session, log.epoch, time.monotonic())
        return session

    def _handle_takeover(self, session: Session) -> None:
        _LOG.warning("Session %s was taken over by another replica.", session.settings.id)
        session.drop()
        self._release(session)


@dataclass(frozen=True)
class RemoteOwner:
    """An `Owner` in another replica."""

    sessions: StoredSessions
    peers: Peers
    settings: SessionSettings
    claim: Claim

    async def forward(self, request: Incoming) -> Reply | None:
        if self.peers.sent(request.headers, self.settings):
            return Reply(MISDIRECTED, {}, b"")
        assert self.claim.address is not None  # `find` has checked this
        try:
            reply = await self.peers.forward(
                self.claim.address, self.settings, request, lambda: self.sessions.has_moved(self.settings, self.claim)
            )
        except PeerLost:
            await self.sessions.take_over(self.settings, self.claim)
            return None
        if reply.status == MISDIRECTED:
            self.sessions.forget(self.settings.id)
            return None
        return reply
