"""Routed experts of the stand-in's model: a function of the weights' version and of all ids up to a token, so that they can
be computed.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from tests.support.vllm_server import model

LAYERS, TOP_K, EXPERTS = 2, 2, 8
ROW_BYTES = LAYERS * TOP_K


def experts_by(version: int, ids: Sequence[int]) -> bytes:
    """Return the experts of each of these tokens, layer by layer, one byte each. The experts of a layer differ."""
    found, state = bytearray(), model.state_of(())
    for token in ids:
        state = model.state_after(state, token)
        for layer in range(LAYERS):
            mixed = model.mix(state, version * LAYERS + layer)
            first = mixed % EXPERTS
            found += bytes((first, (first + 1 + (mixed >> 8) % (EXPERTS - 1)) % EXPERTS))
    return bytes(found)


def npy(rows: bytes) -> str:
    """vLLM 0.32, vllm/entrypoints/scale_out/token_in_token_out/serving.py: numpy2base64. A `.npy` file of uint8."""
    shape = (len(rows) // (LAYERS * TOP_K), LAYERS, TOP_K)
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return base64.b64encode(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + rows).decode()


def int32(rows: bytes) -> str:
    """SGLang 0.5.23, srt/managers/detokenizer_manager.py: _b64_encode_per_request. Numbers without a shape."""
    return base64.b64encode(b"".join(number.to_bytes(4, "little") for number in rows)).decode()
