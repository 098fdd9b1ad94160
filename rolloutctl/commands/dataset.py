"""`rolloutctl dataset`: write Harbor task folders as a Parquet file for verl."""

from pathlib import Path
from typing import Annotated

import typer

from rolloutctl.integrations import HARBOR_DATASET, integrations
from rolloutctl.ui.console import out

CACHE = Path("~/.cache/verl/agentic/harbor")
"""Default of `data.harbor_cache_dir` in verl-recipe PR #83."""


def dataset(
    tasks: Annotated[Path, typer.Argument(help="Folder with Harbor tasks, at any depth.")],
    split: Annotated[str, typer.Option("--split", help="train or val; the file's name begins with it.")] = "train",
    cache_dir: Annotated[Path, typer.Option("--cache-dir", help="Folder for the file.")] = CACHE,
    data_source: Annotated[str, typer.Option("--data-source", help="Value of the column data_source.")] = "harbor",
    ability: Annotated[str, typer.Option("--ability", help="Value of the column ability.")] = "agent",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Write only the first N tasks.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write Harbor tasks as a data file for verl, with the columns of verl-recipe PR #83. Prints the file's path."""
    file: Path = integrations.find(HARBOR_DATASET)(
        tasks,
        split=split,
        cache_dir=cache_dir,
        data_source=data_source,
        ability=ability,
        limit=limit,
        overwrite=overwrite,
    )
    out.file.write(f"{file.absolute()}\n")
