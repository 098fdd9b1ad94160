"""`rolloutctl view`: show recorded runs in a browser."""

import asyncio
import os
import secrets
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from agent_runtime.recording.store import Store, local_folder
from agent_runtime.shared_tasks import until_stopped
from rolloutctl.completion import complete_run
from rolloutctl.errors import CommandError, did_you_mean, listening
from rolloutctl.runs import open_existing, open_place, say_skipped
from rolloutctl.ui.console import amount, say
from rolloutctl.viewer.library import Library
from rolloutctl.viewer.server import serving
from rolloutctl.viewer.token_text import open_tokenizer


async def view(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="WHERE",
            help="Folder or URI with runs, or one run: its name in ./out, its manifest, folder or URI. ./out when left out.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 chooses a free one.")] = 0,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    no_token: Annotated[
        bool,
        typer.Option("--no-token", help="Serve without a token in the URL: only behind a proxy that authenticates."),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", help="tokenizer.json of the model, or its folder: sampled tokens are shown as text."
        ),
    ] = None,
) -> None:
    """Show recorded runs in a browser, live. Read-only; ends with Ctrl-C."""
    text_of = None if tokenizer is None else open_tokenizer(tokenizer)
    store, place = await open_place(where, os.environ)
    if (folder := local_folder(store.uri)) is not None:
        store = Store.open(str(folder.resolve()), os.environ)  # commands that pages show work in any folder
    library = Library(store)
    every = await library.rows()
    runs = [row for row in every if place.name in (None, row["name"], row["folder"])]
    if place.name is not None and not runs:
        near = did_you_mean(place.name, {row["name"] for row in every})
        raise CommandError(f"{place.uri} contains no run of {place.name!r}.{near}")
    with listening(host, port):
        token = "" if no_token else _token()
        async with serving(library, host=host, port=port, token=token, text_of=text_of) as url:
            page = url if place.name is None else _page(url, newest_with_results(runs))
            say(f"{amount(len(runs), 'run')} of {store.uri}: {page}")
            if open_browser:
                await asyncio.to_thread(webbrowser.open, page)
            await until_interrupted("Ctrl-C ends it.")


async def until_interrupted(words: str) -> None:
    """Print `words`, then wait for Ctrl-C or SIGTERM."""
    with until_stopped() as interrupted:
        say(words, "dim")
        await interrupted.wait()


async def serve_run(uri: str) -> None:
    """Serve the pages of a run and print their URL; runs until it is cancelled."""
    where, _, folder = uri.rpartition("/")
    library = Library(open_existing(where, os.environ))
    async with serving(library, host="127.0.0.1", port=0, token=_token()) as url:
        say(f"Watch it: {_page(url, folder)}")
        await asyncio.Event().wait()


def newest_with_results(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the folder of the newest run that has a finished rollout or is running; of the newest one without such."""
    chosen = next((row for row in rows if row["sealed"] or row["state"] == "running"), rows[0])
    say_skipped(rows[0]["folder"], chosen["folder"])
    return str(chosen["folder"])


def _page(url: str, folder: str) -> str:
    return f"{url}#/run/{quote(folder)}"


def _token() -> str:
    return secrets.token_urlsafe(18)
