"""Sessions in storage: what is left of one must never become part of another."""

from collections.abc import Sequence
from pathlib import Path

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
    await sessions.complete("s")
    delete = Store.delete

    async def dies(store: Store, keys: Sequence[str]) -> None:
        await delete(store, keys[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "delete", dies)
    with pytest.raises(KeyboardInterrupt):
        await sessions.delete("s")
    monkeypatch.undo()
    assert not await sessions.register(second), "another session would have the records of this one"
    await sessions.delete("s")
    assert not await sessions.store.list("sessions/s")
    assert await sessions.register(second)
