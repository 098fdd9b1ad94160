"""The runs of a server. Each is a job on this machine, with a folder on disk. A single rename creates
`<folder>/<run>/request.json`, which has the run's plan; `result.json` is written when the run has ended. In between, the
job has its own record. So a restarted server resumes its runs, and runs none twice.
"""

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from agent_runtime.engine.run_folder import process_lock
from agent_runtime.engine.scheduling.first_ends import AgentBroken, FirstEnds
from agent_runtime.engine.session import RolloutSession
from agent_runtime.integrations.harbor_server.archive import BadArchive, unpack
from agent_runtime.integrations.harbor_server.plan import (
    PlannedRun,
    RunRefused,
    ServedJob,
    SessionUrl,
    plan_run,
    result_of,
)
from agent_runtime.integrations.harbor_server.schemas import RunRequest, RunResult, RunStatus
from agent_runtime.models.base import ContextExceeded, ConversationRefused, ModelConfigError, ModelError, ModelRequest
from agent_runtime.models.http_client import Answer, CallOptions
from agent_runtime.models.probe import PROBE_SECONDS, ProbeResult
from agent_runtime.models.providers.openai_endpoint import OpenAIEndpoint
from agent_runtime.models.refusals import error_text
from agent_runtime.proxy.chat import ErrorKind
from agent_runtime.recording.branches import has_own_answer
from agent_runtime.recording.store import StorageUnavailable
from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.images.store import place_of
from agent_runtime.tasks import TaskSourceError, load_tasks
from agent_runtime.tasks.folders import LIST_VARIABLE
from rollout_api.records import FailedRecord, Result
from rollout_api.tasks import Task, TaskFormat, Tasks, TaskSource

MOST_WAITING: Final = 4096
"""Most accepted and unfinished runs: each has its task's folder on disk."""
CALL_SECONDS: Final = 1800.0
"""Deadline of one answer of a client's session: an agent's default time, because a trainer may delay calls."""
CLEAN_UP_SECONDS: Final = 60.0
"""Time limit for opening a cancelled run of an earlier server, to delete its sandboxes."""
AGAIN_SECONDS: Final = 30.0
"""Pause before a run is resumed whose storage or disk was unavailable."""
_REQUEST, _RESULT, _TASK, _INCOMING = "request.json", "result.json", "task", ".incoming-"
_LOG = logging.getLogger(__name__)


