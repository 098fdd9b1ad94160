"""`rolloutctl dataset`: Harbor task folders as a Parquet file for verl."""

from pathlib import Path
from typing import Annotated

import typer

from rolloutctl.integrations import HARBOR_DATASET, integrations
from rolloutctl.ui.console import out

CACHE = Path("~/.cache/verl/agentic/harbor")
"""PR #83's default of `data.harbor_cache_dir`."""


def dataset(
    tasks: Annotated[Path, typer.Argument(help="A folder of Harbor tasks; folders between are passed through.")],
    split: Annotated[str, typer.Option("--split", help="train or val; the beginning of the file's name.")] = "train",
    cache_dir: Annotated[Path, typer.Option("--cache-dir", help="Where the file goes.")] = CACHE,
    data_source: Annotated[str, typer.Option("--data-source", help="Column data_source.")] = "harbor",
    ability: Annotated[str, typer.Option("--ability", help="Column ability.")] = "agent",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The first so many tasks alone.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write the file anew.")] = False,
) -> None:
    """Write Harbor tasks as rows of verl's data, with the columns of verl-recipe PR #83; prints the file's path."""
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
