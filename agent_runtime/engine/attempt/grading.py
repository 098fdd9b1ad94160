"""Grading of an attempt: in a new workspace with only its artifacts, or in the agent's workspace, where it can be
forged.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from agent_runtime.engine.attempt.attribution import Action, Phase, Situation, attribute
from agent_runtime.engine.scheduling.retry_rules import backoff
from agent_runtime.grading.artifacts import artifact_paths, carry_rules
from agent_runtime.grading.grade import (
    REACHED_AGAIN,
    STOOD_STILL,
    UNREACHABLE,
    CommandWatch,
    grade,
    require_preparable,
    require_startable,
)
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.store import SpoolFull
from agent_runtime.sandboxes.base import INTERRUPTED, Fence, SandboxFailure, SandboxProvider, Workspace, WorkspaceSpec
from agent_runtime.sandboxes.prepare import LIFECYCLE_TURN
from agent_runtime.wall_clock import unix_time
from rollout_api.base import quantity_value
from rollout_api.records import ArtifactsRecord, StopRecord, Verdict
from rollout_api.rollout_job import Attempts, Verifier
from rollout_api.tasks import Task, VerifierMode

END_TURN = LIFECYCLE_TURN + 1
"""Turn of the idempotency keys of the calls that store the artifacts: above every other turn of the workspace."""
END = f"{END_TURN}:end"
GRADING_TURN = 1_000_000
"""Turn of a grading's idempotency keys: above every turn of an agent, so that no watermark forgets them."""
TURNS_PER_EPOCH = 1_000
"""Each epoch, and each retry in it, uses its own keys, because a grading is repeated, never continued."""

log = logging.getLogger(__name__)

ROOM_SECONDS = 600.0
"""Longest wait for space on the runner's disk, which becomes free when other rollouts' artifacts are stored. The policy
controls the size of artifacts, so a lack of space must not cause a new attempt.
"""
ROOM_PAUSE_SECONDS = 5.0
"""Mean pause before a retry. Pauses are random, so that waiting rollouts do not retry at the same time."""


class GradingLost(Exception):
    """The rollout could not be graded: VerifierFailed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


def failed_verdict(message: str, verifier: Verifier) -> Verdict:
    """Return the verdict on a policy that damaged its workspace, or the verifier's through its code."""
    return Verdict(reward=verifier.failed_reward, passed=False, message=message)


def nothing_to_grade(why: str) -> ArtifactsRecord:
    """Return the record of an agent that left nothing to grade: its verdict is a failed one."""
    return ArtifactsRecord(time=unix_time(), message=f"nothing was left to grade: {why}")


async def collect(task: Task, workspace: Workspace) -> str | None:
    """Run `verifier.collect` in the agent's workspace, after its processes have ended. Return why it failed, or None.
    A command that fails after the sandbox stood still runs once more: its own time limits may have expired.

    A failure is attributed to the policy: the same commands succeeded in the initial state. Files that the commands did
    not write are not graded. Raises SandboxFailure for a command that cannot be started, and WorkspaceLimit and
    SandboxFailure from the workspace.
    """
    commands = task.verifier.collect if task.verifier else ()
    if commands:
        # They are part of the grading, and may have time limits of their own, which would expire in a pause.
        await workspace.set_steady(True)
    for number, command in enumerate(commands):
        key, seconds = f"{END}-collect-{number}", task.timeouts.verifier_seconds
        result = await workspace.run(command, key=key, deadline_seconds=seconds)
        if not result.ok and not result.start_error and await workspace.stood_still():
            result = await workspace.run(command, key=f"{key}-again", deadline_seconds=seconds)
        if result.start_error:
            raise SandboxFailure(
                "ExecutorFailed", f"verifier.collect[{number}] could not be started: {result.start_error}"
            )
        if not result.ok:
            return f"verifier.collect[{number}] failed with {result.cause or result.exit_code}: {result.end_of_output}"
    return None


async def store_artifacts(
    task: Task, verifier: Verifier, workspace: Workspace, journal: Journal, stop: StopRecord
) -> tuple[StopRecord, ArtifactsRecord]:
    """Store the artifacts that grading needs, after the agent's processes have ended. Return also the stop record,
    changed if the policy made storing impossible.
    """
    if task.verifier is None or verifier.mode is VerifierMode.SHARED:
        return stop, ArtifactsRecord(time=unix_time())
    try:
        # The agent's calls are not repeated any more. Acknowledge them, so that the executor has space for further
        # keys.
        await workspace.acknowledge(END_TURN)
        await workspace.kill_all(key=f"{END}-agent")
        if failed := await collect(task, workspace):
            stop = stop.model_copy(update={"message": "; ".join(filter(None, (stop.message, failed)))})
        folder, paths = artifact_paths(task, workspace.working_dir)
        stored = await _store_when_there_is_room(
            journal, lambda: workspace.tar(folder, parts=paths), int(quantity_value(verifier.artifacts_limit))
        )
    except Exception as error:
        decision = attribute(error, Situation(Phase.COLLECTING, exposed=True))
        if decision.action is not Action.COMPLETE:
            raise
        is_known = decision.stop_reason in (None, stop.stop_reason)
        message = (stop.message or decision.message) if is_known else decision.message
        stop = stop.model_copy(update={"stop_reason": decision.stop_reason or stop.stop_reason, "message": message})
        return stop, nothing_to_grade(decision.message)
    return stop, stored


