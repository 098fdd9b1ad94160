"""Tasks with steps: each step has its own prompt and verdict, one after another in the same workspace.

The begin of a step and its verdict are recorded, so the next runner does not prepare or grade a step again. If a runner
dies during a grading, the attempt ends, because the grading may have changed the workspace.
"""

import posixpath
from collections.abc import Callable, Mapping, Sequence

from agent_runtime.agents.base import Agent, AgentContext
from agent_runtime.engine.attempt.attribution import Action
from agent_runtime.engine.attempt.grading import GRADING_TURN, TURNS_PER_EPOCH, grade_in_place
from agent_runtime.engine.attempt.turns import Turns
from agent_runtime.grading.grade import CommandWatch
from agent_runtime.grading.reward_file import FOLDER, TESTS_FOLDER
from agent_runtime.sandboxes.base import WORKSPACE_USER, SetupFailed, Workspace, WorkspaceLimit
from agent_runtime.wall_clock import unix_time
from rollout_api.records import CommandVerdict, Record, StepRecord, StopReason, TestVerdict, Verdict
from rollout_api.rollout_job import RolloutJobSpec
from rollout_api.tasks import StepReward, Task, TaskStep, VerifierMode

NEXT_STEP_AFTER = frozenset({StopReason.FINISHED, StopReason.AGENT_ERROR})
"""Stop reasons after which the next step begins. The others are limits of the whole rollout."""


class _CommandsOfStep:
    """Implements CommandWatch: numbers the commands of all steps' verifiers, so that each has another key."""

    def __init__(self, watch: CommandWatch, earlier: Sequence[TaskStep]) -> None:
        self._watch = watch
        self._first = sum(len(step.verifier.commands) for step in earlier if step.verifier is not None)

    async def before_verifier_command(self, number: int, command: str) -> None:
        """See CommandWatch."""
        await self._watch.before_verifier_command(self._first + number, command)

    async def after_verifier_command(self, number: int, result: CommandVerdict) -> None:
        """See CommandWatch."""
        await self._watch.after_verifier_command(self._first + number, result)


class StepwiseAgent:
    """Implements Agent: runs a new agent of the job for each step of the task, and grades each step in place."""

    def __init__(
        self, make: Callable[[], Agent], spec: RolloutJobSpec, *, epoch: int, watch: CommandWatch | None = None
    ) -> None:
        self._make, self._spec, self._epoch, self._watch = make, spec, epoch, watch
        self._at_work: tuple[int, TaskStep, Task] | None = None
        """The step that has begun and has no verdict yet."""

    async def run(self, context: AgentContext) -> str:
        """Run the steps until the last one, or one that misses its `minRewards`. A limit of the rollout ends it
        immediately.
        """
        assert isinstance(context, Turns)
        task = context.task
        for number, step in enumerate(task.steps):
            step_task = context.task = task_of_step(task, step)
            await self._begin(context, number, step, step_task)
            context.begin_conversation()
            self._at_work = number, step, step_task
            try:
                await context.run_code(self._make())
                if context.fault is not None:
                    # The agent caught it. A grading that fails with it would be recorded as begun.
                    raise context.fault
            except Exception as error:
                _, decision = await context.decision_about(error)
                is_over = decision.action is not Action.COMPLETE or decision.stop_reason not in NEXT_STEP_AFTER
                if is_over or context.left_behind:
                    raise
                context.traceback = context.traceback or decision.traceback
                context.next_step()
            verdict = await self.grade(context)
            if (missed := missed_minimum(step, verdict)) is not None:
                return f"step {step.name}: {missed}; the following steps were skipped"
        return f"took {len(task.steps)} steps"

    async def grade(self, context: Turns) -> Verdict | None:
        """Grade the current step, if there is one; also after a limit has ended the agent."""
        if self._at_work is None:
            return None
        number, step, task = self._at_work

        is_first = False

        async def begin() -> StepRecord:
            nonlocal is_first
            is_first = True
            return StepRecord(time=unix_time(), step=step.name, grading=True)

        async def grade() -> StepRecord:
            verdict = None
            if step.verifier is not None:
                verdict = await context.run_between_turns(
                    lambda: self._grade_and_clear(context.workspace, number, task, is_first)
                )
            return StepRecord(time=unix_time(), step=step.name, verdict=verdict, ended=True)

        if step.verifier is not None:
            await context.recorded_once(begin)
        verdict = (await context.recorded_once(grade)).verdict
        self._at_work = None
        return verdict

    async def _begin(self, context: Turns, number: int, step: TaskStep, task: Task) -> None:
        async def prepare() -> StepRecord:
            key = f"{max(context.turn, 0) + 1}:step-{number}"
            await context.run_between_turns(lambda: _prepare(context.workspace, key, step, task))
            return StepRecord(time=unix_time(), step=step.name)

        await context.recorded_once(prepare)

    async def _grade_and_clear(self, workspace: Workspace, number: int, task: Task, is_first: bool) -> Verdict:
        rules = self._spec.verifier_of(task)
        watch = None if self._watch is None else _CommandsOfStep(self._watch, task.steps[:number])
        verdict = await grade_in_place(
            task, rules, workspace, epoch=self._epoch, is_first=is_first, step=number, watch=watch
        )
        key = f"{GRADING_TURN + self._epoch * TURNS_PER_EPOCH + number}:clear"
        try:
            for place, path in enumerate(grading_leftovers(task)):
                await workspace.remove(path, key=f"{key}-{place}", owner=WORKSPACE_USER)
            await workspace.enter("agent", key=f"{key}-enter")
            await workspace.set_steady(False)
        except WorkspaceLimit:
            pass  # the agent's next call raises the same error, and ends as ResourceLimit
        return verdict


