"""The format of a journal's segments: records as JSON lines in one zstd frame with a checksum.

A journal has each message once, although a program may send its whole history in each call: if an earlier record of
the folder has the same message or tool definition, a segment only names its turn and position. Readers restore it as
the same object.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import zstandard
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from rollout_api.base import ApiModel
from rollout_api.records import IntentRecord, Record

# RFC 8878, 3.1.1.2: a block takes at least 3 bytes of header and one of content, and gives at most 128 KiB.
_MOST_FROM_A_BYTE: Final = 128 * 1024 // 4
# Level 1 takes 1.5 µs for segments of a few KB; higher levels save under 5 %.
_LEVEL: Final = 1
_contexts = threading.local()  # zstd contexts must not be shared by threads, and take 10 µs to create
_RECORD: Final[TypeAdapter[Record]] = TypeAdapter(Record)
T = TypeVar("T")


class RecordCorrupt(Exception):
    """A recorded object is damaged. The message names the key and the problem."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}; the object was changed or damaged after it was written")
        self.key, self.problem = key, problem


class Closing(ApiModel):
    """Written by the next holder as an epoch's next segment, so that the earlier holder cannot write further segments."""

    closed_by: int
    """Epoch that closed this one."""
    holder: str


def compress(data: bytes) -> bytes:
    """Return one zstd frame with content size and checksum."""
    if not hasattr(_contexts, "compressor"):
        _contexts.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    frame: bytes = _contexts.compressor.compress(data)
    return frame


def decompress(key: str, data: bytes) -> bytes:
    """Return the content of such a frame. Raises RecordCorrupt if it was truncated, changed or extended."""
    try:
        # zstandard allocates the size in the header, so a damaged header must be refused.
        if (claimed := zstandard.frame_content_size(data)) > len(data) * _MOST_FROM_A_BYTE:
            raise RecordCorrupt(key, f"an incomplete or damaged zstd frame (claims {claimed} bytes in {len(data)})")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RecordCorrupt(key, f"an incomplete or damaged zstd frame ({error})") from error


def compact_json(value: object) -> bytes:
    """Return a value as JSON on one line. Unpaired surrogates become `?`, as in `json_bytes`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def json_bytes(value: ApiModel) -> bytes:
    """Return a model as JSON. Unpaired surrogates, which a tool's or a server's text may contain but UTF-8 cannot,
    become `?`.
    """
    try:
        return value.model_dump_json().encode()
    except PydanticSerializationError:
        return json.dumps(value.model_dump(), ensure_ascii=False).encode(errors="replace")


def encode(records: Sequence[Record]) -> bytes:
    """Return a segment with these records."""
    return compress(b"".join(json_bytes(record) + b"\n" for record in records))


def encode_closing(closing: Closing) -> bytes:
    """Return the segment that closes an epoch."""
    return compress(json_bytes(closing) + b"\n")


def decode(key: str, data: bytes) -> list[Record] | Closing:
    """Return the records of a segment. Raises RecordCorrupt."""
    lines = decompress(key, data).split(b"\n")
    if lines.pop() != b"" or not lines:
        raise RecordCorrupt(key, "it does not end with a whole line")
    if lines[0].startswith(b'{"closedBy"'):
        return validated(key, Closing.model_validate_json, lines[0], "line 1, ")
    return [
        validated(key, _RECORD.validate_json, line, f"line {number}, ") for number, line in enumerate(lines, start=1)
    ]


def validated(key: str, parse: Callable[[bytes], T], data: bytes, where: str = "") -> T:
    """Validate an object, or the part that `where` names, as a model. Raises RecordCorrupt."""
    try:
        return parse(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        at = f"{where}{field}"
        raise RecordCorrupt(key, f"{at}: {problem['msg']}" if at else problem["msg"]) from error


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
        return encode(self._shorten(records))

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
                raise RecordCorrupt(
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
