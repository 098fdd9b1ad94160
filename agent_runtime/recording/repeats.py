"""A journal has each message once, although a program may send its whole history in each call.

In place of a message or tool definition that an earlier record of the folder has, a segment names the turn and position
where it stands. Readers put it back, as the same object.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.recording import segments
from rollout_api.records import IntentRecord, Record

Place = tuple[int, int]
"""Turn, and position among the messages and then the tools of its intent."""


def digest_of_message(message: Mapping[str, Any]) -> bytes:
    """Equal only for messages that are written alike, fields in the same order."""
    # An agent's message may hold what JSON does not.
    return hashlib.sha256(repr(message).encode(errors="backslashreplace")).digest()


class Repeats:
    """Where the messages of a folder stand. `records` are those that it has already, restored."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self._places: dict[bytes, Place] = {}
        self._turns: set[int] = set()
        self._shorten(records)

    def encode(self, records: Sequence[Record]) -> bytes:
        """The segment with these records, which follow the earlier ones. Call it once for each."""
        return segments.encode(self._shorten(records))

    def _shorten(self, records: Sequence[Record]) -> list[Record]:
        return [self._shortened(record) if isinstance(record, IntentRecord) else record for record in records]

    def _shortened(self, intent: IntentRecord) -> IntentRecord:
        contents = _contents(intent)
        digests = list(map(digest_of_message, contents))
        repeated = {position: self._places[key] for position, key in enumerate(digests) if key in self._places}
        if intent.turn not in self._turns:
            self._turns.add(intent.turn)
            for position, key in enumerate(digests):
                self._places.setdefault(key, (intent.turn, position))
        if not repeated:
            return intent
        return _with_contents(
            intent, [{} if position in repeated else message for position, message in enumerate(contents)], repeated
        )


def restored(key: str, records: Sequence[Record]) -> list[Record]:
    """The records of a folder from its first one on, with what they repeat. Raises RecordCorrupt."""
    found: dict[int, list[dict[str, Any]]] = {}
    whole: list[Record] = []
    for record in records:
        if isinstance(record, IntentRecord):
            contents = _contents(record)
            try:
                for position, (turn, place) in record.repeated.items():
                    contents[position] = found[turn][place]
            except LookupError:
                raise segments.RecordCorrupt(
                    key, f"turn {record.turn} repeats message {place} of turn {turn}, which is not there"
                ) from None
            found.setdefault(record.turn, contents)
            record = _with_contents(record, contents, {}) if record.repeated else record
        whole.append(record)
    return whole


def _contents(intent: IntentRecord) -> list[dict[str, Any]]:
    return [*intent.messages, *(intent.tools or [])]


def _with_contents(intent: IntentRecord, contents: list[dict[str, Any]], repeated: dict[int, Place]) -> IntentRecord:
    end = len(intent.messages)
    tools = None if intent.tools is None else contents[end:]
    return intent.model_copy(update={"messages": contents[:end], "tools": tools, "repeated": repeated})
