"""Results of the benchmarks: one row for each figure, with its target."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from benchmarks.measuring import quantile


@dataclass(frozen=True)
class Target:
    """The target of a row; it applies to the ratio if the row has one, else to the figure."""

    bound: Literal["at most", "at least"]
    number: float

    def met(self, value: float) -> bool:
        return value <= self.number if self.bound == "at most" else value >= self.number


@dataclass(frozen=True)
class Row:
    """One figure. `against` is the text of the figure that it is compared with, and `ratio` the comparison's result."""

    what: str
    figure: float
    unit: str
    against: str = ""
    ratio: float | None = None
    target: Target | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.target.met(self.figure if self.ratio is None else self.ratio)


def comparison(
    what: str, figure: float, unit: str, who: str, theirs: float, target: Target | None = None, *, inverse: bool = False
) -> Row:
    """Return a row that compares our figure with another one in the same unit. The ratio is ours to theirs, or with
    `inverse` theirs to ours.
    """
    ratio = theirs / figure if inverse else figure / theirs
    return Row(what, figure, unit, f"{who} {theirs:.3g} {unit}", ratio, target)


def percentile_rows(what: str, seconds: Sequence[float], percents: Sequence[int] = (50, 99)) -> list[Row]:
    """Return a row in milliseconds for each of these percentiles. Raises ValueError without values."""
    return [Row(f"{what}, p{percent}", quantile(seconds, percent / 100) * 1e3, "ms") for percent in percents]


def print_table(found: Mapping[str, Sequence[Row]], console: Console) -> None:
    """Print one table with all rows, and the machine's load."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    table = Table(title=f"{cores} cores, load {load:.1f} at the end", title_justify="left")
    for column in ("benchmark", "what", "figure", "against", "ratio", "target", "met"):
        table.add_column(column, justify="right" if column in ("figure", "ratio") else "left", overflow="fold")
    for benchmark, rows in found.items():
        for row in rows:
            table.add_row(benchmark, *_cells(row))
        table.add_section()
    console.print(table)


def _cells(row: Row) -> tuple[str, ...]:
    multiple = "×" if row.ratio is not None else f" {row.unit}"
    target = "" if row.target is None else f"{row.target.bound} {row.target.number:g}{multiple}"
    met = {None: "", True: "yes", False: "NO"}[row.met]
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}×"
    return row.what, f"{row.figure:.4g} {row.unit}", row.against, ratio, target, met


def write_json(found: Mapping[str, Sequence[Row]], path: Path) -> None:
    rows = {
        benchmark: [
            {
                **vars(row),
                "target": None if row.target is None else [row.target.bound, row.target.number],
                "met": row.met,
            }
            for row in rows
        ]
        for benchmark, rows in found.items()
    }
    path.write_text(json.dumps(rows, indent=1) + "\n")
