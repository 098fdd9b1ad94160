"""Run a task's verifier in a workspace that contains the artifacts, and return the verdict."""

import asyncio
import contextlib
import posixpath
import shlex
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Protocol

from agent_runtime.extensions import last_raised
from agent_runtime.grading import reward_file
from agent_runtime.grading.artifacts import artifact_paths, is_below, runs_pytest, verifier_folder
from agent_runtime.grading.junit import (
    REPORT_BYTES,
    ReportedTest,
    ReportError,
    counted,
    has_tests,
    judge_all,
    judge_named,
    parse_report,
)
from agent_runtime.grading.programs import PROBE_SECONDS, missing_program
from agent_runtime.sandboxes.base import (
    WORKSPACE_USER,
    Ancestors,
    CommandResult,
    DiskFailed,
    FileError,
    SandboxFailure,
    Workspace,
    WorkspaceLimit,
)
from agent_runtime.statistics import mean
from rollout_api.files import TaskFile
from rollout_api.records import CommandVerdict, TestVerdict, Verdict
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import ISOLATED_FOLDER, RewardRule, Task, TaskVerifier, VerifierKind, VerifierMode

OUTPUT_BYTES = 8192
"""Bytes that a verdict keeps of the beginning, and of the end, of a command's standard output and error output."""

REPORT_FOLDER = ".rollout-verifier"
"""Folder of pytest's reports, in the working directory: in every sandbox, the verifier can write there, and the path is
the same for commands and file calls. An existing one is removed first, and pytest does not collect tests from dotted
folders.
"""

_CLOSE = """\
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
for above in / /logs; do
  [ ! -e "$above" ] || { chown 0 "$above"; chmod go-w "$above"; }
done
chmod -R go-rwx"""
"""Shell commands for root, to be followed by folders: only root may replace them, enter them, or stay in one of their
subfolders. Modes also bound what a default ACL of the image gives to others.
"""


class CommandWatch(Protocol):
    """Observes the verifier's commands."""

    async def before_verifier_command(self, number: int, command: str) -> None:
        """Called before that command, numbered from 0. Must not raise."""

    async def after_verifier_command(self, number: int, result: CommandVerdict) -> None:
        """Called after the command has ended. Must not raise."""


class VerifierUnavailable(Exception):
    """The verifier could not start or give a verdict, for a reason that the policy cannot cause. The grading may be
    retried.
    """


UNREACHABLE = "Unreachable"
"""Reason of the SandboxFailure for a verifier that could not connect to a destination that the job lists for it."""
REACHED_AGAIN = "ReachedAgain"
"""The same, but it can be reached after the grading."""
STOOD_STILL = "StoodStill"
"""Reason of the SandboxFailure for a verifier that failed after its sandbox stood still."""


async def grade(
    task: Task,
    verifier: Verifier,
    workspace: Workspace,
    *,
    key_turn: int,
    is_apart: bool = False,
    is_repeated: bool = True,
    dropped: Sequence[str] = (),
    watch: CommandWatch | None = None,
) -> Verdict:
    """Grade the contents of a workspace; `key_turn` is the turn of all idempotency keys, `dropped` goes into the
    verdict.

    `is_apart` is the result of `require_startable`. `is_repeated`: neither a sandbox that stood still, nor a connection that
    failed, to a destination that can be reached afterwards, is a reason to grade again. (The code under test may cause the
    latter by too many connections.)

    The caller must have switched the workspace to its verifier phase and, in `Shared`, ended the agent's processes.
    After a crash, a call with the same turn makes the same requests. Raises VerifierUnavailable, ValueError for a task
    without verifier, and SandboxFailure and Fenced from the workspace. Any other problem is a failed verdict.
    """
    if task.verifier is None:
        raise ValueError(f"task {task.name} has no verifier, so it cannot be graded")
    is_closed = is_apart and task.verifier.isolated and verifier.mode is not VerifierMode.SHARED
    grading = _Grading(task, task.verifier, verifier, workspace, key_turn, watch, is_closed=is_closed)
    # Verifiers and tests have time limits of their own, which would expire in a pause.
    await workspace.set_steady(True)
    try:
        verdict = await grading.run()
        if not verdict.passed:
            if not is_repeated:
                await grading.require_no_standstill()
            await grading.require_reached(is_repeated=is_repeated)
    except WorkspaceLimit as limit:
        verdict = grading.failed(f"the grading was ended: {limit.message}")
    mode = verifier.mode or VerifierMode.SEPARATE
    return verdict.model_copy(update={"dropped": list(dropped), "mode": mode, "forgeable": grading.is_forgeable})


