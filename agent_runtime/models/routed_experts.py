"""The experts that processed the tokens of an answer in a mixture-of-experts model, as inference servers report them. Pure.

Rows are in the order of the tokens; each has `layers` × `top_k` expert numbers. They are kept as bytes: a core without
numpy only has to cut and join rows.

- vLLM 0.32, vllm/entrypoints/scale_out/token_in_token_out/protocol.py: `choices[].routed_experts`, a `.npy` file in
  base64, of type uint8 or uint16.
- SGLang 0.5.23, srt/managers/detokenizer_manager.py: `meta_info.routed_experts`, int32 numbers in base64 without a shape.

Both report all tokens that the model has processed from a requested position on: all except the last sampled one.
"""

import ast
import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

Span = tuple[int, int]
"""First position, and the position after the last."""

_NPY: Final = b"\x93NUMPY"
_TYPES: Final = {"|u1": 1, "<u2": 2, "<i4": 4}


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows of consecutive tokens."""

    data: bytes
    item_bytes: Literal[1, 2]
    """Bytes of each number, little-endian."""
    layers: int
    top_k: int

    @property
    def row_bytes(self) -> int:
        return self.item_bytes * self.layers * self.top_k

    def __len__(self) -> int:
        return len(self.data) // self.row_bytes

    def in_two_bytes(self) -> "ExpertRows":
        """Return the same numbers in two bytes each."""
        if self.item_bytes == 2:
            return self
        wide = bytearray(2 * len(self.data))
        wide[::2] = self.data
        return replace(self, data=bytes(wide), item_bytes=2)

    def rows(self, first: int, end: int) -> bytes:
        return self.data[first * self.row_bytes : end * self.row_bytes]


@dataclass(frozen=True, slots=True)
class AnswerExperts:
    """Rows of an answer, prompt and completion together."""

    rows: ExpertRows
    spans: list[Span]
    """Positions of the rows, in order."""


def rows_of(data: bytes, item_bytes: int, shape: Sequence[int]) -> ExpertRows:
    """Return the rows of an array with integers of 1, 2 or 4 bytes. Raises ValueError if the array is not one of rows."""
    if len(shape) != 3 or 0 in shape[1:] or len(data) != item_bytes * shape[0] * shape[1] * shape[2]:
        raise ValueError(f"expected an array [tokens, layers, top_k], got {len(data)} bytes of shape {list(shape)}")
    _, layers, top_k = shape
    match item_bytes:
        case 1 | 2:
            return ExpertRows(data, item_bytes, layers, top_k)
        case 4:
            return _narrowed(data, layers, top_k)
    raise ValueError(f"expected numbers of 1, 2 or 4 bytes, got {item_bytes}")


def parse_npy(text: str) -> ExpertRows:
    """Read a `.npy` file in base64. Raises ValueError."""
    data = base64.b64decode(text, validate=True)
    if data[:6] != _NPY or len(data) < 12:
        raise ValueError("expected a .npy file in base64")
    # numpy/lib/format.py: version 1 has a header length of two bytes, later ones of four.
    begin = 10 if data[6] == 1 else 12
    end = begin + int.from_bytes(data[8:begin], "little")
    try:
        header = ast.literal_eval(data[begin:end].decode())
        kind, shape, is_fortran = header["descr"], header["shape"], header["fortran_order"]
    except (SyntaxError, KeyError, TypeError) as error:
        raise ValueError(f"expected the header of a .npy file, got {data[begin:end]!r:.100}") from error
    if is_fortran or kind not in _TYPES:
        raise ValueError(f"expected an array of type {', '.join(_TYPES)} in C order, got {header}")
    return rows_of(data[end:], _TYPES[kind], shape)


def parse_flat(text: str, top_k: int, tokens: int) -> ExpertRows:
    """Read int32 numbers in base64: those of so many tokens, without a shape. Raises ValueError."""
    data = base64.b64decode(text, validate=True)
    size = 4 * top_k * tokens
    if not size or len(data) % size:
        raise ValueError(
            f"{len(data)} bytes are not int32 numbers of {tokens} tokens with {top_k} experts in each layer; check "
            "model.routedExperts.topK"
        )
    return rows_of(data, 4, (tokens, len(data) // size, top_k))


def _narrowed(data: bytes, layers: int, top_k: int) -> ExpertRows:
    """Return int32 numbers in one byte each, or in two if some are larger. Raises ValueError for others."""
    halves = memoryview(data).cast("H")
    if halves[1::2].tobytes().strip(b"\0"):
        raise ValueError("expected expert numbers from 0 to 65535")
    if data[1::4].strip(b"\0"):
        return ExpertRows(halves[::2].tobytes(), 2, layers, top_k)
    return ExpertRows(data[::4], 1, layers, top_k)


def located(rows: ExpertRows, *, asked_from: int, prompt: int, earlier: int, tokens: int) -> AnswerExperts | None:
    """Return the rows that a server reported at the end of an answer, at their positions; None if there are none.

    `prompt` and `tokens` count the tokens of the prompt and of the whole answer with it, `earlier` those sampled in other
    passes: by requests whose stream broke, or before an update. Those were chosen with other rows, which are lost.
    Raises ValueError for another number of rows than that of the tokens from `asked_from`, or of all tokens.
    """
    count, last = len(rows), tokens - 1
    if count not in (last - asked_from, last):
        raise ValueError(f"expected the experts of {last - asked_from} tokens, got those of {count}")
    first = last - count
    spans = [(asked_from, prompt - 1), (prompt + earlier - 1, last)] if earlier else [(asked_from, last)]
    kept = [(begin, end) for begin, end in spans if begin < end]
    data = b"".join(rows.rows(begin - first, end - first) for begin, end in kept)
    return AnswerExperts(ExpertRows(data, rows.item_bytes, rows.layers, rows.top_k), kept) if kept else None


def joined(parts: Sequence[AnswerExperts]) -> AnswerExperts | None:
    """Return the rows of several parts of an answer, in order; None without parts. Raises ValueError if they have other
    shapes.
    """
    if not parts:
        return None
    found = [part.rows for part in parts]
    if len({(rows.layers, rows.top_k) for rows in found}) > 1:
        raise ValueError("the parts of an answer have routed experts of different shapes")
    if len({rows.item_bytes for rows in found}) > 1:  # one part may have larger numbers than another
        found = [rows.in_two_bytes() for rows in found]
    whole = replace(found[0], data=b"".join(rows.data for rows in found))
    return AnswerExperts(whole, [span for part in parts for span in part.spans])
