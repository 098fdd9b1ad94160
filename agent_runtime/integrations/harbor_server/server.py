"""`/api/v1/runs` over HTTP, compatible with the Harbor server of verl-recipe PR #83 (docs/remote-agents.md).

All routes except `/health` need the server's key: as a bearer token, as `x-api-key`, or as the password of Basic
authentication, which a URL can contain (`http://any:KEY@host:8080`). Errors are `{"detail": text}`.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import BodyPartReader, web
from pydantic import ValidationError

from agent_runtime.integrations.harbor_server.archive import BadArchive
from agent_runtime.integrations.harbor_server.plan import RunRefused, ServedJob
from agent_runtime.integrations.harbor_server.runs import Conflict, Full, Runs
from agent_runtime.integrations.harbor_server.schemas import ARCHIVE, METADATA, PATH, RunRequest, RunResult, RunStatus
from agent_runtime.proxy.app import server_runner
from agent_runtime.proxy.http import request_key
from agent_runtime.proxy.serve import log_to_stderr
from agent_runtime.shared_tasks import until_stopped
from rollout_api.base import problems_in
from rollout_api.rollout_job import RolloutJob

METADATA_BYTES: Final = 1 << 20
ARCHIVE_BYTES: Final = 256 << 20
"""Largest archive, compressed: a quarter of the limit for its unpacked files."""
UPLOAD_SECONDS: Final = 600
"""Time limit for receiving a request."""
KEY_LENGTH: Final = 255
"""Limit of an idempotency key's characters, as in Stripe's API."""
MOST_WAIT: Final = 60.0
"""Longest wait of a GET; below the idle time of every common load balancer."""
_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(runs: Runs, key: str) -> web.Application:
    """Return the application. It needs `handler_cancellation` to detect that a client disconnects."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health" and not _is_key(request, key):
            return _detail(
                401, "a key is needed: Authorization: Bearer KEY, or http://any:KEY@host in the URL", WWW_AUTH
            )
        try:
            return await handler(request)
        except (RunRefused, BadArchive) as error:
            return _detail(400, str(error))
        except Conflict as error:
            return _detail(409, str(error))
        except Full as error:
            return _detail(503, str(error), {"Retry-After": "30"})

    app = web.Application(client_max_size=0, middlewares=[guarded])
    app.router.add_post(PATH, partial(_post, runs))
    app.router.add_get(PATH + "/{run}", partial(_get, runs))
    app.router.add_delete(PATH + "/{run}", partial(_delete, runs))
    app.router.add_get("/health", partial(_health, runs))
    return app


WWW_AUTH: Final = {"WWW-Authenticate": 'Basic realm="runs"'}


async def _post(runs: Runs, request: web.Request) -> web.StreamResponse:
    key = request.headers.get("Idempotency-Key")
    if key is not None and not 0 < len(key) <= KEY_LENGTH:
        raise RunRefused(f"Idempotency-Key has {len(key)} characters, expected 1 to {KEY_LENGTH}")
    # The `Prefer` header of RFC 7240 is case-insensitive.
    is_async = "respond-async" in request.headers.get("Prefer", "").lower()
    with runs.incoming() as folder:
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                asked, archive = await _receive(request, folder)
        except TimeoutError:
            raise RunRefused(f"the request did not arrive within {UPLOAD_SECONDS} s") from None
        awaited = key is None and not is_async
        run_id = await runs.submit(folder, archive, asked, key=key, awaited=awaited)
    if is_async:
        result = runs.result(run_id)
        assert result is not None
        status = 202 if result.status == RunStatus.RUNNING else 200
        return _answer(result, status, {"Location": f"{PATH}/{run_id}"})
    try:
        result = await runs.wait(run_id)
    except asyncio.CancelledError:
        if awaited:
            # Only the disconnected client could get the result of this run.
            await asyncio.shield(runs.cancel(run_id))
        raise
    if result is not None and result.status == RunStatus.RUNNING:
        return _detail(503, f"the server is stopping; run {run_id} resumes after a restart", {"Retry-After": "5"})
    return _found(result, run_id)


async def _get(runs: Runs, request: web.Request) -> web.StreamResponse:
    run_id = request.match_info["run"]
    text = request.query.get("wait", "0")
    try:
        seconds = min(max(0.0, float(text)), MOST_WAIT)  # this argument order turns NaN into 0
    except ValueError:
        raise RunRefused(f"wait is {text!r}, expected seconds") from None
    return _found(await runs.wait(run_id, seconds), run_id)


