"""LoRA adapters in an engine. Each version is loaded under the name `NAME@VERSION`, so that calls of two versions can run at
the same time, and a call keeps the version with which it began.

The operator says which versions are wanted. The others are unloaded when their last call has ended.
"""

import asyncio
import logging
import re
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
from pydantic import Field

from agent_runtime.serving.engine import Engine
from agent_runtime.serving.fetching import fetch_folder
from agent_runtime.serving.json_calls import CallFailed, models, send
from agent_runtime.serving.policies import PolicyRequest
from agent_runtime.serving.sources import open_source
from rollout_api.base import ApiModel
from rollout_api.inference.description import Adapters as AdapterRequests
from rollout_api.inference.description import Request
from rollout_api.model_server import MOST_ADAPTERS, AdapterName

log = logging.getLogger(__name__)

SEPARATOR: Final = "@"
VERSION: Final = re.compile("[0-9]{1,16}")
LINGER_SECONDS = 10.0
"""Time for which a version that is no longer wanted gets calls. Runners know of a new version after 3 s."""
MESSAGE_CHARACTERS: Final = 500
TRIES: Final = 3
TRY_SECONDS = 1.0
"""Attempts of a load, and the pause after the first one, as for other loads (the operator's control.py)."""
GATE_SECONDS: Final = 0.2
"""Interval of checks whether the engine may have calls."""

Key = tuple[str, int]
"""Name and version of an adapter."""


class WantedAdapter(ApiModel):
    """The versions of one adapter that should be loaded."""

    current: Annotated[int, Field(ge=0)]
    """Version of calls that name none. 0: the model without an adapter."""
    versions: Annotated[list[PolicyRequest], Field(max_length=2)]
    """The current version unless it is 0, and the next one."""


class WantedAdapters(ApiModel):
    """Body of POST /policy/adapters."""

    adapters: Annotated[dict[AdapterName, WantedAdapter], Field(max_length=MOST_ADAPTERS)]
    seconds: Annotated[float, Field(gt=0)]
    """Time limit of one fetch."""


@dataclass(frozen=True)
class Failure:
    """Why a version could not be loaded."""

    at: float
    """By the event loop's clock."""
    message: str
    fetched: bool
    """Whether its files were fetched, so that the engine has refused them."""


class NotLoaded(Exception):
    """The adapter's version cannot answer calls on this server."""


