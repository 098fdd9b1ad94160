"""`rolloutctl serve`: an HTTP server with the Harbor server's API that runs each trial as a job on this machine."""

import os
from pathlib import Path
from typing import Annotated

import typer

from agent_runtime.proxy.serve import admin_key
from rolloutctl.errors import CommandError, listening
from rolloutctl.integrations import HARBOR_SERVER, integrations
from rolloutctl.manifest import read_manifest

KEY_VARIABLE = "HARBOR_SERVER_KEY"


async def serve(
    manifests: Annotated[
        list[Path],
        typer.Argument(
            help="Jobs with tasks: {stream: {}}. A run selects one by agent.name; the first is the default."
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--folder", help="Folder for the runs, which also keeps them after clients fetched them.")
    ] = Path("runs"),
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8080,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Most concurrent runs.")] = 16,
    image_template: Annotated[
        str | None,
        typer.Option("--image-template", help="Images of tasks with a Dockerfile, like tasks.imageTemplate."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help=f"File with the clients' key; by default ${KEY_VARIABLE}.")
    ] = None,
) -> None:
    """Run Harbor tasks that clients upload (POST /api/v1/runs), each as a job on this machine."""
    serve_jobs = integrations.find(HARBOR_SERVER)
    jobs = {}
    for path in manifests:
        job = read_manifest(path)
        if job.spec.tasks.stream is None:
            raise CommandError(f"{path}: spec.tasks: clients send the tasks, so write tasks: {{stream: {{}}}}")
        if job.metadata.name in jobs:
            raise CommandError(f"{path}: metadata.name: {job.metadata.name!r} is served already; rename one of them")
        jobs[job.metadata.name] = (job, path.resolve().parent)
    key = admin_key(key_file, os.environ, KEY_VARIABLE)
    os.environ.pop(KEY_VARIABLE, None)  # the jobs must not see it
    with listening(host, port):
        await serve_jobs(
            jobs, key, folder=folder, host=host, port=port, concurrency=concurrency, image_template=image_template
        )
