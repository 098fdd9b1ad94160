"""Sessions in storage: the remains of one must never become part of another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.proxy.ownership import SessionStore
from agent_runtime.proxy.session import SessionSettings
from agent_runtime.recording.store import Store


async def test_name_stays_taken_when_deletion_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = SessionStore(Store.open(str(tmp_path), {}))
    first, second = (SessionSettings(id="s", key_digest=digit * 64, created=0.0) for digit in "12")
    assert await sessions.register(first)
    for key in (sessions.folder(first).claim_key(1), sessions.folder(first).segment_key(1, 0)):
        await sessions.store.create(key, b"a record")
    await sessions.complete(first)
    delete = Store.delete

    async def dies(store: Store, keys: Sequence[str]) -> None:
        await delete(store, keys[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "delete", dies)
    with pytest.raises(KeyboardInterrupt):
        await sessions.delete(first)
    monkeypatch.undo()
    assert not await sessions.register(second), "another session would have the records of this one"
    await sessions.delete(first)
    assert not await sessions.store.list("sessions/s")
    assert await sessions.register(second)


async def test_late_deletion_does_not_affect_the_next_session_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = SessionStore(Store.open(str(tmp_path), {}))
    first, second = (SessionSettings(id="s", key_digest=digit * 64, created=0.0) for digit in "12")
    record = sessions.folder(second).segment_key(1, 0)

    async def deleted_and_registered_anew() -> None:
        monkeypatch.undo()
        await sessions.delete(first)
        assert await sessions.register(second)
        assert await sessions.store.create(record, b"a record")

    for method in ("list", "delete"):
        assert await sessions.register(first)
        await sessions.store.create(sessions.folder(first).segment_key(1, 0), b"a record")
        await sessions.complete(first)
        late = getattr(Store, method)

        async def hangs(store: Store, argument: Any, late: Any = late) -> Any:
            await deleted_and_registered_anew()
            return await late(store, argument)

        monkeypatch.setattr(Store, method, hangs)
        await sessions.delete(first)
        await sessions.complete(first)
        assert await sessions.settings("s") == second
        assert await sessions.store.get(record) == b"a record"
        assert not await sessions.is_completed(second)
        await sessions.delete(second)
        assert not await sessions.store.list("sessions/s")
