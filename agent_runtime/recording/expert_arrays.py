"""The routed experts of a token sequence as one array, joined from those of its turns."""

from dataclasses import dataclass
from typing import Any

from agent_runtime.recording.attempt_folder import checked_object
from agent_runtime.recording.branches import Branch, ExpertPart
from agent_runtime.recording.segments import RecordCorrupt, decompress
from agent_runtime.recording.store import Store


@dataclass(frozen=True)
class ExpertArray:
    """Experts of each token and layer. Unreported tokens have zeros, which are not experts: see `reported`."""

    data: bytes
    """Unsigned integers of type `dtype`, little-endian, in C order."""
    dtype: str
    """uint8 or uint16."""
    shape: tuple[int, int, int]
    """Tokens, layers, experts of a token in each layer."""
    reported: list[tuple[int, int]]
    """Ranges of tokens whose experts were reported: first, and after the last."""

    def to_numpy(self) -> Any:
        """Return a numpy array. Raises ImportError without numpy, which agent-rollouts itself does not install."""
        import numpy

        return numpy.frombuffer(self.data, numpy.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


async def read_experts(store: Store, branch: Branch) -> ExpertArray | None:
    """Return the experts of a sequence below a run's folder; None if they were not recorded. Raises RecordCorrupt."""
    experts = branch.routed_experts
    if experts is None:
        return None
    item_bytes = max((part.item_bytes for part in experts.parts), default=1)
    row_bytes = item_bytes * experts.layers * experts.top_k
    data = bytearray(row_bytes * len(branch.token_ids))
    key, content = "", b""
    for part in experts.parts:
        if part.object.key != key:
            key = part.object.key
            content = decompress(key, await checked_object(store, part.object))
        rows = _rows(part, content, item_bytes, experts.layers * experts.top_k)
        begin = part.position * row_bytes
        data[begin : begin + len(rows)] = rows
    shape = len(branch.token_ids), experts.layers, experts.top_k
    return ExpertArray(bytes(data), f"uint{8 * item_bytes}", shape, experts.reported)


def _rows(part: ExpertPart, content: bytes, item_bytes: int, numbers: int) -> bytes:
    """Return the rows of a part with `numbers` numbers each, in `item_bytes` bytes."""
    row_bytes = part.item_bytes * numbers
    rows = content[part.first_row * row_bytes : (part.first_row + part.rows) * row_bytes]
    if len(rows) != part.rows * row_bytes:
        raise RecordCorrupt(part.object.key, f"it has less than {part.first_row + part.rows} rows of {row_bytes} bytes")
    if part.item_bytes == item_bytes:
        return rows
    wide = bytearray(2 * len(rows))
    wide[::2] = rows
    return bytes(wide)