class SessionModel(OpenAIEndpoint):
    """A client's session as a model. It makes no test call, which would be recorded as a turn."""

    def __init__(self, url: SessionUrl, run_id: str = "") -> None:
        self._run_id = run_id
        headers = {} if url.key is None else {"Authorization": f"Bearer {url.key}"}
        origin = "environment_overrides.OPENAI_API_KEY"
        super().__init__(url.base_url, url.name, headers=headers, key_origin=origin, call_seconds=CALL_SECONDS)

        self._client.own_refusal = _refusal_of_session

    async def check(self) -> None:
        """Do nothing."""

    async def test(self, request: ModelRequest, *, may_record: bool) -> ProbeResult:
        """See SelfTesting. Proxies other than ours lack this route: there the test is a call."""
        try:
            found = await self._client.call("POST", "/test", {}, CallOptions(2 * PROBE_SECONDS, tries=1))
            if found.status in (404, 405) and may_record:
                await self.complete(request)
                return ProbeResult.ANSWERED
        except (ModelError, ConversationRefused):
            return ProbeResult.UNKNOWN
        told = found.payload if found.status == 200 and isinstance(found.payload, dict) else {}
        if told.get("answers") is True:
            return ProbeResult.ANSWERED
        return ProbeResult.REFUSED if told.get("refuses") is True else ProbeResult.UNKNOWN

    def headers(self, request: ModelRequest, body: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers of a call. With the key, a call that a restarted server repeats gets the answer of the first
        one: otherwise the client's session would have another one, which has no part in the rollout.
        """
        headers = super().headers(request, body)
        if request.call_id is None:
            return headers
        call = json.dumps([self._run_id, request.call_id, body], sort_keys=True)
        return {**headers, "Idempotency-Key": hashlib.sha256(call.encode()).hexdigest()}


def _refusal_of_session(answer: Answer) -> Exception | None:
    """Return what a refusal by the client's session means. Its budget is the policy's limit, like the context's."""
    codes, _ = error_text(answer.payload)
    if ErrorKind.OVER_BUDGET.code in codes:
        return ContextExceeded(f"the client's session takes no more calls: {answer.error}")
    if ErrorKind.SESSION_ENDED.code in codes:
        return ModelConfigError("SessionEnded", f"the client has ended its session: {answer.error}")
    return None


class Conflict(Exception):
    """An idempotency key that was used with another request before."""


class FolderInUse(OSError):
    """Another server uses this folder."""


class Full(Exception):
    """The server has its maximum number of runs."""


class _Kept(BaseModel):
    """The contents of `request.json`."""

    digest: str
    awaited: bool
    """Whether the client waits on a connection, so that it cannot get the result after a restart of the server."""
    plan: PlannedRun


class _Ended(BaseModel):
    """The contents of `result.json`. `digest` is None for a run whose request was unreadable."""

    digest: str | None
    result: RunResult


class Runs:
    """Runs below a folder. At most `concurrency` run at once; the others wait."""

    def __init__(
        self, folder: Path, jobs: Mapping[str, ServedJob], *, image_template: str | None = None, concurrency: int = 16
    ) -> None:
        self._folder, self._jobs = folder, dict(jobs)
        self._image_template = image_template
        self._places = asyncio.Semaphore(concurrency)
        self._working: dict[str, asyncio.Task[RunResult]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._first_ends = defaultdict[tuple[str, str], FirstEnds](FirstEnds)
        """The ends of the first agents, by manifest and agent: each run has a single agent."""
        self._reported_broken = set[tuple[str, str]]()
        self._held = contextlib.ExitStack()
        """The lock of the folder; the kernel releases it when this process ends."""

    async def open(self) -> None:
        """Resume the runs of an earlier server. Runs whose client waited on a connection are abandoned.

        Raises FolderInUse.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(self._folder, os.O_RDONLY)
        self._held.callback(os.close, held)
        try:
            self._held.enter_context(process_lock(held))
        except BlockingIOError:
            self._held.close()
            raise FolderInUse(
                f"another server keeps its runs in {self._folder.resolve()}; stop it first, or use another folder "
                "(--folder)"
            ) from None
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith(_INCOMING):
                shutil.rmtree(path, ignore_errors=True)
            elif (path / _REQUEST).exists() and not (path / _RESULT).exists():
                self._resume(path)

    def _resume(self, path: Path) -> None:
        try:
            kept = _Kept.model_validate_json((path / _REQUEST).read_bytes())
        except (OSError, ValueError) as error:
            # Another version of this program has written it, or the disk has damaged it. The other runs go on.
            _LOG.error("Run %s cannot be resumed: %s is unreadable: %s", path.name, path / _REQUEST, error)
            message = "Unreadable: the plan of this run is unreadable; submit it again, with another Idempotency-Key"
            result = RunResult(run_id=path.name, status=RunStatus.FAILED, error=message)
            _write(path / _RESULT, _Ended(digest=None, result=result).model_dump_json())
            return
        self._start(path.name, kept, is_resumed=True)
        if kept.awaited:
            self._cancelled[path.name].set()

    @contextlib.contextmanager
    def incoming(self) -> Iterator[Path]:
        """Yield a folder for a request that is being received; it is removed unless `submit` takes it."""
        path = self._folder / f"{_INCOMING}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    async def submit(
        self, incoming: Path, archive: Path, request: RunRequest, *, key: str | None, awaited: bool
    ) -> str:
        """Accept a run: durable when this returns its id. An equal `key` returns the run that it began.

        Raises RunRefused, BadArchive, TaskSourceError, Conflict, Full.
        """
        await asyncio.to_thread(unpack, archive, incoming / _TASK)
        archive.unlink()
        digest = await asyncio.to_thread(_digest, request, incoming / _TASK)
        of_key = hashlib.sha256((key or "").encode(errors="surrogateescape")).hexdigest()
        run_id = f"run-{of_key[:24] if key else secrets.token_hex(12)}"
        if self._is_known(run_id, digest):
            return run_id
        if len(self._working) >= MOST_WAITING:
            raise Full(f"{MOST_WAITING} runs are in progress; try again later")
        planned = await asyncio.to_thread(self._planned, run_id, request, incoming / _TASK)
        shutil.rmtree(incoming / _TASK)  # the plan has its files
        kept = _Kept(digest=digest, awaited=awaited, plan=planned)
        await asyncio.to_thread(_write, incoming / _REQUEST, kept.model_dump_json(exclude_none=True))
        try:
            incoming.rename(self._folder / run_id)
        except OSError:
            # A concurrent request with the same key was faster.
            if not self._is_known(run_id, digest):
                raise
        else:
            _sync(self._folder)
            self._start(run_id, kept, is_resumed=False)
        return run_id

    def result(self, run_id: str) -> RunResult | None:
        if (ended := self._ended(run_id)) is not None:
            return ended.result
        known = run_id in self._working or (_is_run(run_id) and (self._folder / run_id / _REQUEST).exists())
        return RunResult(run_id=run_id, status=RunStatus.RUNNING) if known else None

    async def wait(self, run_id: str, seconds: float | None = None) -> RunResult | None:
        """Return the result of a run once it has ended, or its state after this many seconds."""
        if (working := self._working.get(run_id)) is not None:
            await asyncio.wait({working}, timeout=seconds)
        return self.result(run_id)

    async def cancel(self, run_id: str) -> RunResult | None:
        """Cancel a run, its sandbox and its model calls; an ended run is unchanged. None if it does not exist."""
        if (cancelled := self._cancelled.get(run_id)) is not None:
            cancelled.set()
        return await self.wait(run_id)

    async def close(self) -> None:
        """Stop; unfinished runs can be resumed."""
        for task in self._working.values():
            task.cancel()
        await asyncio.gather(*self._working.values(), return_exceptions=True)
        self._held.close()

    @property
    def count(self) -> int:
        return len(self._working)

    def _planned(self, run_id: str, request: RunRequest, folder: Path) -> PlannedRun:
        task, warnings = self._task(folder, request)
        planned = plan_run(run_id, request, task, self._jobs)
        return planned.model_copy(update={"warnings": [*planned.warnings, *warnings]})

    def _task(self, folder: Path, request: RunRequest) -> tuple[Task, list[str]]:
        """Return the single task of an archive. Its `${NAME}` are replaced only from the request, and its image cannot
        be a path, because the sender must not get access to this machine's environment and disk.
        """
        task, warnings = self._loaded(folder, request, None)
        for image in (task.sandbox.image, None if task.verifier is None else task.verifier.image):
            if image is not None and place_of(image, folder) is not None:
                raise RunRefused(
                    f"task.toml: docker_image {image!r} is a path of the server; name an image of a registry"
                )
        return (task, warnings) if self._image_template is None else self._loaded(folder, request, self._image_template)

    def _loaded(self, folder: Path, request: RunRequest, image_template: str | None) -> tuple[Task, list[str]]:
        place = f"{folder.resolve()}/"
        given = {name: str(value) for name, value in request.environment_overrides.items()}
        source = TaskSource(uri=place, format=TaskFormat.HARBOR).model_copy(update={"variables": list(given)})
        try:
            loaded = load_tasks(Tasks(from_=source, image_template=image_template), folder, given)
        except TaskSourceError as error:
            problems = str(error).replace(place, "").replace(LIST_VARIABLE, "send it in environment_overrides")
            raise RunRefused(problems) from error
        if len(loaded.tasks) != 1:
            raise BadArchive(f"the archive has {len(loaded.tasks)} tasks, expected one folder with a task.toml")
        return loaded.tasks[0], [str(warning).replace(place, "") for warning in loaded.warnings]

    def _start(self, run_id: str, kept: _Kept, *, is_resumed: bool) -> None:
        self._cancelled[run_id] = asyncio.Event()
        self._working[run_id] = task = asyncio.create_task(self._run(run_id, kept, is_resumed=is_resumed))
        task.add_done_callback(lambda _: (self._working.pop(run_id), self._cancelled.pop(run_id)))

    async def _run(self, run_id: str, kept: _Kept, *, is_resumed: bool) -> RunResult:
        try:
            work = functools.partial(self._result, run_id, kept)
            result = await self._completed(run_id, work, is_resumed=is_resumed)
        except Exception as error:  # noqa: BLE001 the client must get the error
            _LOG.warning("Run %s has failed: %s: %s", run_id, type(error).__name__, error)
            result = RunResult(run_id=run_id, status=RunStatus.FAILED, error=f"{type(error).__name__}: {error}")
        result = result.model_copy(update={"warnings": kept.plan.warnings})
        await self._written(run_id, _Ended(digest=kept.digest, result=result))
        # The plan may contain a model's key; its job and task are in the job's own record.
        (self._folder / run_id / _REQUEST).unlink()
        return result

    async def _completed(self, run_id: str, work: Callable[[], Awaitable[RunResult]], *, is_resumed: bool) -> RunResult:
        """Return the result of `work`, which is repeated while storage is unavailable unless the run is cancelled. A run
        that had begun also waits for its model and its sandboxes' provider, which may start later than this server
        after a reboot.
        """
        while True:
            try:
                return await work()
            except (StorageUnavailable, ModelError, SandboxFailure) as error:
                waits = isinstance(error, StorageUnavailable) or is_resumed
                if not waits or isinstance(error, ModelConfigError) or self._cancelled[run_id].is_set():
                    raise
                _LOG.warning("Run %s is resumed in %g s: %s", run_id, AGAIN_SECONDS, error)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _written(self, run_id: str, ended: _Ended) -> None:
        """Write the result of a run. Retries while the disk is full or unavailable."""
        while True:
            try:
                return await asyncio.to_thread(_write, self._folder / run_id / _RESULT, ended.model_dump_json())
            except OSError as error:
                _LOG.warning("The result of run %s is written again in %g s: %s", run_id, AGAIN_SECONDS, error)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _result(self, run_id: str, kept: _Kept) -> RunResult:
        """Run the job unless the run is cancelled first."""
        cancelled = self._cancelled[run_id]
        # Also open a run that is cancelled, so that its sandboxes from an earlier server are removed.
        grace = CLEAN_UP_SECONDS if cancelled.is_set() else 0.0
        playing = asyncio.create_task(self._run_in_session(run_id, kept.plan, cancelled))
        stop = asyncio.create_task(cancelled.wait())
        try:
            await asyncio.wait({playing, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                await asyncio.wait({playing}, timeout=grace)
        finally:
            for task in (playing, stop):
                task.cancel()
            await asyncio.gather(playing, stop, return_exceptions=True)
        if not playing.cancelled():
            return playing.result()
        return RunResult(run_id=run_id, status=RunStatus.FAILED, error=f"Cancelled: {_why(kept)}")

    async def _run_in_session(self, run_id: str, plan: PlannedRun, cancelled: asyncio.Event) -> RunResult:
        model = None if plan.model is None else SessionModel(plan.model, run_id)
        agent = (plan.manifest, plan.job.spec.agent.type)
        first_ends = self._first_ends[agent]
        async with _place(self._places, cancelled), contextlib.AsyncExitStack() as stack:
            if model is not None:
                stack.push_async_callback(model.close)
            opening = stack.enter_context(contextlib.ExitStack())
            # An agent that raised waits for the runs that are being opened, too.
            opening.enter_context(first_ends.running())
            private = [self._folder.resolve()]
            session = await stack.enter_async_context(
                RolloutSession(plan.job, base_dir=plan.base_dir, model=model, private=private, first_ends=first_ends)
            )
            try:
                if cancelled.is_set():
                    raise asyncio.CancelledError
                if not session.submitted:
                    await session.submit(plan.task)
                await session.close()
                opening.close()
                (result,) = (await anext(session)).results
                if model is not None and (lost := await _lost_attempt(session, result)) is not None:
                    return RunResult(run_id=run_id, status=RunStatus.FAILED, error=f"AttemptLost: {lost}")
                seal = (await session.seals())[result.index]
                return result_of(run_id, result, seal.verdict, await session.records(result), session.uri)
            except asyncio.CancelledError:
                if cancelled.is_set():
                    await session.abandon("Cancelled", "the run was cancelled")
                raise
            except AgentBroken as error:
                await session.abandon(type(error).__name__, str(error))
                self._report_broken(agent, error)
                message = f"{type(error).__name__}: {error.why}"
                return RunResult(run_id=run_id, status=RunStatus.FAILED, error=message, result_uri=session.uri)

    def _report_broken(self, agent: tuple[str, str], error: AgentBroken) -> None:
        """Log once for each agent."""
        if agent not in self._reported_broken:
            self._reported_broken.add(agent)
            why = "Runs of %s fail until one of them ends otherwise. Correct the code, and start the server again. %s"
            _LOG.error(why, agent[0], error.why)

    def _is_known(self, run_id: str, digest: str) -> bool:
        """Whether an equal request began this run. Raises Conflict if a different request did."""
        if (ended := self._ended(run_id)) is not None:
            known = ended.digest
        elif (path := self._folder / run_id / _REQUEST).exists():
            known = _Kept.model_validate_json(path.read_bytes()).digest
        else:
            return False
        if known not in (None, digest):
            raise Conflict("this Idempotency-Key was used for another request; use a new one")
        return True

    def _ended(self, run_id: str) -> _Ended | None:
        path = self._folder / run_id / _RESULT
        return _Ended.model_validate_json(path.read_bytes()) if _is_run(run_id) and path.exists() else None


async def _lost_attempt(session: RolloutSession, result: Result) -> str | None:
    """Return why an earlier attempt was lost whose answers are in the client's session, too; None without one.

    The client would train on the answers of both. Losses that the policy may have caused do not count: the policy must
    not be able to discard its run.
    """
    for number in range(result.attempt):
        records = await session.records(result.model_copy(update={"attempt": number}))
        failed = next((record for record in records if isinstance(record, FailedRecord)), None)
        if failed is not None and failed.unexplained is None and has_own_answer(records):
            return f"{failed.reason}: {failed.message}"
    return None


@contextlib.asynccontextmanager
async def _place(places: asyncio.Semaphore, cancelled: asyncio.Event) -> AsyncIterator[None]:
    """Wait for a free place, or until the run is cancelled."""
    taking = asyncio.ensure_future(places.acquire())
    stop = asyncio.ensure_future(cancelled.wait())
    try:
        await asyncio.wait({taking, stop}, return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        stop.cancel()
        if taking.done() and not taking.cancelled():
            places.release()
        else:
            taking.cancel()


def _is_run(name: str) -> bool:
    """Whether a run's name is valid: names come from URLs and become folders."""
    return re.fullmatch(r"run-[0-9a-f]{24}", name) is not None


def _why(kept: _Kept) -> str:
    return "its client disconnected, or the server was restarted" if kept.awaited else "a client requested it"


def _digest(request: RunRequest, task: Path) -> str:
    """Return a digest of the request and the task's files. The archive's bytes differ each time, because they include
    times.
    """
    digest = hashlib.sha256(json.dumps(request.model_dump(mode="json"), sort_keys=True).encode())
    for path in sorted(path for path in task.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        name, mode = path.relative_to(task), stat.S_IMODE(path.stat().st_mode)
        digest.update(f"{name}\0{mode:o}\0{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    """Write a file durably under its name, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
