"""Incomplete files of weights are found by their headers."""

import json
from pathlib import Path

import pytest

from agent_runtime.serving.safetensors import BadWeights, check_folder


def content(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
WHOLE = content({"__metadata__": {"format": "pt"}, "a": TENSOR}, bytes(8))


def test_whole_file_is_accepted_and_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    (tmp_path / "config.json").write_bytes(b"not JSON")
    check_folder(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes, and is no safetensors file"),
        (b"no weights", "has 10 bytes, and is no safetensors file"),
        (WHOLE[:-1], f"has {len(WHOLE) - 1} bytes, expected {len(WHOLE)} by its header"),
        (WHOLE + b"x", f"has {len(WHOLE) + 1} bytes, expected {len(WHOLE)} by its header"),
        (content([1], b""), "has a malformed header"),
        (content({"a": {}}, b""), "has a malformed header"),
        ((5).to_bytes(8, "little") + b"{[}]!", "has a malformed header"),
    ],
)
def test_incomplete_file_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(WHOLE)
    (tmp_path / "b.safetensors").write_bytes(data)
    with pytest.raises(BadWeights, match=f"b.safetensors {message}"):
        check_folder(tmp_path)
