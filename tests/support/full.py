"""How much is tested: `make test-full` sets ROLLOUT_FULL, and only this module reads it."""

import os

import pytest

FULL = bool(os.environ.get("ROLLOUT_FULL"))
"""Whether tests marked `full` run too, and counts are the large ones."""


def examples(full: int) -> int:
    """Return how many examples of a property are tried: `full` of them in `make test-full`, else a quarter, at least 3."""
    return full if FULL else max(3, full // 4)


MODES_ONCE = ["Overlay", pytest.param("Plain", marks=pytest.mark.full)]
"""Modes of workspaces, for tests of what does not depend on the mode: `make test` tries them in Overlay."""