class Adapters:
    """The adapters of one engine. `folder` is for fetched files; `environ` returns the credentials of stores."""

    def __init__(
        self, http: aiohttp.ClientSession, engine: Engine, folder: Path, environ: Callable[[], Mapping[str, str]]
    ) -> None:
        self._http, self._engine, self._environ = http, engine, environ
        # Several servers may share the volume, and the engine may read an adapter again until it is unloaded.
        self._folder = folder / "adapters" / socket.gethostname()
        self._wanted: Mapping[str, WantedAdapter] = {}
        self._names: set[str] = set()
        """All names that were wanted since this gateway started."""
        self._process: str | None = None
        self._loaded: set[Key] = set()
        self._sources: dict[Key, PolicyRequest] = {}
        """Sources of all versions that this process has loaded: it keeps cached values of those that were unloaded."""
        self._failed: dict[Key, Failure] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        """Loads and unloads in progress."""
        self._calls: Counter[Key] = Counter()
        self._changing = asyncio.Lock()

    @property
    def exist(self) -> bool:
        """Whether calls may name an adapter."""
        return bool(self._names)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def want(self, wanted: WantedAdapters) -> None:
        """Begin to load the wanted versions and to unload others. Raises CallFailed if the engine does not answer."""
        async with self._changing:
            process = self._engine.process
            if process != self._process:
                await self.close()  # these tasks are of an engine that has ended
                found = await self._listed()
                self._process, self._loaded = process, found
                self._sources.clear()
            self._wanted = wanted.adapters
            self._names.update(self._wanted)
            self._failed.clear()
            keys = {(name, version.version) for name, adapter in self._wanted.items() for version in adapter.versions}
            await asyncio.to_thread(self._remove_folders_except, keys | self._loaded | self._tasks.keys())
            for name, adapter in self._wanted.items():
                for version in adapter.versions:
                    key = name, version.version
                    if self._sources.get(key, version) != version:
                        words = f"version {version.version} of {name} came from another place; give it a higher version"
                        self._fail(key, words, fetched=True)
                    elif key not in self._loaded:
                        self._start(key, self._load(key, version, wanted.seconds))
            for key in self._loaded:
                self._retire_unused(key)

    def report(self) -> dict[str, Any]:
        """Return the state of each wanted adapter in this process of the engine, for GET /policy/served."""
        here = self._process == self._engine.process
        found, now = {}, asyncio.get_running_loop().time()
        for name, adapter in self._wanted.items() if here else ():
            keys = [(name, version.version) for version in adapter.versions]
            found[name] = {
                "current": adapter.current,
                "loaded": [key[1] for key in keys if key in self._loaded and key not in self._failed],
                "loading": [key[1] for key in keys if key in self._tasks],
                "failed": [
                    {
                        "version": key[1],
                        "message": failure.message,
                        "fetched": failure.fetched,
                        "seconds": now - failure.at,
                    }
                    for key in keys
                    if (failure := self._failed.get(key)) is not None
                ],
            }
        return found

    @contextmanager
    def call(self, asked: dict[str, Any], version: str | None) -> Iterator[int | None]:
        """Direct a call: replace the adapter's name in its body by that in the engine. Yields the version; None if the
        call names no adapter. Raises NotLoaded.

        `version` is the wanted one. Without it, the name may have one, as in the engine's list; else the current one is
        used.
        """
        name, _, pinned = str(asked.get("model")).partition(SEPARATOR)
        adapter = self._wanted.get(name)
        if adapter is None:
            if name in self._names:
                raise NotLoaded(f"adapter {name} was removed")
            yield None
            return
        wanted = pinned if version is None else version
        number = int(wanted) if VERSION.fullmatch(wanted) else adapter.current
        if number == 0:
            self._requests.choose(asked, None)
            yield 0
            return
        key = name, number
        if key not in self._loaded or self._process != self._engine.process:
            raise NotLoaded(f"version {number} of adapter {name} is not loaded on this server")
        self._requests.choose(asked, _engine_name(key))
        self._calls[key] += 1
        try:
            yield number
        finally:
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]
                self._retire_unused(key)

    def _fail(self, key: Key, message: str, *, fetched: bool) -> None:
        now = asyncio.get_running_loop().time()
        self._failed[key] = Failure(now, message[:MESSAGE_CHARACTERS], fetched)

    def _is_wanted(self, key: Key) -> bool:
        adapter = self._wanted.get(key[0])
        return adapter is not None and any(version.version == key[1] for version in adapter.versions)

    def _start(self, key: Key, work: Any) -> None:
        if key in self._tasks:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks[key] = task

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[key]
            if not task.cancelled():
                self._retire_unused(key)  # it may have become unused meanwhile

        task.add_done_callback(ended)

    def _retire_unused(self, key: Key) -> None:
        if key in self._loaded and not self._is_wanted(key) and not self._calls[key]:
            self._start(key, self._retire(key))

    async def _load(self, key: Key, wanted: PolicyRequest, seconds: float) -> None:
        name, version = key
        process, folder = self._process, self._folder / name / str(version)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            async with asyncio.timeout(seconds), open_source(wanted.uri, None, self._environ()) as source:
                await fetch_folder(source, folder, writer=socket.gethostname(), digest=wanted.digest)
            while self._engine.version is None and self._engine.process == process:  # noqa: ASYNC110
                await asyncio.sleep(GATE_SECONDS)  # the engine may sleep, without memory for the adapter
            await self._send_load(self._requests.load(_engine_name(key), str(folder)))
        except Exception as error:  # noqa: BLE001 - the operator must get the error
            words = f"the fetch took more than {seconds:.0f} s" if isinstance(error, TimeoutError) else str(error)
            log.warning("adapter %s from %s: %s", _engine_name(key), wanted.uri, words)
            sent = isinstance(error, CallFailed)
            # A repeated request may have failed because the first one succeeded.
            if not (sent and self._engine.process == process and key in await self._listed_or_none()):
                self._fail(key, words, fetched=isinstance(error, CallFailed) and error.status > 0)
                return
        if self._engine.process == process == self._process:
            self._loaded.add(key)
            self._sources[key] = wanted

    async def _send_load(self, request: Request) -> None:
        """Load an adapter. vLLM answers 500 both for files that it cannot use and for failures that may pass, so these are
        tried again. Raises CallFailed.
        """
        for number in range(1, TRIES + 1):
            try:
                await self._send(request)
                return
            except CallFailed as error:
                if error.status < 500 or number == TRIES:
                    raise
            await asyncio.sleep(TRY_SECONDS * 2 ** (number - 1))

    async def _retire(self, key: Key) -> None:
        """Unload a version after a while, unless it has calls or is wanted again."""
        await asyncio.sleep(LINGER_SECONDS)
        if self._calls[key] or self._is_wanted(key) or self._process != self._engine.process or key not in self._loaded:
            return
        self._loaded.remove(key)
        try:
            await self._send(self._requests.unload(_engine_name(key)))
        except CallFailed as error:
            log.warning("unloading adapter %s: %s", _engine_name(key), error)
        await asyncio.to_thread(shutil.rmtree, self._folder / key[0] / str(key[1]), ignore_errors=True)

    def _remove_folders_except(self, kept: Collection[Key]) -> None:
        names = {(name, str(version)) for name, version in kept}
        for path in self._folder.glob("*/*"):
            # The folder of a version, or the temporary one of its fetch: `.VERSION.HOST`.
            if (path.parent.name, path.name.lstrip(".").split(".")[0]) not in names:
                shutil.rmtree(path, ignore_errors=True)

    async def _listed(self) -> set[Key]:
        """Return the adapters that the engine has. Raises CallFailed."""
        listed = await models(self._http, self._engine.url)
        found = (str(model.get("id")).rpartition(SEPARATOR) for model in listed if model.get("parent"))
        return {(name, int(version)) for name, _, version in found if name and VERSION.fullmatch(version)}

    async def _listed_or_none(self) -> set[Key]:
        try:
            return await self._listed()
        except CallFailed:
            return set()

    @property
    def _requests(self) -> AdapterRequests:
        return self._engine.description.updates.adapters

    async def _send(self, request: Request) -> None:
        await send(self._http, self._engine.url, request)


def _engine_name(key: Key) -> str:
    return f"{key[0]}{SEPARATOR}{key[1]}"