async def require_startable(task: Task, workspace: Workspace, *, key_turn: int) -> bool:
    """Raise VerifierUnavailable if the verifier cannot start in the prepared state, without the agent's files.

    Afterwards, a program that is missing or does not start counts against the agent: a failed verdict. Returns whether
    the verifier's user is root, and the workspace's user is not. False in `Plain`.
    """
    if (spec := task.verifier) is None:
        return False
    env = {variable.name: variable.value for variable in spec.env}
    folder = verifier_folder(task, workspace.working_dir)
    brought = {posixpath.normpath(posixpath.join(folder, file.path)) for file in spec.files}
    key = f"{key_turn}:verifier-probe"
    missing = await missing_program(workspace, spec.commands, key=key, user=spec.user, env=env, brought=brought)
    if missing is not None:
        raise VerifierUnavailable(
            f"task {task.name}: the verifier's first command needs {missing}, which the sandbox lacks; add it to "
            "the image "
            "or to the task's setup"
        )
    # In Plain, paths are not isolated: on a laptop, root would become the owner of this machine's folders.
    if not spec.isolated or spec.user is None or workspace.description.get("mode") == "Plain":
        return False
    own = await workspace.run("id -u", key=f"{key}-own-id", deadline_seconds=PROBE_SECONDS)
    # A link in place of /logs may lead into a folder of the workspace's user.
    verifiers = await workspace.run(
        "[ -L /logs ] || id -u", key=f"{key}-id", deadline_seconds=PROBE_SECONDS, user=spec.user
    )
    uid = int(own.stdout) if own.ok and own.stdout.strip().isdigit() else 0
    return uid != 0 and verifiers.ok and verifiers.stdout.strip() == b"0"


async def require_preparable(
    task: Task, verifier: Verifier, workspace: Workspace, *, key_turn: int, is_apart: bool = False
) -> None:
    """Raise VerifierUnavailable if the verifier's folders and its files outside the artifacts cannot be made in the prepared
    state. If only `grade` fails to do that later, the agent's artifacts are the cause.
    """
    if task.verifier is not None:
        is_closed = is_apart and task.verifier.isolated
        grading = _Grading(task, task.verifier, verifier, workspace, key_turn, is_closed=is_closed)
        grading.is_prepared_state = True
        await grading.prepare()


def _places(task: Task, workspace: Workspace) -> list[str]:
    """Return the working directory, and the folders and files of the artifacts."""
    folder, paths = artifact_paths(task, workspace.working_dir)
    carried = (posixpath.normpath(posixpath.join(folder, path)) for path in paths)
    return list(dict.fromkeys([posixpath.normpath(workspace.working_dir), *carried]))


class _Failed(Exception):
    """The verdict is a failure, for this reason."""


