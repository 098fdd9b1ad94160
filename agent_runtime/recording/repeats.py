"""Deduplication of messages: a journal has each message once, although a program may send its whole history in each
call.

If an earlier record of the folder has the same message or tool definition, a segment only names its turn and position.
Readers restore it as the same object.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.recording import segments
from rollout_api.records import IntentRecord, Record

Place = tuple[int, int]
"""Turn, and position among the messages and then the tools of its intent."""


def digest_of_message(message: Mapping[str, Any]) -> bytes:
    """Return a digest that is equal only for messages with the same text and field order."""
    # An agent's message may contain values that JSON cannot represent.
    return hashlib.sha256(repr(message).encode(errors="backslashreplace")).digest()


class Repeats:
    """Locations of the messages of a folder. `records` are its existing ones, restored."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self._places: dict[bytes, Place] = {}
        self._turns: set[int] = set()
        self._shorten(records)

    def encode(self, records: Sequence[Record]) -> bytes:
        """Return the segment with these records, which follow the earlier ones. Call it once for each segment."""
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
    """Yield the records of a folder from its first one on, with repeated messages restored. Raises RecordCorrupt."""
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
                    key, f"turn {record.turn} repeats message {place} of turn {turn}, which does not exist"
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
