"""The engine inside of verl: an open job for each kind of rollout, to which rows go and from which whole groups come."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_runtime.engine.session import FinishedGroup, RolloutSession
from agent_runtime.integrations.verl.job import Kind, rollout_job
from agent_runtime.integrations.verl.rows import Row
from agent_runtime.integrations.verl.samples import Sample, samples_of
from agent_runtime.models.base import Model
from agent_runtime.recording.branches import token_branches
from agent_runtime.sandboxes.base import SandboxProvider
from rollout_api.records import ObservationsRecord, Outcome, Record, Result
from rollout_api.rollout_job import RolloutJob


@dataclass(frozen=True)
class Member:
    """What became of one rollout."""

    result: Result
    samples: list[Sample]
    """A sample for each branch; none for a lost rollout, nor where nothing was sampled."""
    tool_rewards: list[float]
    """What verl's own tools gave, in the order of the calls."""

    @property
    def is_lost(self) -> bool:
        """Not the policy's doing: neither its tokens nor a reward may be learned from."""
        return self.result.outcome is not Outcome.COMPLETED


class Rollouts:
    """Runs rows as groups. `config` is verl's whole configuration, resolved; without `make_model` its own model answers,
    without `make_provider` sandboxes come from where our settings say."""

    def __init__(
        self,
        config: Mapping[str, Any],
        make_model: Callable[[], Model] | None,
        environ: Mapping[str, str],
        make_provider: Callable[[], SandboxProvider] | None = None,
    ) -> None:
        self._config, self._make_model, self._environ = config, make_model, environ
        self._make_provider = make_provider
        rollout = config["actor_rollout_ref"]["rollout"]
        self._lengths = int(rollout["prompt_length"]), int(rollout["response_length"])
        self._jobs: dict[Kind, asyncio.Task[_OpenJob]] = {}

    async def run(self, row: Row, kind: Kind) -> list[Member]:
        """All members of the row's group, in order. Raises what ended the job from outside: storage, too much lost."""
        if kind not in self._jobs:
            self._jobs[kind] = asyncio.create_task(self._open(kind))
        job = await asyncio.shield(self._jobs[kind])
        group = await job.run(row)
        return [await self._member(job, result) for result in group.results]

    def raise_failure(self) -> None:
        """Raise what ended a job from outside, if anything did."""
        for opening in self._jobs.values():
            if opening.done():
                opening.result().raise_failure()

    async def close(self) -> None:
        """Close all jobs; what is unfinished is recorded as far as it got."""
        for opened in await asyncio.gather(*self._jobs.values(), return_exceptions=True):
            if isinstance(opened, _OpenJob):
                await opened.close()

    async def _open(self, kind: Kind) -> "_OpenJob":
        job = rollout_job(self._config, kind)
        provider = None if self._make_provider is None else self._make_provider()
        return await _OpenJob.open(
            job, None if self._make_model is None else self._make_model(), self._environ, provider
        )

    async def _member(self, job: "_OpenJob", result: Result) -> Member:
        if result.outcome is not Outcome.COMPLETED:
            return Member(result, [], [])
        records = await job.records(result)
        return Member(result, samples_of(token_branches(records), *self._lengths), _tool_rewards(records))


class _OpenJob:
    """A session whose groups are awaited one by one."""

    def __init__(self, session: RolloutSession) -> None:
        self._session = session
        self._waiting: dict[int, asyncio.Future[FinishedGroup]] = {}
        self._failure: BaseException | None = None
        self._collecting = asyncio.create_task(self._collect())

    @classmethod
    async def open(
        cls, job: RolloutJob, model: Model | None, environ: Mapping[str, str], provider: SandboxProvider | None
    ) -> "_OpenJob":
        """Always a new run: what verl had in flight when it stopped, it submits again itself."""
        session = RolloutSession(job, base_dir=Path.cwd(), environ=environ, provider=provider, model=model, new=True)
        return cls(await session.__aenter__())

    async def run(self, row: Row) -> FinishedGroup:
        sequence = await self._session.submit(row.task, label=row.uid)
        self.raise_failure()
        try:
            return await self._waiting.setdefault(sequence, asyncio.get_running_loop().create_future())
        finally:
            self._waiting.pop(sequence, None)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def records(self, result: Result) -> list[Record]:
        return await self._session.records(result)

    async def close(self) -> None:
        self._collecting.cancel()
        await asyncio.gather(self._collecting, return_exceptions=True)
        await self._session.__aexit__(None, None, None)

    async def _collect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for group in self._session:
                self._waiting.setdefault(group.sequence, loop.create_future()).set_result(group)
        except Exception as error:  # noqa: BLE001 handed to everybody who waits
            self._failure = error
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)


def _tool_rewards(records: list[Record]) -> list[float]:
    return [
        result.data["reward"]
        for record in records
        if isinstance(record, ObservationsRecord)
        for result in record.results
        if isinstance(result.data.get("reward"), int | float)
    ]
