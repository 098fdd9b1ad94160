"""Whether files in safetensors' format are complete, by their headers alone.

Format (huggingface/safetensors, README): 8 bytes with the header's length, little-endian; the header, a JSON object of
tensors with `data_offsets`; the data, without gaps.
"""

import json
from pathlib import Path
from typing import Final

LENGTH_BYTES: Final = 8
MOST_HEADER: Final = 100_000_000
"""Most bytes of a header, as in safetensors itself."""


class BadWeights(Exception):
    """A file of weights is incomplete or malformed."""


def check_folder(folder: Path) -> None:
    """Check all files `*.safetensors` of a folder. Raises BadWeights, which names the first bad one."""
    for file in sorted(folder.glob("*.safetensors")):
        if problem := _problem(file):
            raise BadWeights(f"{file.name} {problem}; write the file again, and give the policy a higher version")


def _problem(file: Path) -> str | None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(MOST_HEADER, size - LENGTH_BYTES):
            return f"has {size} bytes, and is no safetensors file: its header is longer than that"
        try:
            header = json.loads(opened.read(length))
            tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
            end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
            return f"has a malformed header ({type(error).__name__}: {error})"
    expected = LENGTH_BYTES + length + end
    return None if size == expected else f"has {size} bytes, expected {expected} by its header"