async def _delete(runs: Runs, request: web.Request) -> web.StreamResponse:
    run_id = request.match_info["run"]
    return _found(await runs.cancel(run_id), run_id)


async def _health(runs: Runs, _: web.Request) -> web.StreamResponse:
    return web.json_response({"status": "ok", "runs": runs.count})


async def _receive(request: web.Request, folder: Path) -> tuple[RunRequest, Path]:
    """Return the two parts of a request: its metadata, and the archive in a file."""
    if not request.content_type.startswith("multipart/"):
        raise RunRefused(
            f"the body is {request.content_type}, expected multipart/form-data with {METADATA} and {ARCHIVE}"
        )
    asked: RunRequest | None = None
    archive: Path | None = None
    reader = await request.multipart()
    try:
        while (part := await reader.next()) is not None:
            if not isinstance(part, BodyPartReader):
                raise RunRefused("a part of the body is multipart itself")
            if part.name == METADATA:
                asked = _asked(await _read(part, METADATA_BYTES))
            elif part.name == ARCHIVE:
                archive = folder / "task.tar.gz"
                await _save(part, archive)
    except (ValueError, web.RequestPayloadError) as error:
        if isinstance(error, RunRefused | BadArchive):
            raise
        raise RunRefused(f"the body is not a multipart form: {error}") from error
    missing = [name for name, part in ((METADATA, asked), (ARCHIVE, archive)) if part is None]
    if asked is None or archive is None:
        raise RunRefused(f"the body has no part {' and no part '.join(missing)}")
    return asked, archive


async def _read(part: BodyPartReader, most: int) -> bytes:
    data = bytearray()
    while chunk := await part.read_chunk():
        data += chunk
        if len(data) > most:
            raise RunRefused(f"{part.name} has more than {most} bytes")
    return bytes(data)


async def _save(part: BodyPartReader, path: Path) -> None:
    size = 0
    with path.open("wb") as file:
        while chunk := await part.read_chunk(1 << 20):
            size += len(chunk)
            if size > ARCHIVE_BYTES:
                raise BadArchive(
                    f"{ARCHIVE} has more than {ARCHIVE_BYTES} bytes; put large files into the task's image"
                )
            file.write(chunk)


def _asked(data: bytes) -> RunRequest:
    try:
        return RunRequest.model_validate_json(data)
    except ValidationError as error:
        raise RunRefused(f"{METADATA}: {'; '.join(problems_in(error, METADATA))}") from error


def _is_key(request: web.Request, key: str) -> bool:
    given = request_key(request.headers)
    return given is not None and hmac.compare_digest(given.encode(errors="replace"), key.encode())


def _found(result: RunResult | None, run_id: str) -> web.StreamResponse:
    return _detail(404, f"there is no run {run_id!r}") if result is None else _answer(result, 200)


def _answer(result: RunResult, status: int, headers: dict[str, str] | None = None) -> web.StreamResponse:
    return web.json_response(text=result.model_dump_json(), status=status, headers=headers)


def _detail(status: int, text: str, headers: dict[str, str] | None = None) -> web.StreamResponse:
    return web.json_response({"detail": text}, status=status, headers=headers)


async def serve_jobs(
    jobs: Mapping[str, tuple[RolloutJob, Path]],
    key: str,
    *,
    folder: Path,
    host: str,
    port: int,
    concurrency: int,
    image_template: str | None,
) -> None:
    """Serve jobs, each with the base folder of its relative paths, until the process gets a stop signal. `rolloutctl
    serve` calls it.
    """
    log_to_stderr(__package__)
    served = {name: ServedJob(job, base_dir) for name, (job, base_dir) in jobs.items()}
    runs = Runs(folder, served, image_template=image_template, concurrency=concurrency)
    with until_stopped() as stop:
        runner, _ = await serving(runs, key, host, port)
        try:
            await stop.wait()
        finally:
            # Stop runs first. Waiting clients get 503, and can fetch the result later by their key.
            await runs.close()
            await runner.cleanup()


async def serving(runs: Runs, key: str, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Open the runs and serve them until the runner is cleaned up; return the listening port."""
    await runs.open()
    runner = server_runner(make_app(runs, key), 1.0)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    listening = int(runner.addresses[0][1])
    _LOG.info("Serving http://%s:%d%s", host, listening, PATH)
    return runner, listening
