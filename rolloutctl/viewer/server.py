"""The web server of the pages: read-only, on this machine, behind a random token in its URL."""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web

from agent_runtime.recording.reader import NoSuchRun, NoTokenIds, sealed_tokens
from agent_runtime.recording.segments import RecordCorrupt
from agent_runtime.recording.store import StorageError
from rolloutctl.viewer import rollout as pages
from rolloutctl.viewer.assets import asset
from rolloutctl.viewer.library import Library, OpenRun
from rolloutctl.viewer.table import MOST_ROWS
from rolloutctl.viewer.token_text import TextOf
from rolloutctl.viewer.where import Condition, WrongCondition

LIBRARY: Final = web.AppKey("library", Library)
EVENT_SECONDS: Final = 1.0
KEEP_ALIVE_SECONDS: Final = 15.0
MOST_TASKS: Final = 200
"""Tasks of a comparison that a page lists."""
ASSETS: Final[Mapping[str, str]] = {
    "index.html": "text/html",
    "app.js": "text/javascript",
    "app.css": "text/css",
    "icon.svg": "image/svg+xml",
}
HEADERS: Final[Mapping[str, str]] = {
    # Text of models and tools is hostile: no other origin, no inline script, no frame, no form.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the URL has the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# The second one disables nginx's buffering.
EVENT_HEADERS: Final[Mapping[str, str]] = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(library: Library, token: str, text_of: TextOf | None = None) -> web.Application:
    """Return the application. Its paths begin with `/<token>/`, or with `/` if the token is empty."""
    base = f"/{token}" if token else ""
    app = web.Application(middlewares=[_guarded])
    app[LIBRARY] = library
    routes: Mapping[str, Handler] = {
        "/api/runs": _runs,
        "/api/run": _run,
        "/api/events": _events,
        "/api/rollouts": _rollouts,
        "/api/groups": _groups,
        "/api/rollout": _rollout,
        "/api/raw": _raw,
        "/api/tokens": functools.partial(_tokens, text_of=text_of),
        "/api/files": _files,
        "/api/file": _file,
        "/api/compare": _compare,
        "/healthz": _healthz,
    }
    app.router.add_get(f"{base}/", _asset("index.html"))
    for name in ASSETS:
        app.router.add_get(f"{base}/{name}", _asset(name))
    for path, handler in routes.items():
        app.router.add_get(base + path, handler)
    return app


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except (NoSuchRun, NoTokenIds) as error:
        response = _problem(404, str(error))
    except RecordCorrupt as error:
        response = _problem(422, f"The record is damaged. {error}")
    except (WrongCondition, _WrongParameter) as error:
        response = _problem(400, str(error))
    except StorageError as error:
        response = _problem(502, str(error))
    except web.HTTPException as error:
        response = _problem(error.status, error.reason)
    if not response.prepared:
        response.headers.update(HEADERS)
    return response


def _problem(status: int, message: str) -> web.Response:
    return _json({"error": pages.visible(message)}, status)


def _json(value: Any, status: int = 200) -> web.Response:
    response = web.Response(body=_encoded(value), status=status, content_type="application/json")
    response.enable_compression()
    return response


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _asset(name: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=asset(name), content_type=ASSETS[name], charset="utf-8")

    return handler


class _WrongParameter(ValueError):
    """A parameter of a request is missing or has another form."""


def _integer(request: web.Request, name: str, default: int | None = None) -> int:
    text = request.query.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise _WrongParameter(f"{name} must be a whole number, not {text!r}")
    return int(text)


def _where(request: web.Request) -> Condition | None:
    text = request.query.get("where")
    if not text:
        return None
    try:
        found: Condition = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _WrongParameter(f"where must be a condition as JSON: {error}") from error
    return found


async def _opened(request: web.Request, name: str = "run") -> OpenRun:
    return await request.app[LIBRARY].run(request.query.get(name, ""))


async def _runs(request: web.Request) -> web.Response:
    library = request.app[LIBRARY]
    return _json({"uri": library.uri, "runs": await library.rows()})


async def _run(request: web.Request) -> web.Response:
    return _json((await _opened(request)).summary())


async def _events(request: web.Request) -> web.StreamResponse:
    """Send the summary of a run whenever it changes, as server-sent events."""
    run = await _opened(request)
    response = web.StreamResponse(headers={**HEADERS, **EVENT_HEADERS})
    await response.prepare(request)
    last, silent = b"", 0.0
    with contextlib.suppress(ConnectionResetError):
        while True:
            await run.refresh()
            found = run.summary()
            data = _encoded({name: value for name, value in found.items() if name != "time"})
            if data != last:
                last, silent = data, 0.0
                await response.write(b"data: " + _encoded(found) + b"\n\n")
            elif (silent := silent + EVENT_SECONDS) >= KEEP_ALIVE_SECONDS:
                silent = 0.0
                await response.write(b": nothing new\n\n")
            if found["state"] == "finished" and not found["isReading"]:
                await response.write(b"event: end\ndata: {}\n\n")
                return response
            await asyncio.sleep(EVENT_SECONDS)
    return response


async def _rollouts(request: web.Request) -> web.Response:
    run, where = await _opened(request), _where(request)
    rows = run.table.rows(
        where,
        request.query.get("sort", "index"),
        descending="descending" in request.query,
        offset=_integer(request, "offset", 0),
        limit=min(_integer(request, "limit", 100), MOST_ROWS),
    )
    return _json({"count": run.table.count(where), "rows": rows})


async def _groups(request: web.Request) -> web.Response:
    run = await _opened(request)
    count, groups = run.table.groups(
        _where(request),
        worst_first="worst" in request.query,
        offset=_integer(request, "offset", 0),
        limit=min(_integer(request, "limit", 50), MOST_ROWS),
    )
    return _json({"count": count, "groups": groups})


async def _rollout(request: web.Request) -> web.Response:
    run, index = await _opened(request), _integer(request, "index")
    attempt = _integer(request, "attempt") if "attempt" in request.query else None
    return _json(pages.page(await run.rollout(index, attempt)))


async def _raw(request: web.Request) -> web.Response:
    run = await _opened(request)
    found = pages.raw(await run.records(_integer(request, "index")), _integer(request, "turn"))
    return _problem(404, "This rollout has no such turn.") if found is None else _json(found)


async def _tokens(request: web.Request, text_of: TextOf | None) -> web.Response:
    run = await _opened(request)
    branches = await sealed_tokens(run.run.store, _integer(request, "index"))
    return _json(pages.token_strip(branches, text_of))


async def _files(request: web.Request) -> web.Response:
    run = await _opened(request)
    async with run.artifacts(_integer(request, "index")) as (archive, changes):
        return _json(pages.files(archive, changes))


async def _file(request: web.Request) -> web.Response:
    run = await _opened(request)
    path = request.query.get("path", "")
    async with run.artifacts(_integer(request, "index")) as (archive, changes):
        found = None if archive is None else pages.file_text(archive, path)
    if found is None and path not in changes:
        return _problem(404, "The artifacts have no such file.")
    return _json((found or {"text": None, "bytes": 0, "isWhole": True}) | {"diff": changes.get(path)})


async def _compare(request: web.Request) -> web.Response:
    before, after = await _opened(request, "before"), await _opened(request, "after")
    found, show = await request.app[LIBRARY].compare(before, after), request.query.get("show", "changed")
    try:
        return _json(found.part(show, MOST_TASKS))
    except KeyError:
        raise _WrongParameter(f"show must be all, changed, better or worse, not {show!r}") from None


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok")


@contextlib.asynccontextmanager
async def serving(
    library: Library, *, host: str, port: int, token: str, text_of: TextOf | None = None
) -> AsyncIterator[str]:
    """Serve the pages; yields their URL. Raises OSError if the address cannot be used."""
    # handler_cancellation: events would otherwise be looked up for pages that were closed, and after the library is.
    app = application(library, token, text_of)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        port = runner.addresses[0][1]
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{port}/{token + '/' if token else ''}"
    finally:
        await runner.cleanup()
        await library.close()
