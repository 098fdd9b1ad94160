"""Which rows of a table a job works on, and in what order: `filter`, then `shuffleSeed`, then `limit`."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from typing import Any

from rollout_api.tasks import TaskSource


def row_filter(wanted: Mapping[str, Sequence[str]]) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a row has, in every column that is named, one of its values; a list has a value when an entry has."""
    patterns = {column: re.compile("|".join(translate(value) for value in values)) for column, values in wanted.items()}

    def passes(row: Mapping[str, Any]) -> bool:
        return all(any(pattern.match(text) for text in _texts(row.get(column))) for column, pattern in patterns.items())

    return passes


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [text for entry in value for text in _texts(entry)]
    return [value if isinstance(value, str) else json.dumps(value, default=str)]


def ordered(positions: Sequence[int], source: TaskSource) -> list[int]:
    """The rows in the order of the job, at most `limit`.

    By a hash of seed and position, so that every version of Python, on a laptop and in a cluster, gives the same order.
    """
    if source.shuffle_seed is not None:
        seed = source.shuffle_seed
        positions = sorted(positions, key=lambda position: hashlib.sha256(f"{seed}:{position}".encode()).digest())
    return list(positions[: source.limit])
