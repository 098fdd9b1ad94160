"""The prefix cache: blocks of 16 tokens, found by all tokens before them and by the request's salt.

vLLM 0.26, vllm/v1/core/kv_cache_utils.py: hash_block_tokens, generate_block_hash_extra_keys. As there, loading weights
does not empty it: blocks of older weights are found under newer ones, and the request's record counts them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

BLOCK = 16


class PrefixCache:
    """Keeps a limited number of blocks, and drops the least recently used ones."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.queries = 0
        self.hits = 0
        self._versions: dict[int, int] = {}

    def look_up(self, ids: Sequence[int], salt: str, version: int) -> tuple[int, int]:
        """Return how many tokens were found, and how many of them other weights computed."""
        found = stale = 0
        # The last token is always computed: its logits are what is sampled from.
        for key in _keys(ids[: len(ids) - 1], salt):
            made_by = self._versions.pop(key, None)
            if made_by is None:
                break
            self._versions[key] = made_by
            found += BLOCK
            stale += BLOCK * (made_by != version)
        self.queries += len(ids)
        self.hits += found
        return found, stale

    def add(self, ids: Sequence[int], salt: str, version: int) -> None:
        """Add all full blocks of these ids."""
        for key in _keys(ids, salt):
            self._versions[key] = self._versions.pop(key, version)
        while len(self._versions) > self.blocks:
            del self._versions[next(iter(self._versions))]

    def clear(self) -> None:
        """Forget all blocks."""
        self._versions.clear()


def _keys(ids: Sequence[int], salt: str) -> list[int]:
    packed = array("I", ids).tobytes()
    size = BLOCK * array("I").itemsize
    keys: list[int] = []
    key = hash(salt)
    for start, end in pairwise(range(0, len(packed) + 1, size)):
        key = hash((key, packed[start:end]))
        keys.append(key)
    return keys
