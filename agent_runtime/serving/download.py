"""Fetch a model's weights into a folder: `python -m agent_runtime.serving.download --uri URI --folder FOLDER`.

Runs before a server's engines, so that no accelerator waits for a download. Ends immediately if the folder exists.
"""

import argparse
import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from agent_runtime.recording.store import StorageError
from agent_runtime.serving.fetching import FetchError, fetch_folder
from agent_runtime.serving.sources import open_source

log = logging.getLogger(__name__)


async def download(uri: str, revision: str | None, folder: Path, writer: str) -> bool:
    """Make the folder contain the files at the URI. Returns whether anything was fetched."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    async with open_source(uri, revision, dict(os.environ)) as source:
        return await fetch_folder(source, folder, writer=writer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Errors are printed in one line, because Kubernetes shows the last lines."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m agent_runtime.serving.download", description=__doc__)
    parser.add_argument("--uri", required=True, help="hf://ORG/NAME, s3://, gs://, az:// or file://")
    parser.add_argument("--revision", help="revision of a hub's repository; default: main")
    parser.add_argument("--folder", type=Path, required=True, help="destination")
    parser.add_argument("--writer", default=socket.gethostname(), help="name that distinguishes concurrent downloads")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        fetched = asyncio.run(download(options.uri, options.revision, options.folder, options.writer))
    except (FetchError, StorageError, OSError) as error:
        raise SystemExit(str(error)) from None
    log.info("%s in %.0f s", "fetched" if fetched else "already present", time.monotonic() - started)


if __name__ == "__main__":
    main()
