"""Sessions in object storage: a folder each, in which everything is written once and never changed.

sessions/<id>/
  session.json                what fixes the session, with the digest of its key
  epoch-<e>.json …            its records, as recording/epoch_log.py has them; a claim says where its holder is reached
  completed.json              its end
"""

import json
import time
from dataclasses import dataclass

from pydantic import ValidationError

from agent_runtime.proxy.session import SessionSettings
from agent_runtime.recording.attempt_folder import AttemptFolder
from agent_runtime.recording.segments import RecordCorrupt, json_bytes
from agent_runtime.recording.store import Store
from rollout_api.records import Record


@dataclass(frozen=True)
class SessionStore:
    """The sessions below a URI."""

    store: Store

    def folder(self, session: str) -> AttemptFolder:
        return AttemptFolder(self.store, f"sessions/{session}")

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

    async def records(self, session: str) -> list[Record]:
        """What is durable of it at this moment. Raises RecordCorrupt."""
        return await self.folder(session).records()

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