class _Grading:
    """One grading in progress."""

    def __init__(
        self,
        task: Task,
        spec: TaskVerifier,
        rules: Verifier,
        workspace: Workspace,
        turn: int,
        watch: CommandWatch | None = None,
        *,
        is_closed: bool = False,
    ) -> None:
        self.task, self.spec, self.rules, self.workspace, self.turn = task, spec, rules, workspace, turn
        self.watch = watch
        self.is_closed = is_closed
        """Whether only root may enter the verifier's folders."""
        self.folder = verifier_folder(task, workspace.working_dir)
        """Folder in which the commands run."""
        self.places = [self.folder] if spec.isolated else _places(task, workspace)
        self.hidden = {self.path(file.path): file for file in spec.files}
        """The hidden files, by absolute path."""
        self.owner = spec.user or WORKSPACE_USER
        """Owner of all files that are added for the verifier or removed before it. The verifier's commands read these
        files, and write into the same folders.
        """
        self.commands: list[CommandVerdict] = []
        self.is_prepared_state = False
        """Whether the workspace has no files of the agent yet."""

    @property
    def is_forgeable(self) -> bool:
        # Whether a verifier loads or runs the agent's files cannot be detected, so the task's author states it.
        # The statement is about the verifier's user. Services may run the agent's files as other users, who share volumes
        # with the verifier, and the code under test may change or replace the server that a verifier asks.
        return not self.is_closed or bool(self.task.services)

    @property
    def has_reward_folder(self) -> bool:
        return self.is_closed or self.spec.kind is VerifierKind.REWARD_FILE

    def key(self, name: str) -> str:
        return f"{self.turn}:verifier-{'first-' if self.is_prepared_state else ''}{name}"

    def path(self, relative: str) -> str:
        """Return a path as an absolute one."""
        return posixpath.normpath(posixpath.join(self.folder, relative))

    def reaches(self, place: str) -> bool:
        """Whether a place of the agent's files contains the verifier's folder, or is in it."""
        return place == self.folder or is_below(place, self.folder) or is_below(self.folder, place)

    def failed(self, message: str) -> Verdict:
        return Verdict(reward=self.rules.failed_reward, passed=False, commands=self.commands, message=message)

    async def run(self) -> Verdict:
        try:
            await self.prepare()
            await self.run_commands()
            await self.require_available()
            verdict = await self.judge()
        except (_Failed, ReportError, reward_file.RewardFileError) as failure:
            verdict = self.failed(str(failure))
        raised = None if verdict.passed else next(filter(None, map(self.raised, self.commands)), None)
        if raised is None:
            return verdict
        return verdict.model_copy(update={"message": "; ".join(filter(None, (raised, verdict.message)))})

    async def require_available(self) -> None:
        """Raise VerifierUnavailable if the verifier wrote that it cannot give a verdict."""
        path = reward_file.UNAVAILABLE_PATH
        if not self.has_reward_folder or (written := await self.read(path, OUTPUT_BYTES)) is None:
            return
        message = f"the verifier wrote {path}: {written.decode(errors='replace').strip() or 'without a reason'}"
        if self.is_forgeable:
            raise _Failed(f"{message}; this does not count, because the policy may have written it (forgeable)")
        raise VerifierUnavailable(f"task {self.task.name}: {message}")

    async def require_no_standstill(self) -> None:
        """Raise SandboxFailure if the sandbox has stood still, because time limits of the verifier may have expired then."""
        if seconds := await self.workspace.stood_still():
            raise SandboxFailure(STOOD_STILL, f"the verifier failed after its sandbox stood still for {seconds:.0f} s")

    async def require_reached(self, *, is_repeated: bool) -> None:
        """Raise SandboxFailure if a destination that the job lists for the verifier is away, or if `is_repeated` is not set,
        was away.
        """
        if not (failed := await self.workspace.failed_connections()):
            return
        # Processes that the grading left running could occupy the destination.
        await self.workspace.kill_all(key=self.key("end"))
        away = await self.workspace.failed_connections()
        if any(away.values()) or not is_repeated:
            why = [away.get(place) or f"{place}: reached again after the grading" for place in failed]
            message = "the verifier failed after it could not connect to a destination that the job lists"
            raise SandboxFailure(UNREACHABLE if any(away.values()) else REACHED_AGAIN, f"{message}: {'; '.join(why)}")

    def raised(self, command: CommandVerdict) -> str | None:
        """Return the exception that a hidden file raised, with its line. Return None if there is none; a failed assertion
        is a verdict and does not count.
        """
        if not command.exit_code or (found := last_raised(command.output)) is None:
            return None
        (path, _, line), error = found[0].rpartition(":"), found[1]
        file = next((file.path for file in self.spec.files if f"/{path}".endswith(f"/{file.path.lstrip('/')}")), None)
        return None if file is None or error.startswith("AssertionError") else f"{file}:{line}: {error}"

    async def prepare(self) -> None:
        """Write the hidden files, and remove existing reports and reward files."""
        if self.spec.isolated:
            shared = next(filter(self.reaches, _places(self.task, self.workspace)), None)
            if shared is not None:
                raise VerifierUnavailable(
                    f"task {self.task.name}: {shared} has files of the agent, and {self.folder} is the folder of an "
                    "isolated verifier; neither can be in the other: choose another sandbox.workingDir or artifact"
                )
            await self.remove(self.folder, "folder")
            await self.make_folder(self.folder, "folder")
        await self.put_files()
        if self.spec.kind is VerifierKind.PYTEST:
            await self.remove(REPORT_FOLDER, "reports")
            if self.spec.user is not None:
                # That user may lack the right to make it in the workspace's folder.
                await self.make_folder(self.path(REPORT_FOLDER), "report-folder")
        elif self.spec.report is not None:
            await self.remove(self.spec.report, "report")
        if self.has_reward_folder:
            await self.remove(reward_file.FOLDER, "rewards")
            await self.make_folder(reward_file.FOLDER, "reward-folder")
        if self.is_closed:
            await self.close()
        if self.spec.isolated and self.is_prepared_state:
            await self.require_enterable()

    async def require_enterable(self) -> None:
        """Raise VerifierUnavailable if commands cannot run in the verifier's folder, as in `Plain` on a laptop."""
        entered = await self.workspace.run(
            f"cd {self.folder}", key=self.key("enter"), deadline_seconds=PROBE_SECONDS, user=self.spec.user
        )
        if entered.exit_code is not None and not entered.ok:
            output = entered.stderr.decode(errors="replace").strip()
            raise VerifierUnavailable(
                f"task {self.task.name}: commands cannot enter {self.folder}, the folder of an isolated verifier "
                f"({output}); it needs Overlay, a container or a pod"
            )

    async def close(self) -> None:
        """Let only root enter the verifier's folders."""
        folders = [self.folder, reward_file.FOLDER]
        result = await self.workspace.run(
            f"{_CLOSE} {shlex.join(folders)}",
            key=self.key("close"),
            deadline_seconds=PROBE_SECONDS,
            user=self.spec.user,
        )
        what = "the verifier's folders cannot be closed to other users"
        self.require_started(result, what)
        if not result.ok:
            why = result.cause or result.stderr.decode(errors="replace").strip()[-OUTPUT_BYTES:]
            if self.is_prepared_state:
                raise VerifierUnavailable(f"task {self.task.name}: {what}: {why}")
            raise SandboxFailure("ExecutorFailed", f"{what}: {why}")

    def require_started(self, result: CommandResult, what: str) -> None:
        """Raise for a command that did not start. `what` describes the consequence for the grading."""
        if result.start_error:
            message = f"{what}: {result.start_error}"
            if self.rules.mode is VerifierMode.SHARED:
                raise _Failed(message)
            # The artifacts may prevent its start, or the machine has reached its limit of processes.
            raise SandboxFailure("ExecutorFailed", message)

    @contextlib.contextmanager
    def needed(self, what: str) -> Iterator[None]:
        """Raise for a FileError; `what` describes the consequence for the grading.

        In the agent's own workspace, the policy can cause any failure; in a new one, only failures after its artifacts
        were copied.
        """
        try:
            yield
        except FileError as error:
            is_infrastructure = self.is_prepared_state or isinstance(error, DiskFailed)
            is_policys = self.rules.mode is VerifierMode.SHARED or not is_infrastructure
            raise (_Failed if is_policys else VerifierUnavailable)(f"{what}: {error}") from error

    async def put_files(self) -> None:
        """Write all hidden files over existing ones, with one call for each folder."""
        left = self.hidden
        for number, place in enumerate((*self.places, "/")):
            files = {path: file for path, file in left.items() if is_below(path, place)}
            left = {path: file for path, file in left.items() if path not in files}
            ancestors: Ancestors = "follow" if place == "/" else "replace"
            where = f"outside of {self.folder}" if place == "/" else f"in {place}"
            with self.needed(f"the hidden files {where} cannot be written"):
                if files and (place == "/" or not self.is_prepared_state):
                    key = self.key(f"files-{number}")
                    await self.workspace.untar(
                        place, _tar(place, files), key=key, ancestors=ancestors, owner=self.owner
                    )

    async def remove(self, path: str, name: str) -> None:
        with self.needed(f"{path} cannot be removed before grading"):
            await self.workspace.remove(self.path(path), key=self.key(f"wipe-{name}"), owner=self.owner)

    async def make_folder(self, path: str, name: str) -> None:
        """Create a folder by writing a file with its parents and removing the file."""
        with self.needed(f"{path} cannot be made"):
            await self.workspace.write(f"{path}/.rollout", b"", key=self.key(f"make-{name}"), owner=self.owner)
            await self.workspace.remove(f"{path}/.rollout", key=self.key(f"made-{name}"), owner=self.owner)

    async def run_commands(self) -> None:
        """Run all commands within the task's `verifierSeconds`; commands that exceed it fail."""
        # Add up the recorded durations instead of using a clock, so that the next runner makes the same requests.
        left = float(self.task.timeouts.verifier_seconds)
        for number, command in enumerate(self.spec.commands):
            if left <= 0:
                output = "not run: the time of verifierSeconds was used up"
                self.commands.append(
                    CommandVerdict(command=command, exit_code=None, seconds=0, output=output, cause="Deadline")
                )
                continue
            if self.watch is not None:
                await self.watch.before_verifier_command(number, command)
            result = await self.workspace.run(
                self.wrapped(command, number),
                key=self.key(f"command-{number}"),
                deadline_seconds=left,
                env={variable.name: variable.value for variable in self.spec.env},
                user=self.spec.user,
                # The code under test runs as another user, and must not become root by `sudo` or `su`.
                bounded=self.is_closed,
                head_bytes=OUTPUT_BYTES,
                tail_bytes=OUTPUT_BYTES,
            )
            self.require_started(result, f"command {number + 1} could not be started")
            left -= result.seconds
            self.commands.append(_command_verdict(command, result))
            if self.watch is not None:
                await self.watch.after_verifier_command(number, self.commands[-1])

    def wrapped(self, command: str, number: int) -> str:
        """Return the command in the verifier's folder. For pytest, options are added to PYTEST_ADDOPTS."""
        lines = [f"cd {ISOLATED_FOLDER} || exit"] if self.spec.isolated else []
        if self.spec.kind is VerifierKind.PYTEST:
            options = f"'--junitxml=$PWD/{_report_path(number)}' -o junit_family=xunit1 -o junit_logging=no"
            lines.append(f'export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS-}} {options}"')
        return "\n".join([*lines, command])

    async def judge(self) -> Verdict:
        match self.spec.kind:
            case VerifierKind.COMMANDS:
                return self.scored([_passed(command) for command in self.commands], [])
            case VerifierKind.PYTEST:
                reports = [
                    await self.read_report(_report_path(number), is_needed=self.must_report(command.command))
                    for number, command in enumerate(self.commands)
                ]
                return await asyncio.to_thread(self.judged_tests, reports)
            case VerifierKind.JUNIT:
                return await asyncio.to_thread(self.judged_tests, [await self.read_report(self.spec.report or "")])
            case VerifierKind.REWARD_FILE:
                return await self.judge_reward_file()

    def judged_tests(self, reports: Sequence[list[ReportedTest] | ReportError]) -> Verdict:
        read = [test for report in reports if not isinstance(report, ReportError) for test in report]
        reported = counted(read, self.spec.also_passed)
        broken = [str(report) for report in reports if isinstance(report, ReportError)]
        if self.spec.tests:
            # Only the named tests count. Other tests of the same run may fail, which also changes its exit code.
            tests = judge_named(reported, self.spec.tests)
        else:
            tests = judge_all(reported, self.spec.files)
            tests += [TestVerdict(name="report", passed=False, message=message) for message in broken]
            if not any(not test.passed for test in tests):
                tests += [
                    TestVerdict(name=f"command {number + 1}", passed=False, message="ended with an error")
                    for number, command in enumerate(self.commands)
                    if not _passed(command)
                ]
        verdict = self.scored([test.passed for test in tests], tests)
        return verdict.model_copy(update={"message": "; ".join(broken)}) if broken else verdict

    def scored(self, passed: Sequence[bool], tests: list[TestVerdict]) -> Verdict:
        everything = bool(passed) and all(passed)
        reward = (mean(passed) or 0.0) if self.rules.reward is RewardRule.FRACTION else float(everything)
        message = "" if passed else "no test was reported"
        return Verdict(reward=reward, passed=everything, commands=self.commands, tests=tests, message=message)

    def must_report(self, command: str) -> bool:
        """Whether a command without a report has failed. An installation or a linter writes none. If such a command is a
        script that runs pytest, the tests that hidden files define are missing.
        """
        return runs_pytest(command) or not has_tests(self.spec.files)

    async def read_report(self, path: str, *, is_needed: bool = True) -> list[ReportedTest] | ReportError:
        try:
            data = await self.read(path, REPORT_BYTES)
            if data is None:
                if not is_needed:
                    return []
                return ReportError(f"no report was written to {path}: no test was run, or the run was ended early")
            # Parse in a thread: all rollouts share the event loop, and the policy controls the size of the report.
            return await asyncio.to_thread(parse_report, data)
        except ReportError as error:
            return error

    async def judge_reward_file(self) -> Verdict:
        for number, command in enumerate(self.commands):
            if command.exit_code is None:
                raise _Failed(
                    f"command {number + 1} was ended ({command.cause or 'by a signal'}); its reward does not count"
                )
        most = reward_file.REWARD_FILE_BYTES
        reward, rewards = reward_file.parse_reward(
            await self.read(reward_file.JSON_PATH, most), await self.read(reward_file.TEXT_PATH, most)
        )
        passed = reward >= reward_file.HIGHEST
        if self.rules.reward is RewardRule.ALL_OR_NOTHING:
            reward = float(passed)
        return Verdict(reward=reward, rewards=rewards, passed=passed, commands=self.commands)

    async def read(self, path: str, limit: int) -> bytes | None:
        """Return a file's content; None if it does not exist. Any other entry at its path is a failed verdict.

        The verifier's user may have written it so that no other user can read it.
        """
        path = self.path(path)
        try:
            found = await self.workspace.stat(path, owner=self.spec.user)
            if found is None:
                return None
            if found.type != "file" or found.size > limit:
                raise _Failed(f"{path} is not a file of at most {limit} bytes")
            return await self.workspace.read(path, limit=limit, owner=self.spec.user)
        except FileError as error:
            raise _Failed(f"{path} cannot be read: {error}") from error


