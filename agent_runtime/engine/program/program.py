"""The agent that is an unmodified program in the workspace and uses the session proxy as its model.

The program outlives its runner, so it is not replayed. The next runner finds it by its idempotency key, serves the same
URL with the same key, and continues the journal. Only an answer that was being sent when the runner died is incomplete.
"""

import asyncio
import fnmatch
import heapq
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from agent_runtime.agents.base import Stop
from agent_runtime.agents.program import FOLDER, HOME, ProgramSpec
from agent_runtime.engine.attempt.agent_clock import AgentClock, agent_seconds_of
from agent_runtime.engine.attempt.assignment import Assignment, Oversight
from agent_runtime.engine.attempt.attribution import Action, OutOfTime, Phase, attribute
from agent_runtime.engine.attempt.model_calls import AttemptModel, probe, trouble_of
from agent_runtime.engine.events import ModelCallFailing, TurnEnded
from agent_runtime.engine.program.program_rules import (
    CALLS_A_TURN,
    Ended,
    calls_in,
    delayed_calls,
    is_cut,
    refuse_long_arguments,
    stop_of,
)
from agent_runtime.engine.scheduling.completion_rules import StalePolicy
from agent_runtime.executor.timing import TICK_SECONDS
from agent_runtime.models.base import ConversationRefused, Model, ModelError
from agent_runtime.proxy.app import make_app, server_runner
from agent_runtime.proxy.handler import LATE_HEAD_SECONDS, Handler
from agent_runtime.proxy.history import given_up
from agent_runtime.proxy.keys import digest, key_of
from agent_runtime.proxy.limits import Exhausted, Limits
from agent_runtime.proxy.own_delay import TestableStorage
from agent_runtime.proxy.session import OverBudget, Session, SessionJournal, SessionSettings
from agent_runtime.proxy.sessions import LocalSessions
from agent_runtime.recording.program_trajectory import UnreadableTrajectory, to_atif
from agent_runtime.sandboxes.base import (
    CommandResult,
    FileError,
    GradesItself,
    ProgramFailed,
    Workspace,
    WorkspaceLimit,
    standstill_of,
    without_silence,
)
from rollout_api.model import Sampling
from rollout_api.records import (
    AttemptRecord,
    IntentRecord,
    ObjectDigest,
    ProgramTrajectory,
    Record,
    ResponseRecord,
    StopReason,
)
from rollout_api.rollout_job import AgentTrajectory

KEY_PURPOSE = "model key"


