"""`rolloutctl images`: builds the images that a job's task folders bring Dockerfiles for."""

import os
from typing import Annotated

import typer

from agent_runtime.tasks.source import needed_images
from rolloutctl.commands.check import ManifestArgument
from rolloutctl.errors import CommandError, Exit
from rolloutctl.image_builder import Target, build, find_tool, is_there
from rolloutctl.manifest import read_manifest
from rolloutctl.ui.console import Form, FormOption, answer_json, err, out, say


def images(
    manifest: ManifestArgument,
    base: Annotated[
        list[str] | None,
        typer.Option(
            "--base", help="OLD=NEW: take this base image, or all that begin with OLD ending in / or :, from NEW."
        ),
    ] = None,
    tool: Annotated[
        str | None, typer.Option("--tool", help="buildah, podman or docker; else the first that works.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which images are needed, and build none.")] = False,
    form: FormOption = Form.TEXT,
) -> None:
    """Build the images of task folders that have a Dockerfile, those that are missing, as tasks.imageTemplate names them.

    A template that is a path, such as ./images/{name}-{digest}, keeps them on this machine; any other is pushed.
    """
    job = read_manifest(manifest)
    base_dir = manifest.resolve().parent
    bases = _bases(base or [])
    if job.spec.tasks.image_template is None:
        raise CommandError(f"{manifest}: spec.tasks.imageTemplate is missing; it says how the images are called")
    needed = needed_images(job.spec.tasks, base_dir, os.environ)
    builder = "" if dry_run else find_tool(tool)
    answers: list[dict[str, object]] = []
    failed = False
    for wanted in needed:
        target = Target.of(wanted.image, base_dir)
        state = "needed"
        if not dry_run and is_there(builder, target):
            state = "there"
        elif not dry_run:
            try:
                with err.status(f"Building {wanted.image}…"):
                    build(builder, wanted, target, bases)
                state = "built"
            except CommandError as error:
                say(str(error), "red")
                state, failed = "failed", True
        answers.append(
            {"image": wanted.image, "from": f"{wanted.folder.where}/{wanted.context}".rstrip("/"), "state": state}
        )
        if form is Form.TEXT:
            out.print(f"{state:7} {wanted.image}", soft_wrap=True)
    if form is Form.JSON:
        answer_json(answers)
    elif not needed:
        say("No task needs an image to be built: each names one, or has no Dockerfile.")
    raise typer.Exit(Exit.FAILED if failed else Exit.OK)


def _bases(options: list[str]) -> dict[str, str]:
    pairs = [option.partition("=") for option in options]
    if wrong := [old for old, equals, new in pairs if not (old and equals and new)]:
        raise CommandError(f"--base {wrong[0]}: expected OLD=NEW, such as ubuntu:24.04=registry.example/ubuntu:24.04")
    return {old: new for old, _, new in pairs}
