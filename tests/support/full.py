"""How much is tested: `make test-full` sets ROLLOUT_FULL, which only this module reads."""

import os
import time

import pytest

FULL = bool(os.environ.get("ROLLOUT_FULL"))
"""Whether tests marked `full` run too, with the large counts."""


def examples(full: int) -> int:
    """Return the number of examples of a property test: `full` in `make test-full`, else a quarter of it, at least 3."""
    return full if FULL else max(3, full // 4)


def first_seed(checked: int = 1) -> int:
    """Return the seed of a random test: ROLLOUT_SEED, a new one in `make test-full`, else `checked`. Print it."""
    seed = int(os.environ.get("ROLLOUT_SEED", time.time() if FULL else checked))
    print(f"ROLLOUT_SEED={seed}")
    return seed


MODES_ONCE = ["Overlay", pytest.param("Plain", marks=pytest.mark.full)]
"""Modes of workspaces for tests that do not depend on the mode: `make test` uses Overlay only."""