async def _tar(folder: str, files: Mapping[str, TaskFile]) -> AsyncIterator[bytes]:
    """Return files by absolute path as a tar below a folder."""
    for path, file in files.items():
        member, data = tarfile.TarInfo(posixpath.relpath(path, folder)), file.data()
        member.size, member.mode = len(data), int(file.mode, 8)
        yield member.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _report_path(number: int) -> str:
    return f"{REPORT_FOLDER}/{number}.xml"


def _passed(command: CommandVerdict) -> bool:
    return command.exit_code == 0 and command.cause is None


def _command_verdict(command: str, result: CommandResult) -> CommandVerdict:
    cause = result.cause or (f"Signal {result.signal}" if result.signal is not None else None)
    printed = _text(result.stdout, result.stdout_omitted, result.stdout_head)
    errors = _text(result.stderr, result.stderr_omitted, result.stderr_head)
    output = "\n".join(filter(None, (printed, errors)))
    return CommandVerdict(
        command=command, exit_code=result.exit_code, seconds=result.seconds, output=output, cause=cause
    )


def _text(data: bytes, omitted: int, head: int) -> str:
    if not omitted:
        return data.decode(errors="replace")
    first, last = data[:head].decode(errors="replace"), data[head:].decode(errors="replace")
    return f"{first}\n[… {omitted} bytes left out …]\n{last}"