@dataclass(frozen=True)
class WorkspaceModel:
    """How a program in the workspace reaches its model. The next runner uses the same values."""

    url: str
    """URL without a path; an API's own path is `/v1/...`."""
    key: str
    name: str
    session: Session

    def environment(self) -> dict[str, str]:
        """Return the variables that configure the packages of OpenAI and Anthropic, and Gemini CLI."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.name,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.name,
            "GOOGLE_GEMINI_BASE_URL": self.url,
            "GEMINI_API_KEY": self.key,
            "GEMINI_MODEL": self.name,
        }


@asynccontextmanager
async def serve_model(
    workspace: Workspace,
    model: Model,
    journal: SessionJournal,
    recorded: Sequence[Record],
    *,
    session: str,
    task: str,
    member: int,
    seed: int,
    sampling: Sampling,
    limits: Limits,
    on_over_budget: OverBudget | None = None,
) -> AsyncIterator[WorkspaceModel]:
    """Let programs in the workspace call the model while the context is open; `session` identifies the attempt.

    `recorded` are the journaled records of the attempt, to which calls and answers are appended. At the end, calls
    whose answer has not begun are kept for the next runner; answers in progress are cut off.
    """
    key = key_of(session, workspace.secret(KEY_PURPOSE))
    begun = next((record.time for record in recorded if isinstance(record, AttemptRecord)), time.time())
    settings = SessionSettings(
        id=session,
        key_digest=digest(key),
        created=begun,
        models=[model.name],
        limits=limits,
        sampling=sampling,
        seed=seed,
        task=task,
        member=member,
    )
    sessions = LocalSessions(model)
    opened = sessions.open(settings, journal, recorded, on_over_budget)
    # No need to wait at shutdown, because the workspace's connections are closed by then.
    runner = server_runner(make_app(Handler(sessions, head_seconds=LATE_HEAD_SECONDS)), 0.0)
    await runner.setup()
    assert runner.server is not None
    try:
        async with workspace.serve_model(runner.server) as url:
            yield WorkspaceModel(url, key, model.name, opened)
    finally:
        await runner.cleanup()
        await sessions.end(session)


PROGRAM_KEY = "1:agent"
_PROMPT_PATH = f"{FOLDER}/prompt.md"
_NO_DEADLINE = 1e9
"""Longest deadline, in seconds, that the executor accepts. Its deadlines cannot exclude waiting time, so the runner
ends the program itself; a sandbox without a runner ends itself when it is idle.
"""
_TICK_SECONDS = 0.05
"""Shortest wait for the deadline, and the polling interval for ended calls."""


class Program:
    """One runner's part in the life of an attempt's program.

    `recorded` are the journaled records of the attempt, `unwritten` those that must be journaled before the program
    starts.
    """

    def __init__(
        self,
        assignment: Assignment,
        program: ProgramSpec,
        *,
        session: str,
        model: Callable[[], Model],
        workspace: Workspace,
        journal: SessionJournal,
        recorded: Sequence[Record],
        unwritten: Sequence[Record],
        oversight: Oversight,
    ) -> None:
        self.records: list[Record] = [*recorded, *unwritten]
        """The attempt's records so far, journaled or about to be."""
        self.turn = max((r.turn for r in recorded if isinstance(r, IntentRecord)), default=-1)
        self.exposed = any(isinstance(record, IntentRecord) for record in recorded)
        """Whether the program may have acted in the workspace on the model's answers."""
        self.traceback: str | None = None
        self._rollout, self._task, self._spec = assignment.rollout, assignment.rollout.task, assignment.agent
        self._sampling, self._session, self._program = assignment.sampling, session, program
        self._workspace, self._journal, self._unwritten = workspace, journal, list(unwritten)
        self._drain, self._observer, self._plugins = oversight.drain, oversight.observer, oversight.plugins
        self.policy_lag, self._situation = oversight.policy_lag, oversight.situation
        self._assignment, self._current_model = assignment, model
        for record in recorded:
            if isinstance(record, ResponseRecord):
                self.policy_lag.see(record.policy_spans)
        self._recorded = recorded
        self._clock = AgentClock(self._task.timeouts.agent_seconds, agent_seconds_of(recorded))
        self._clock.start()
        self._model = AttemptModel(
            model,
            assignment.model_group,
            self._clock,
            self._drain,
            lambda why: self._observer(ModelCallFailing(self._rollout.index, why)),
            assignment.watch,
        )
        self._model.restore(recorded)
        self._forced_end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an exception if the attempt must end while the program still runs: a limit, or a failure of
        infrastructure.
        """
        self._session_here: Session | None = None
        self._was_asked = False
        """Whether a call waited for its answer when the program's time ran out."""

    @property
    def agent_seconds(self) -> float:
        """Return the time that the program has used, under earlier runners too."""
        return round(self._clock.used(), 6)

    def take_unwritten(self) -> list[Record]:
        """Return and clear the records that must be part of the next write."""
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    async def store(self, name: str, data: bytes) -> ObjectDigest:
        """See SessionJournal, and `append`."""
        try:
            return await self._clock.untimed(self._journal.store(name, data))
        except Exception as error:
            self._fail(error)
            raise

    async def test_storage(self) -> None:
        """See TestableStorage."""
        if isinstance(self._journal, TestableStorage):
            await self._journal.test_storage()

    async def append(self, records: Sequence[Record]) -> None:
        """See SessionJournal. Time of the store does not count as the agent's; its errors end the attempt."""
        used = {"agent_seconds": self.agent_seconds}
        timed = [
            record.model_copy(update=used) if isinstance(record, IntentRecord | ResponseRecord) else record
            for record in records
        ]
        self.records += timed
        self.turn = max((self.turn, *(record.turn for record in timed if isinstance(record, IntentRecord))))
        wait = object()
        self._clock.begin_wait(wait)
        try:
            await self._journal.append(timed)
            await self._notify_plugins(timed)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._clock.end_wait(wait)
        for record in timed:
            if isinstance(record, ResponseRecord):
                self._answered(record)

    async def _notify_plugins(self, records: Sequence[Record]) -> None:
        if self._plugins is None:
            return
        for record in records:
            if isinstance(record, ResponseRecord):
                await self._plugins.note_program_calls(record)
        called = self._plugins.take_record()
        self.records += called
        self._unwritten += called

    async def run(self) -> tuple[StopReason, str]:
        """Start the program, or find it again, and wait for its end. Raises errors that end this runner's part."""
        if unwritten := self.take_unwritten():
            # Make the workspace's record durable before the program starts, so that the next runner finds it.
            await self._journal.append(unwritten)
        try:
            ended = await self._run()
            if not ended.result.ok and not ended.cut and self._recorded:
                # An earlier runner started the program, whose model requests may have got no answer between the two
                # runners. Check this before the probe, because requests during the probe count as missed too.
                ended = replace(ended, cut=await self._workspace.missed_requests() > 0)
            if ended.failure is None:
                ended = replace(ended, failure=self._delayed_call(ended.result))
            if ended.failure is None and self._gave_up(ended.result, self._model.unanswered):
                # The program may give up and end before this process gives up a hanging server.
                ended = replace(ended, failure=await trouble_of(None, True, self._probe))
                if ended.failure is None and ended.failed is not None:
                    # An older call that it closed is not why it failed.
                    ended.failed.hung_up = self.turn in self._model.unanswered
                    raise ended.failed
            if ended.failure is None and (refusal := ended.refusal) is not None:
                await self._probe(refusal)
                if refusal.refuses_others:
                    ended = replace(ended, failure=refusal)
            return stop_of(ended)
        except Exception as raised:  # noqa: BLE001 `attribute` decides
            error = await self._cause_of(raised)
            answered = any(isinstance(record, ResponseRecord) for record in self.records)
            situation = replace(self._situation, phase=Phase.AGENT, answered=answered, exposed=self.exposed)
            decision = attribute(error, situation)
            if decision.action is not Action.COMPLETE or decision.stop_reason is None:
                raise error from None
            return decision.stop_reason, decision.message

    async def _cause_of(self, error: Exception) -> Exception:
        """Return the error that ended the program. The probe is sent after the program's calls have ended, because they
        may have used the server's whole capacity.
        """
        if isinstance(error, OutOfTime):
            # If the model failed, or the sandbox stood still, it used up the time, not the policy.
            trouble = await trouble_of(self._model.trouble(), self._was_asked, self._probe)
            error = trouble or await standstill_of(self._workspace) or error
        if isinstance(error, ModelError | ConversationRefused):
            await self._probe(error)
        return error

    async def _run(self) -> Ended:
        limits = Limits(
            requests=CALLS_A_TURN * self._spec.max_turns, turns=self._spec.max_turns, tokens=self._spec.token_budget
        )
        try:
            async with serve_model(
                self._workspace, self._model, self, list(self.records), session=self._session, task=self._task.name,
                member=self._rollout.member, seed=self._rollout.seed, sampling=self._sampling, limits=limits,
                on_over_budget=None if isinstance(self._workspace, GradesItself) else self._over_budget,
            ) as access:  # fmt: skip
                self._session_here = access.session
                return await self._wait_for_end(self._work(access), access.session)
        finally:
            if self._forced_end.done():
                self._forced_end.exception()  # mark it as retrieved, so that asyncio does not log it

    async def _wait_for_end(self, work: Coroutine[Any, Any, CommandResult], session: Session) -> Ended:
        """Wait for the program's end, a limit or a failure, whichever comes first."""
        program = asyncio.ensure_future(work)
        watching: list[asyncio.Future[None]] = [
            asyncio.ensure_future(self._run_out_of_time()),
            asyncio.ensure_future(self._stop_for_drain(session)),
        ]
        try:
            first: list[asyncio.Future[Any]] = [program, *watching, self._forced_end]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            for watch in watching:
                if watch.done():
                    watch.result()
            if self._forced_end.done():
                self._forced_end.result()
            failures, failure_elsewhere = self._model.failures, None
            try:
                result = program.result()
            except ProgramFailed as failed:
                if session.over is not None:
                    raise self._at_limit(session.over) from None
                words = failed.message.encode(errors="replace")
                result = CommandResult(1, None, None, 0.0, b"", words, 0, len(words))
                if not self._gave_up(result, {*failures, *self._model.unanswered}):
                    raise
                failure_elsewhere = failed
            given_up = self._gave_up(result, failures)
            return Ended(
                result,
                over=session.over,
                failure=failures[given_up[-1]] if given_up else self._model.failure,
                refusal=self._model.refusal,
                failed=None if given_up else failure_elsewhere,
                cut=is_cut(self._recorded, self.records),
            )
        finally:
            ending: list[asyncio.Future[Any]] = [program, *watching]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def _delayed_call(self, result: CommandResult) -> ModelError | None:
        """Return why a runner kept the call waiting that the program gave up; None if none did, or it is not why the
        program ended.
        """
        delayed = delayed_calls(self.records)
        turns = self._gave_up(result, delayed)
        unread = None if self._session_here is None or result.ok else self._session_here.unread
        return delayed[turns[-1]] if turns else unread

    def _gave_up(self, result: CommandResult, turns: Container[int]) -> list[int]:
        """Return which of these unanswered turns may be why the program ended: a success can only be due to the latest
        call.
        """
        return [turn for turn in given_up(turns, calls_in(self.records)) if not result.ok or turn == self.turn]

    async def _work(self, access: WorkspaceModel) -> CommandResult:
        """Run the program to its end. A repeated request with the same key and body finds the running one."""
        root, search_path = await self._look_around()
        filled = self._program.filled(
            {
                "prompt": self._task.prompt,
                "promptFile": root + _PROMPT_PATH,
                "model": access.name,
                "url": access.url,
                "home": root + HOME,
            }
        )
        refuse_long_arguments(filled.command)
        if self._program.needs_prompt_file:
            await self._workspace.write(_PROMPT_PATH, self._task.prompt.encode(errors="replace"), key="0:prompt")
        for number, (path, content) in enumerate(filled.files.items()):
            await self._workspace.write(path, content.encode(errors="replace"), key=f"0:agent-file-{number}")
        env = {**access.environment(), **filled.env}
        if (own := self._program.search_path) is not None:
            env["PATH"] = f"{root}{own}:{search_path}"
        self.exposed = True
        with without_silence(self._workspace, self._clock.silences()):
            return await self._workspace.run(
                filled.command,
                key=PROGRAM_KEY,
                deadline_seconds=_NO_DEADLINE,
                env=env,
                stdin=filled.stdin.encode(errors="replace"),
                pausing=self._clock.pauses(),
            )

    async def _look_around(self) -> tuple[str, str]:
        """Return the prefix of absolute paths as programs in the workspace see them, which is not empty in `Plain` below
        a folder, and the programs' PATH.
        """
        if not self._program.needs_place:
            return "", ""
        found = await self._workspace.run(
            'pwd -P && printf %s "$PATH"', key="0:root", deadline_seconds=self._task.timeouts.command_seconds
        )
        here, _, search_path = found.stdout.decode(errors="surrogateescape").partition("\n")
        known_as = self._workspace.working_dir
        return (here.removesuffix(known_as) if here.endswith(known_as) else ""), search_path

    async def _run_out_of_time(self) -> None:
        seconds, now = self._clock.seconds, self._clock.now
        # Time may have been credited during the wait, so check again.
        while (left := seconds - self._clock.used()) > 0 and self._model.failing_seconds(now()) < seconds:  # noqa: ASYNC110
            await asyncio.sleep(min(max(left, _TICK_SECONDS), TICK_SECONDS))
        self._was_asked = self._model.is_asked
        self._fail(OutOfTime(f"timeouts.agentSeconds {seconds} ran out"))

    async def _probe(self, error: ModelError | ConversationRefused) -> None:
        await probe(error, self._current_model(), self._assignment, self._session)

    async def _over_budget(self, over: Exhausted) -> None:
        self._fail(self._at_limit(over))

    def _at_limit(self, over: Exhausted) -> Exception:
        """Return the error that ends a program at a limit."""
        if over.reason is StopReason.RESOURCE_LIMIT and self._model.failure is not None:
            return self._model.failure  # it exceeded the limit with retries, because no call was answered
        return Stop(over.reason, over.message)

    async def _stop_for_drain(self, session: Session) -> None:
        """After a drain request: wait until running calls are answered, then wait to be cancelled."""
        await self._drain.wait()
        while session.calls > self._model.parked:  # noqa: ASYNC110 this happens once per runner
            await asyncio.sleep(_TICK_SECONDS)
        await self._drain.park()

    def _answered(self, response: ResponseRecord) -> None:
        self.policy_lag.see(response.policy_spans)
        self._observer(TurnEnded(self._rollout.index, response.turn, response.seconds, response.usage, replayed=False))
        try:
            self.policy_lag.refuse_if_stale()
        except StalePolicy as stale:
            self._fail(stale)

    def _fail(self, error: Exception) -> None:
        if not self._forced_end.done():
            self._forced_end.set_exception(error)


