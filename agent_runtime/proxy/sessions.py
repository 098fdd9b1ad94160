"""Lookup of sessions by key, and of the replica that owns each."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from agent_runtime.models.base import Model
from agent_runtime.proxy.chat import ErrorKind, Refused
from agent_runtime.proxy.http import Incoming, Reply
from agent_runtime.proxy.keys import matches
from agent_runtime.proxy.metrics import Meter
from agent_runtime.proxy.session import OverBudget, Session, SessionJournal, SessionSettings, ended
from rollout_api.records import Record


class Owner(Protocol):
    """Another replica that owns a session."""

    async def forward(self, request: Incoming) -> Reply | None:
        """Return its reply; None if it no longer owns the session, which must then be looked up again."""


class Sessions(Protocol):
    """The sessions that this process can find."""

    async def find(self, session: str, key: str | None) -> Session | Owner:
        """Return the session for a request with this key; without a key, for its administrator. Raises Refused."""

    def of_replica(self, session: str, headers: Mapping[str, str]) -> Session | None:
        """Return the session if this process owns it and another replica sent this request about it; else None."""

    def proof(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return headers that prove to another replica, which has sent these, that it has reached a replica."""


def check_key(settings: SessionSettings, key: str | None) -> None:
    """Check that the key is the session's and has not expired. Raises Refused."""
    if key is None:
        return
    if not matches(key, settings.key_digest):
        raise unknown_key()
    check_expiry(settings)


def check_expiry(settings: SessionSettings) -> None:
    """Check that the session has not expired. Raises Refused."""
    if settings.expires is not None and time.time() >= settings.expires:
        raise Refused(ErrorKind.UNAUTHORIZED, f"the key of session {settings.id} has expired; register another session")


def unknown_key() -> Refused:
    """Return the same message for an unknown session and a wrong key, so that guessing reveals nothing."""
    return Refused(
        ErrorKind.UNAUTHORIZED,
        "this key does not belong to a session; use the key that was returned when the session was registered",
    )


class LocalSessions:
    """`Sessions` of a process that opens and ends them itself, such as a runner: one session for each attempt."""

    def __init__(self, model: Model, meter: Meter | None = None) -> None:
        self._model, self._meter = model, meter
        self._open: dict[str, Session] = {}
        self._ended: dict[str, SessionSettings] = {}

    def open(
        self,
        settings: SessionSettings,
        journal: SessionJournal,
        recorded: Sequence[Record] = (),
        on_over_budget: OverBudget | None = None,
    ) -> Session:
        """Open a session: the holder of its key can call the model, and calls are recorded in the journal."""
        session = Session(settings, self._model, journal, recorded, on_over_budget=on_over_budget, meter=self._meter)
        self._open[settings.id] = session
        return session

    async def end(self, session: str) -> None:
        """End the session, because its attempt has ended or was replaced: requests with its key get 409 afterwards.
        Returns when everything is recorded.
        """
        ending = self._open.pop(session)
        self._ended[session] = ending.settings
        await ending.end()

    def of_replica(self, session: str, headers: Mapping[str, str]) -> None:
        """Return None: there are no other replicas."""

    def proof(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return none: there are no other replicas."""
        return {}

    async def find(self, session: str, key: str | None) -> Session:
        found = self._open.get(session)
        settings = found.settings if found is not None else self._ended.get(session)
        if settings is None:
            raise unknown_key()
        check_key(settings, key)
        if found is None:
            raise ended(session)
        return found
