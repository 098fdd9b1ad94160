"""Grading an attempt: in a new workspace into which only its artifacts go, or, forgeable, in the agent's own."""

import posixpath
import time
from collections.abc import AsyncIterator, Callable

from agent_runtime.recording.journal import ArtifactsTooLarge, Journal
from agent_runtime.sandboxes.base import (
    Fence,
    FileError,
    SandboxFailure,
    SandboxProvider,
    Workspace,
    WorkspaceLimit,
    WorkspaceSpec,
)
from agent_runtime.verification.artifacts import carry_rule, dropped_names, listing
from agent_runtime.verification.deletions import deleted_paths
from agent_runtime.verification.grade import CommandWatch, VerifierUnavailable, grade
from agent_runtime.verification.tar_filter import BrokenTar, Dropped, Member, filter_tar
from rollout_api.base import quantity_value
from rollout_api.records import ArtifactsRecord, StopReason, StopRecord, Verdict
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import Task, VerifierMode

GRADING_TURN = 1_000_000
"""Turn of the idempotency keys of a grading: above every turn of an agent, so that no watermark forgets them."""
SHOWN_OUTPUT = 2_000
"""Characters of a failed collecting command's output: its end is where the error is."""
TURNS_PER_EPOCH = 1_000
"""Each epoch, and each try in it, grades under keys of its own: a grading is done again, never continued."""


class GradingLost(Exception):
    """The rollout could not be graded: VerifierFailed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


def failed_verdict(message: str) -> Verdict:
    """A verdict of 0 for what the policy did to its own workspace, or what its code did to the verifier's."""
    return Verdict(reward=0.0, passed=False, message=message)


async def collect(task: Task, workspace: Workspace, turn: int) -> str | None:
    """Run `verifier.collect` in the agent's workspace, its processes ended. Why it failed, or None.

    A failure is the policy's doing: the same commands ran well in the state that it was given. What they did not leave is
    not there to be graded. Raises WorkspaceLimit and SandboxFailure from the workspace.
    """
    for number, command in enumerate(task.verifier.collect if task.verifier else ()):
        seconds = task.timeouts.verifier_seconds
        result = await workspace.run(command, key=f"{turn}:collect-{number}", deadline_seconds=seconds)
        if not result.ok:
            output = (result.stdout + result.stderr).decode(errors="replace").strip()[-SHOWN_OUTPUT:]
            return f"verifier.collect[{number}] failed with {result.cause or result.exit_code}: {output}"
    return None


async def store_artifacts(
    task: Task, verifier: Verifier, workspace: Workspace, journal: Journal, stop: StopRecord, *, key_turn: int
) -> tuple[StopRecord, ArtifactsRecord]:
    """Store what grading needs, the agent's processes ended. Where the policy made that impossible, the stop says so."""
    nothing = ArtifactsRecord(time=time.time())
    if task.verifier is None or verifier.mode is VerifierMode.SHARED:
        return stop, nothing
    try:
        await workspace.kill_all(key=f"{key_turn}:end-agent")
        if failed := await collect(task, workspace, key_turn):
            stop = stop.model_copy(update={"message": "; ".join(filter(None, (stop.message, failed)))})
        stored = await journal.store_artifacts(
            workspace.tar(task.verifier.artifacts_folder or "."), limit=int(quantity_value(verifier.artifacts_limit))
        )
    except (ArtifactsTooLarge, WorkspaceLimit) as error:
        message = stop.message if stop.stop_reason is StopReason.RESOURCE_LIMIT else str(error)
        return stop.model_copy(update={"stop_reason": StopReason.RESOURCE_LIMIT, "message": message}), nothing
    except FileError as error:
        gone = f"the working directory cannot be packed: {error.message}"
        return stop.model_copy(update={"message": stop.message or gone}), nothing
    return stop, stored


async def grade_artifacts(
    task: Task,
    verifier: Verifier,
    provider: SandboxProvider,
    spec: WorkspaceSpec,
    *,
    attempt: str,
    fence: Fence,
    artifacts: Callable[[], AsyncIterator[bytes]],
    tries: int,
    watch: CommandWatch | None = None,
) -> Verdict:
    """`Separate`: a new workspace in the task's prepared state, with the artifacts in it. Done again when it is lost.

    Raises GradingLost when the tries are used up, or the verifier cannot start at all.
    """
    reason, message = "NoTries", "attempts.limit leaves no try"
    for number in range(tries):
        workspace: Workspace | None = None
        turn = GRADING_TURN + fence.epoch * TURNS_PER_EPOCH + number
        try:
            workspace = await provider.acquire(
                spec, attempt=attempt, fence=fence, name=f"grading-{fence.epoch}-{number}"
            )
            dropped = await _carry_over(task, verifier, workspace, artifacts, turn)
            if spec.network["verifier"] != "None":
                await workspace.enter("verifier", key=f"{turn}:enter")
            return await grade(task, verifier, workspace, key_turn=turn, dropped=dropped, watch=watch)
        except (WorkspaceLimit, FileError, BrokenTar) as error:
            # The agent made what cannot be unpacked: too large, or names that lead out of the folder.
            return failed_verdict(f"the artifacts cannot be brought into the grading workspace: {error}")
        except SandboxFailure as error:
            reason, message = error.reason, error.message
        except VerifierUnavailable as error:
            reason, message = "VerifierUnavailable", str(error)
        finally:
            if workspace is not None:
                await workspace.release()
    raise GradingLost(reason, message)


async def grade_in_place(
    task: Task,
    verifier: Verifier,
    workspace: Workspace,
    *,
    epoch: int,
    step: int = 0,
    watch: CommandWatch | None = None,
) -> Verdict:
    """`Shared`: in the agent's own workspace, its processes ended first. The agent may own the interpreter: forgeable."""
    turn = GRADING_TURN + epoch * TURNS_PER_EPOCH + step
    try:
        await workspace.kill_all(key=f"{turn}:end-agent")
        await workspace.enter("verifier", key=f"{turn}:enter")
        return await grade(task, verifier, workspace, key_turn=turn, watch=watch)
    except WorkspaceLimit as error:
        return failed_verdict(str(error)).model_copy(update={"forgeable": True})
    except VerifierUnavailable as error:
        raise GradingLost("VerifierUnavailable", str(error)) from error


async def _carry_over(
    task: Task, verifier: Verifier, workspace: Workspace, artifacts: Callable[[], AsyncIterator[bytes]], turn: int
) -> list[str]:
    """Bring the artifacts into the prepared state: what is declared and may be carried, and its deletions too.

    Returns what was left out and why, for the verdict.
    """
    hidden = task.verifier.files if task.verifier else []
    folder = task.verifier.artifacts_folder if task.verifier else None
    root, declared = (".", verifier.artifacts) if folder is None else (folder, ["."])
    is_there = folder is None or await workspace.stat(folder) is not None
    prepared = await listing(workspace.tar(root)) if is_there else {}
    rule = carry_rule(prepared, declared, hidden, posixpath.normpath(posixpath.join(workspace.working_dir, root)))
    seen: set[str] = set()
    dropped: list[Dropped] = []

    def drop(member: Member) -> str | None:
        seen.add(member.name)
        return rule(member)

    await workspace.untar(root, filter_tar(artifacts(), drop, dropped.append), key=f"{turn}:artifacts")
    for number, name in enumerate(deleted_paths(prepared, seen, rule)):
        await workspace.remove(posixpath.normpath(posixpath.join(root, name)), key=f"{turn}:deleted-{number}")
    return dropped_names(dropped, prepared)