FILE_BYTES = 32 << 20
"""Limit of the file's size: some hundred turns with full server responses. It is parsed in memory."""

Store = Callable[[bytes, bytes | None], Awaitable[tuple[ObjectDigest, ObjectDigest | None]]]


async def collect(workspace: Workspace, wanted: AgentTrajectory, session: str, store: Store) -> ProgramTrajectory:
    """Store the trajectory file that a program wrote, and its conversion. Problems with it only produce a note.

    Raises SandboxFailure, Fenced, StorageError.
    """
    path = wanted.path
    try:
        if "*" in path:
            if (matching := await _newest_match(workspace, path)) is None:
                return ProgramTrajectory(note=f"{path}: the program wrote no such file")
            path = matching
        found = await workspace.stat(path)
        if found is None:
            return ProgramTrajectory(note=f"{path}: the program did not write this file")
        if found.type != "file":
            return ProgramTrajectory(note=f"{path}: expected a file, found a {found.type}")
        if found.size > FILE_BYTES:
            return ProgramTrajectory(
                bytes=found.size, note=f"{path}: {found.size} bytes, but at most {FILE_BYTES} are kept"
            )
        data = await workspace.read(path, limit=FILE_BYTES)
    except FileError as error:
        return ProgramTrajectory(note=f"{path}: {error.message}")
    except WorkspaceLimit as limit:
        return ProgramTrajectory(note=f"{path}: the workspace was ended ({limit.cause})")
    try:
        form, atif = await asyncio.to_thread(to_atif, data, wanted.format, session)
    except UnreadableTrajectory as unreadable:
        file, _ = await store(data, None)
        return ProgramTrajectory(file=file, bytes=len(data), note=f"{path}: {unreadable}")
    file, converted = await store(data, atif)
    return ProgramTrajectory(file=file, bytes=len(data), format=form.value, atif=converted)


_MOST_MATCHES = 256
"""Most paths that a part of a pattern yields, newest first. A policy can create any number."""


async def _newest_match(workspace: Workspace, pattern: str) -> str | None:
    """Return the file that matches a pattern; of several, the one changed last, which a program's sub-agents have ended
    before.
    """
    parts = pattern.split("/")
    places = [""] if pattern.startswith("/") else ["."]
    for number, part in enumerate(parts):
        if "*" not in part:
            places = [f"{place}/{part}" if part else place for place in places]
            continue
        kind = "file" if number == len(parts) - 1 else "folder"
        found: list[tuple[float, str]] = []
        for place in places:
            try:
                entries = await workspace.list(place or "/")
            except FileError:
                continue  # another program's folder, or a file
            matching = (
                (entry.modified, f"{place}/{entry.name}")
                for entry in entries
                if entry.type == kind and fnmatch.fnmatchcase(entry.name, part)
            )
            found = heapq.nlargest(_MOST_MATCHES, (*found, *matching))
        places = [path for _, path in found]
    return next(iter(places), None)
