"""One rollout: attempts until one is sealed."""

import asyncio
from collections.abc import Sequence

from agent_runtime.engine.assignment import Rollout
from agent_runtime.engine.attempt import Attempt
from agent_runtime.engine.attempts_policy import GiveUp, after_failures
from agent_runtime.engine.context import RunContext
from agent_runtime.engine.events import AttemptFailed
from agent_runtime.recording.journal import read_attempt
from rollout_api.records import FailedRecord, Outcome, Result


class RolloutRun:
    """Drives one rollout to its seal."""

    def __init__(self, context: RunContext, rollout: Rollout) -> None:
        self._context, self._rollout = context, rollout
        self._failures: list[tuple[int, FailedRecord]] = []
        self._attempt: Attempt | None = None
        self._number = 0
        self._has_read_earlier = False

    async def run(self) -> Result:
        """The rollout's sealed result. Cancelling it leaves everything as it is, to be resumed or sealed by `cancel`."""
        while True:
            await self._context.drain.gate()
            self._attempt = await self._claim()
            ended = await self._attempt.run()
            if isinstance(ended, Result):
                return ended
            self._failures.append((self._number, ended))
            decision = after_failures(
                [failure for _, failure in self._failures], self._context.job.spec.attempts, self._context.jitter
            )
            retry = not isinstance(decision, GiveUp)
            self._context.observer(
                AttemptFailed(self._rollout.index, self._number, ended.reason, ended.message, retry=retry)
            )
            if isinstance(decision, GiveUp):
                return await self._attempt.seal(Outcome.INFRA_FAILED, reason=ended.reason, message=ended.message)
            self._attempt = None
            self._number += 1
            await asyncio.sleep(decision.delay_seconds)

    async def cancel(self, reason: str, message: str) -> Result:
        """Seal it as Cancelled; after `run` was cancelled, or instead of it."""
        if self._attempt is None:
            self._attempt = await self._claim()
        return await self._attempt.seal(Outcome.CANCELLED, reason=reason, message=message)

    async def _claim(self) -> Attempt:
        if not self._has_read_earlier and self._rollout.index in self._context.earlier.begun:
            await self._read_earlier_attempts()
        self._has_read_earlier = True
        return await Attempt.claim(self._context, self._rollout, self._number, self._failures)

    async def _read_earlier_attempts(self) -> None:
        """Read the failures that an earlier process recorded; the latest attempt is resumed, failed or not."""
        numbers: Sequence[int] = await self._context.record.attempts(self._rollout.index)
        failures = []
        for number in sorted(numbers)[:-1]:
            records = await read_attempt(self._context.record, self._rollout.index, number)
            failed = next((record for record in records if isinstance(record, FailedRecord)), None)
            if failed is not None:
                failures.append((number, failed))
        self._failures, self._number = failures, max(numbers, default=0)
