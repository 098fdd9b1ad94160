"""`rolloutctl init`: write an example manifest."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from rolloutctl.errors import CommandError
from rolloutctl.ui.console import Form, FormOption, answer_json, program, say


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    form: FormOption = Form.TEXT,
) -> None:
    """Write a manifest with comments that can be run unchanged."""
    if path.exists() and not force:
        raise CommandError(f"{path} exists already", hint="Name another file, or replace it with --force.")
    if not path.parent.is_dir():
        raise CommandError(f"the folder {path.parent} does not exist", hint="Create it first.")
    path.write_text((resources.files("rolloutctl") / "starter.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    if form is Form.JSON:
        answer_json({"path": str(path)})
    else:
        say(f"Wrote {path}. Run it with: {program()} run {path}")
