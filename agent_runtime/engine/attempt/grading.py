"""Grading an attempt: in a new workspace into which only its artifacts go, or, forgeable, in the agent's own."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from agent_runtime.engine.attempt.attribution import Action, Phase, Situation, attribute
from agent_runtime.grading.artifacts import artifact_paths, carry_rules
from agent_runtime.grading.grade import CommandWatch, grade, require_preparable, require_startable
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.store import SpoolFull
from agent_runtime.sandboxes.base import INTERRUPTED, Fence, SandboxFailure, SandboxProvider, Workspace, WorkspaceSpec
from rollout_api.base import quantity_value
from rollout_api.records import ArtifactsRecord, StopRecord, Verdict
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import Task, VerifierMode

GRADING_TURN = 1_000_000
"""Turn of the idempotency keys of a grading: above every turn of an agent, so that no watermark forgets them."""
TURNS_PER_EPOCH = 1_000
"""Each epoch, and each try in it, grades under keys of its own: a grading is done again, never continued."""

ROOM_SECONDS = 600.0
"""Longest wait for room on the runner's disk, which other rollouts' artifacts leave as they are stored. How much there is of
them is the policy's choice, which must not cost it an attempt."""
ROOM_PAUSE_SECONDS = 5.0
"""Mean pause before another try. Those who wait begin at different times, so that one of them gets all its room."""


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
            return f"verifier.collect[{number}] failed with {result.cause or result.exit_code}: {result.end_of_output}"
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
        folder, paths = artifact_paths(task, workspace.working_dir)
        stored = await _store_when_there_is_room(
            journal,
            lambda: workspace.tar(folder, parts=paths),
            int(quantity_value(verifier.artifacts_limit)),
        )
    except Exception as error:
        ruling = attribute(error, Situation(Phase.COLLECTING, exposed=True))
        if ruling.action is not Action.COMPLETE:
            raise
        is_known = ruling.stop_reason in (None, stop.stop_reason)
        message = (stop.message or ruling.message) if is_known else ruling.message
        return stop.model_copy(
            update={"stop_reason": ruling.stop_reason or stop.stop_reason, "message": message}
        ), nothing
    return stop, stored


async def _store_when_there_is_room(
    journal: Journal, tar: Callable[[], AsyncIterator[bytes]], limit: int
) -> ArtifactsRecord:
    gives_up = time.monotonic() + ROOM_SECONDS
    while True:
        try:
            return await journal.store_artifacts(tar(), limit)
        except SpoolFull as full:
            if full.is_own or time.monotonic() > gives_up:
                raise
        await asyncio.sleep(random.uniform(0, 2 * ROOM_PAUSE_SECONDS))


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
    losses_alone = number = failed = 0
    while True:
        workspace: Workspace | None = None
        exposed = False
        turn = GRADING_TURN + fence.epoch * TURNS_PER_EPOCH + number
        try:
            workspace = await provider.acquire(
                spec, attempt=attempt, fence=fence, name=f"grading-{fence.epoch}-{number}"
            )
            apart = await require_startable(task, workspace, key_turn=turn)
            await require_preparable(task, verifier, workspace, key_turn=turn)
            # From here on, what cannot start or is lost may be so because of what the policy made.
            exposed = True
            folder, rules = carry_rules(task, verifier, workspace.working_dir)
            dropped = await workspace.carry(folder, rules, artifacts(), key=f"{turn}:artifacts")
            if spec.network["verifier"] != "None":
                await workspace.enter("verifier", key=f"{turn}:enter")
            return await grade(task, verifier, workspace, key_turn=turn, apart=apart, dropped=dropped, watch=watch)
        except Exception as error:
            is_alone = workspace is not None and workspace.alone
            ruling = attribute(error, Situation(Phase.GRADING, True, exposed, is_alone, losses_alone))
            if ruling.action is Action.FAIL:
                return failed_verdict(ruling.message)
            failed += ruling.counted
            if ruling.action is not Action.RETRY_GRADING:
                raise
            if failed >= tries:
                raise GradingLost(ruling.reason, ruling.message) from error
            is_unexplained = ruling.unexplained is not None
            losses_alone += is_unexplained and is_alone
            spec = replace(spec, alone=spec.alone or is_unexplained)
        finally:
            if workspace is not None:
                await workspace.release()
        number += 1


async def grade_in_place(
    task: Task,
    verifier: Verifier,
    workspace: Workspace,
    *,
    epoch: int,
    is_first: bool,
    step: int = 0,
    watch: CommandWatch | None = None,
) -> Verdict:
    """`Shared`: in the agent's own workspace, its processes ended first. The agent may own the interpreter: forgeable.

    Raises SandboxFailure unless `is_first`: an earlier grading of the same work may have changed the workspace.
    """
    if not is_first:
        message = "the run was interrupted while this rollout was graded in the agent's own workspace (Shared)"
        raise SandboxFailure(INTERRUPTED, f"{message}; what the verifier had changed there cannot be undone")
    turn = GRADING_TURN + epoch * TURNS_PER_EPOCH + step
    try:
        await workspace.kill_all(key=f"{turn}:end-agent")
        await workspace.enter("verifier", key=f"{turn}:enter")
        return await grade(task, verifier, workspace, key_turn=turn, watch=watch)
    except Exception as error:
        ruling = attribute(error, Situation(Phase.GRADING_IN_PLACE, answered=True, exposed=True))
        if ruling.action is not Action.FAIL:
            raise
        return failed_verdict(ruling.message).model_copy(update={"mode": VerifierMode.SHARED, "forgeable": True})
