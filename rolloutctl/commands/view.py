"""`rolloutctl view`: show recorded runs in a browser."""

import asyncio
import os
import secrets
import webbrowser
from typing import Annotated
from urllib.parse import quote

import typer

from agent_runtime.recording.store import Store, local_folder
from rolloutctl.errors import CommandError
from rolloutctl.runs import open_place
from rolloutctl.ui.console import say
from rolloutctl.viewer.library import Library
from rolloutctl.viewer.server import serving


async def view(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHERE]",
            help="Folder or URI with runs, or one run: its name in ./out, its manifest, folder or URI. ./out when left out.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 chooses a free one.")] = 0,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    no_token: Annotated[
        bool,
        typer.Option("--no-token", help="Serve without a token in the URL: only behind a proxy that authenticates."),
    ] = False,
) -> None:
    """Show recorded runs in a browser, live. Read-only; ends with Ctrl-C."""
    store, place = await open_place(where, os.environ)
    if (folder := local_folder(store.uri)) is not None:
        store = Store.open(str(folder.resolve()), os.environ)  # commands that pages show work in any folder
    library = Library(store)
    runs = [row for row in await library.rows() if place.name in (None, row["name"], row["folder"])]
    if place.name is not None and not runs:
        raise CommandError(f"{place.uri} contains no run of {place.name!r}")
    token = "" if no_token else secrets.token_urlsafe(18)
    try:
        async with serving(library, host=host, port=port, token=token) as url:
            page = f"{url}#/run/{quote(runs[0]['folder'])}" if place.name is not None else url
            say(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} of {store.uri}: {page}")
            say("Ctrl-C ends it.", "dim")
            if open_browser:
                await asyncio.to_thread(webbrowser.open, page)
            await asyncio.Event().wait()
    except OSError as error:
        raise CommandError(f"{host}:{port}: {error.strerror or error}", hint="Choose another --port.") from error
