"""Which rows of a batch are the members of one group, and what lost members stand for. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Group:
    """Rows that are rollouts of one prompt."""

    rows: tuple[int, ...]
    greedy: bool


def groups_of(rows: Sequence[Mapping[str, Any]]) -> list[Group]:
    """The groups of a batch, by their first rows. REMAX's greedy baselines are groups of their own."""
    found: dict[tuple[str, bool], list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault((str(row["uid"]), not bool(row.get("__do_sample__", True))), []).append(number)
    return [Group(tuple(numbers), greedy) for (_, greedy), numbers in found.items()]


def shares_of(groups: Sequence[Group], workers: int) -> list[list[int]]:
    """The rows of each worker, whole groups dealt out in turn; workers without any are left out."""
    shares = [[row for group in groups[worker::workers] for row in group.rows] for worker in range(workers)]
    return [share for share in shares if share]


def mean_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a reward function said of each, as a mean; the first one's word where it is no number."""
    return {
        key: fmean(float(info[key]) for info in infos) if isinstance(value, int | float) else value
        for key, value in (infos[0] if infos else {}).items()
    }


def same_keys(infos: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each with the keys of all in the same order, as verl's batches need it; NaN where a reward function said nothing."""
    keys = sorted({key for info in infos for key in info})
    return [{key: info.get(key, math.nan) for key in keys} for info in infos]
