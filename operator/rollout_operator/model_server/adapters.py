"""The LoRA adapters of a ModelServer: decide which versions calls get, and what servers should load. No side effects.

Versions of an adapter run side by side, so an update shuts no gate: servers load the new version while calls use the old
one. When enough servers have it, new calls get it, in one write of the status. Older calls end with the version that
they began with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from rollout_api.model_server import AdapterStatus, PolicySource, ServerStatus
from rollout_operator.model_server.update_state import MOST_WORDS, TRY_AGAIN, Seen
from rollout_operator.server_contact import Call, LoadedAdapter, Server, ServerOperation, WantedAdapter

LOOK_AT_LOADS: Final = timedelta(seconds=1)
"""Interval of reports of a server that loads an adapter."""


@dataclass(frozen=True)
class AdapterDecision:
    """The part of a decision that is about adapters."""

    adapters: Mapping[str, AdapterStatus]
    servers: tuple[ServerStatus, ...]
    wanted: tuple[WantedAdapter, ...]
    """What every gateway should know."""
    operations: tuple[tuple[Server, ServerOperation], ...]
    message: str
    """What adapters lack; empty if all have the wanted version."""
    failed: bool
    """Whether one of them lacks it because servers could not load it."""


def decide(seen: Seen, entries: Sequence[ServerStatus]) -> AdapterDecision:
    """Decide about all adapters. `entries` are the servers' new status entries."""
    ready = {entry.name for entry in entries if entry.ready}
    servers = [server for server in seen.servers if server.name in ready]
    adapters = {name: _status(seen, name, servers) for name in seen.adapters}
    wanted = tuple(_wanted(seen, name) for name in sorted(seen.adapters))
    missing = [words for name, status in adapters.items() if (words := _missing(seen, name, status, servers))]
    return AdapterDecision(
        adapters,
        tuple(_with_adapters(seen, entry, adapters) for entry in entries),
        wanted,
        tuple(_operations(seen, wanted)),
        "; ".join(missing),
        any(status.failed == seen.adapters[name].source.version for name, status in adapters.items()),
    )


def _status(seen: Seen, name: str, servers: Sequence[Server]) -> AdapterStatus:
    """Return an adapter's new status. `servers` get calls; those without a report may have loaded anything."""
    wanted, old = seen.adapters[name], _old(seen, name)
    version, needed = wanted.source.version, min(wanted.min_ready, max(1, len(servers)))
    have = sum(version in _loaded(server, name).versions for server in servers)
    if version == old.current and (version == 0 or have):
        return old.model_copy(update={"failed": None, "failed_because": None})
    if version == old.failed:
        return old
    if version == 0 or have >= needed:
        return _at(wanted.source)
    failures = (_loaded(server, name).failures.get(version) for server in servers)
    refused = sum(failure is not None and failure.fetched for failure in failures)
    if servers and len(servers) - refused < needed:
        words = f"version {version}: {have} of {len(servers)} servers have it; {_why(seen, name, version)}"
        return old.model_copy(update={"failed": version, "failed_because": words[:MOST_WORDS]})
    return old


def _missing(seen: Seen, name: str, status: AdapterStatus, servers: Sequence[Server]) -> str:
    """Return why new calls do not get the wanted version; empty if they do."""
    version = seen.adapters[name].source.version
    have = sum(version in _loaded(server, name).versions for server in servers)
    if status.failed == version:
        return f"adapter {name}: {status.failed_because}; give it a higher version to try again"
    if status.current == version and (version == 0 or have or not servers):
        return ""
    words = f"adapter {name}: version {version}: {have} of {len(servers)} servers have it"
    why = _why(seen, name, version)
    return f"{words}; {why}; it is retried" if why else words


def _why(seen: Seen, name: str, version: int) -> str:
    """Return why one server has not loaded a version; empty if none failed."""
    for server in _running(seen):
        if (failure := _loaded(server, name).failures.get(version)) is not None:
            return f"{server.name}: {failure.message}"
        if (refused := server.failures.get(Call.ADAPT)) is not None:
            return refused.message
    return ""


def _with_adapters(seen: Seen, entry: ServerStatus, adapters: Mapping[str, AdapterStatus]) -> ServerStatus:
    """Return a server's status entry with the adapters whose current version it has."""
    server, old = next((server, seen.entry(server)) for server in seen.servers if server.name == entry.name)
    # A gateway that does not know an adapter's name passes it to the engine, which answers 404.
    if server.report is not None:
        known = {name: (0, *loaded.versions) for name, loaded in server.report.adapters.items()}
    else:
        known = {} if old is None else {name: (version,) for name, version in old.adapters.items()}
    have = {name: status.current for name, status in adapters.items() if status.current in known.get(name, ())}
    return entry.model_copy(update={"adapters": have})


def _operations(seen: Seen, wanted: tuple[WantedAdapter, ...]) -> Iterator[tuple[Server, ServerOperation]]:
    """Yield what servers are asked. With unchanged input, only outstanding operations are requested."""
    for server in _running(seen):
        report, failed = server.report, server.failures.get(Call.ADAPT)
        if server.busy is not None or report is None or (failed is not None and seen.now < failed.at + TRY_AGAIN):
            continue
        if _must_ask(seen, report.adapters, wanted):
            yield server, ServerOperation(Call.ADAPT, adapters=wanted)
        elif any(found.loading for found in report.adapters.values()) and seen.now >= report.at + LOOK_AT_LOADS:
            yield server, ServerOperation(Call.LOOK)


def _must_ask(seen: Seen, found: Mapping[str, LoadedAdapter], wanted: Sequence[WantedAdapter]) -> bool:
    """Whether a gateway must be told which versions are wanted, or to try again what failed."""
    if {name: loaded.current for name, loaded in found.items()} != {
        adapter.name: adapter.current for adapter in wanted
    }:
        return True
    for adapter in wanted:
        loaded = found[adapter.name]
        if any(version not in {s.version for s in adapter.sources} for version in (*loaded.versions, *loaded.loading)):
            return True
        for source in adapter.sources:
            failure = loaded.failures.get(source.version)
            if failure is not None and seen.now >= failure.at + TRY_AGAIN:
                return True
            if failure is None and source.version not in (*loaded.versions, *loaded.loading):
                return True
    return False


def _wanted(seen: Seen, name: str) -> WantedAdapter:
    """Return what the written status says: a gateway switches to a version only after it is current there."""
    status, wanted = _old(seen, name), seen.adapters[name].source
    sources = [status.source] if status.source is not None else []
    if wanted.version not in (0, status.current, status.failed):
        sources.append(wanted)
    return WantedAdapter(name, status.current, tuple(sources))


def _old(seen: Seen, name: str) -> AdapterStatus:
    """Return the written status. A new adapter has its first version from the start: calls wait until it is loaded."""
    return seen.status.adapters.get(name) or _at(seen.adapters[name].source)


def _at(source: PolicySource) -> AdapterStatus:
    return AdapterStatus(current=source.version, source=source if source.version else None)


def _running(seen: Seen) -> list[Server]:
    """Return the servers whose gateways and engines answer."""
    here = (server for server in seen.servers if server.up and not server.leaving and server.report is not None)
    return [server for server in here if not seen.is_evicted(server)]


def _loaded(server: Server, name: str) -> LoadedAdapter:
    return LoadedAdapter() if server.report is None else server.report.adapters.get(name, LoadedAdapter())