async def _store_when_there_is_room(
    journal: Journal, tar: Callable[[], AsyncIterator[bytes]], limit: int
) -> ArtifactsRecord:
    gives_up, is_told = time.monotonic() + ROOM_SECONDS, False
    while True:
        try:
            return await journal.store_artifacts(tar(), limit)
        except SpoolFull as full:
            if full.is_own or time.monotonic() > gives_up:
                raise
            if not is_told:
                log.warning("artifacts wait up to %g s for room: %s", ROOM_SECONDS, full)
                is_told = True
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
    attempts: Attempts,
    jitter: random.Random,
    watch: CommandWatch | None = None,
    since: float | None = None,
    on_changes: Callable[[str], None] = lambda changes: None,
) -> Verdict:
    """`Separate`: grade in a new workspace in the task's prepared state, with the artifacts in it. If the workspace is
    lost, grading is repeated after the same pause as before a new attempt. `since` is the Unix time at which the agent
    started. `on_changes` gets the diff of what the agent changed.

    Raises GradingLost when all retries are used up, or if the verifier cannot start at all.
    """
    losses_alone = number = failed = 0
    is_repeated = False
    while True:
        workspace: Workspace | None = None
        exposed = False
        turn = GRADING_TURN + fence.epoch * TURNS_PER_EPOCH + number
        try:
            workspace = await provider.acquire(
                spec, attempt=attempt, fence=fence, name=f"grading-{fence.epoch}-{number}"
            )
            is_apart = await require_startable(task, workspace, key_turn=turn)
            await require_preparable(task, verifier, workspace, key_turn=turn, is_apart=is_apart)
            # From here on, the policy's files may have caused a failed start or a loss.
            exposed = True
            folder, rules = carry_rules(task, verifier, workspace.working_dir, since=since)
            carried = await workspace.carry(folder, rules, artifacts(), key=f"{turn}:artifacts")
            on_changes(carried.changes)
            if spec.network["verifier"] != "None":
                await workspace.enter("verifier", key=f"{turn}:enter")
            return await grade(
                task,
                verifier,
                workspace,
                key_turn=turn,
                is_apart=is_apart,
                is_repeated=is_repeated,
                dropped=carried.dropped,
                watch=watch,
            )
        except Exception as error:
            is_repeated |= isinstance(error, SandboxFailure) and error.reason in (
                REACHED_AGAIN,
                STOOD_STILL,
                UNREACHABLE,
            )
            is_alone = spec.alone if workspace is None else workspace.alone
            decision = attribute(error, Situation(Phase.GRADING, True, exposed, is_alone, losses_alone))
            if decision.action is Action.FAIL:
                return failed_verdict(decision.message, verifier)
            failed += decision.counted
            if decision.action is not Action.RETRY_GRADING:
                raise
            if failed >= attempts.limit:
                raise GradingLost(decision.reason, decision.message) from error
            is_unexplained = decision.unexplained is not None
            losses_alone += is_unexplained and is_alone
            spec = replace(spec, alone=spec.alone or is_unexplained)
            pause = backoff(failed, attempts, jitter) if decision.counted else 0.0
        finally:
            if workspace is not None:
                await workspace.release()
        number += 1
        await asyncio.sleep(pause)


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
    """`Shared`: grade in the agent's own workspace after ending its processes. The agent may have changed the
    interpreter: forgeable.

    Raises SandboxFailure unless `is_first`: an earlier grading of the same work may have changed the workspace.
    """
    if not is_first:
        message = "the run was interrupted while this rollout was graded in the agent's own workspace (Shared)"
        raise SandboxFailure(INTERRUPTED, f"{message}; what the verifier had changed there cannot be undone")
    turn = END_TURN + epoch * TURNS_PER_EPOCH + step
    try:
        await workspace.kill_all(key=f"{turn}:end-agent")
        await workspace.enter("verifier", key=f"{turn}:enter")
        return await grade(task, verifier, workspace, key_turn=turn, watch=watch)
    except Exception as error:
        decision = attribute(error, Situation(Phase.GRADING_IN_PLACE, answered=True, exposed=True))
        if decision.action is not Action.FAIL:
            raise
        failed = failed_verdict(decision.message, verifier)
        return failed.model_copy(update={"mode": VerifierMode.SHARED, "forgeable": True})