async def _prepare(workspace: Workspace, key: str, step: TaskStep, task: Task) -> None:
    for number, file in enumerate(step.files):
        await workspace.write(file.path, file.data(), key=f"{key}.file-{number}", mode=file.mode, replace=True)
    seconds = task.timeouts.setup_seconds
    for number, command in enumerate(step.setup):
        result = await workspace.run(command, key=f"{key}.setup-{number}", deadline_seconds=seconds)
        if not result.ok:
            ended = f"setup[{number}] ended with {result.ending}: {result.end_of_output}"
            raise SetupFailed(f"step {step.name}: {ended}")


def task_of_step(task: Task, step: TaskStep) -> Task:
    """Return the task as the agent and the verifier of one step see it."""
    timeouts = task.timeouts
    if step.verifier_seconds is not None:
        timeouts = timeouts.model_copy(update={"verifier_seconds": step.verifier_seconds})
    return task.model_copy(
        update={
            "prompt": step.prompt,
            "solution": step.solution,
            "solution_files": step.solution_files,
            "verifier": step.verifier,
            "timeouts": timeouts,
        }
    )


def grading_leftovers(task: Task) -> list[str]:
    """Return paths that the next step's agent must not find: hidden files, and files that the grading created."""
    files = [file.path for file in task.verifier.files] if task.verifier else []
    outside = [
        path for path in files if posixpath.commonpath([TESTS_FOLDER, posixpath.join("/.", path)]) != TESTS_FOLDER
    ]
    return [TESTS_FOLDER, FOLDER, *outside] if len(outside) < len(files) else [FOLDER, *outside]


def missed_minimum(step: TaskStep, verdict: Verdict | None) -> str | None:
    """Return which of `minRewards` the step misses; None if the next may begin. A missing reward counts as missed."""
    got = rewards_of(verdict) if verdict is not None else {}
    for name, least in step.min_rewards.items():
        if name not in got or got[name] < least:
            return f"{name} is {got.get(name, 'not given')}, below minRewards {least:g}"
    return None


def rewards_of(verdict: Verdict) -> dict[str, float]:
    """Return all rewards of a verdict by name; `reward` is the one that counts."""
    return {**verdict.rewards, "reward": verdict.reward}


def verdict_of_steps(task: Task, records: Sequence[Record], failed_reward: float) -> Verdict | None:
    """Return the rollout's verdict from its steps' verdicts; None if no step has a verifier.

    After a missed `minRewards`, the remaining steps are left out, as in Harbor. Steps that were skipped for any other
    reason count as `failed_reward`, so that stopping early is not rewarded.
    """
    graded = [step for step in task.steps if step.verifier is not None]
    verdicts: Mapping[str, Verdict] = {
        record.step: record.verdict
        for record in records
        if isinstance(record, StepRecord) and record.ended and record.verdict is not None
    }
    taken = [(step.name, verdicts[step.name]) for step in graded if step.name in verdicts]
    if not graded:
        return None
    ended = {record.step for record in records if isinstance(record, StepRecord) and record.ended}
    missed = any(missed_minimum(step, verdicts.get(step.name)) for step in task.steps if step.name in ended)
    missing = 0 if missed else len(graded) - len(taken)
    all_rewards = [rewards_of(verdict) for _, verdict in taken]
    names = dict.fromkeys(name for rewards in all_rewards for name in rewards)
    names["reward"] = None
    all_rewards += [{"reward": failed_reward}] * (missing if all_rewards else max(1, missing))
    if task.step_reward is StepReward.FINAL:
        rewards = {name: all_rewards[-1].get(name, 0.0) for name in names}
    else:
        rewards = {name: sum(given.get(name, 0.0) for given in all_rewards) / len(all_rewards) for name in names}
    return Verdict(
        reward=rewards.pop("reward"),
        rewards=rewards,
        passed=len(taken) == len(graded) and all(verdict.passed for _, verdict in taken),
        commands=[command for _, verdict in taken for command in verdict.commands],
        tests=[
            TestVerdict(name=name, passed=verdict.passed, message=verdict.message or f"reward {verdict.reward:g}")
            for name, verdict in taken
        ],
        mode=VerifierMode.SHARED,
        forgeable=True,
    )
