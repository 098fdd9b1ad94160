"""The engine inside verl: one open job for each kind of rollout, which accepts rows and returns whole groups."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_runtime.engine.session import FinishedGroup, RolloutSession
from agent_runtime.integrations.harbor_server.rows import dataset_paths
from agent_runtime.integrations.verl.job import Kind, rollout_job
from agent_runtime.integrations.verl.rows import Row
from agent_runtime.integrations.verl.samples import Sample, samples_of
from agent_runtime.models.base import Model
from agent_runtime.recording.branches import Branch, token_branches
from agent_runtime.recording.expert_arrays import ExpertArray
from agent_runtime.sandboxes.base import SandboxProvider
from rollout_api.records import ObservationsRecord, Outcome, Record, Result
from rollout_api.rollout_job import RolloutJob


@dataclass(frozen=True)
class Member:
    """Result of one rollout."""

    result: Result
    samples: list[Sample]
    """One sample for each branch; none for a lost rollout, or if nothing was sampled."""
    tool_rewards: list[float]
    """Rewards of verl's own tools, in the order of the calls."""

    @property
    def is_lost(self) -> bool:
        """Whether infrastructure lost it, so that neither its tokens nor a reward may be trained on."""
        return self.result.outcome is not Outcome.COMPLETED


class Rollouts:
    """Runs rows as groups. `config` is verl's whole configuration, resolved. Without `make_model` verl's own model
    answers; without `make_provider` our settings determine the sandboxes.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        make_model: Callable[[], Model] | None,
        make_provider: Callable[[], SandboxProvider] | None = None,
    ) -> None:
        self._config, self._make_model = config, make_model
        self._make_provider = make_provider
        rollout = config["actor_rollout_ref"]["rollout"]
        self._lengths = int(rollout["prompt_length"]), int(rollout["response_length"])
        self._jobs: dict[Kind, asyncio.Task[_OpenJob]] = {}

    async def run(self, row: Row, kind: Kind) -> list[Member]:
        """Return all members of the row's group, in order. Raises the error that ended the job externally: storage, or
        too many lost rollouts.
        """
        if kind not in self._jobs:
            self._jobs[kind] = asyncio.create_task(self._open(kind))
        job = await asyncio.shield(self._jobs[kind])
        group = await job.run(row)
        return [await self._member(job, result) for result in group.results]

    def raise_failure(self) -> None:
        """Raise the error that ended a job externally, if any."""
        for opening in self._jobs.values():
            if opening.done():
                opening.result().raise_failure()

    async def close(self) -> None:
        """Close all jobs. Unfinished rollouts stay recorded up to that point."""
        for opened in await asyncio.gather(*self._jobs.values(), return_exceptions=True):
            if isinstance(opened, _OpenJob):
                await opened.close()

    async def _open(self, kind: Kind) -> "_OpenJob":
        job = rollout_job(self._config, kind)
        provider = None if self._make_provider is None else self._make_provider()
        model = None if self._make_model is None else self._make_model()
        private = dataset_paths(self._config, os.environ)
        return await _OpenJob.open(job, model, provider, private)

    async def _member(self, job: "_OpenJob", result: Result) -> Member:
        if result.outcome is not Outcome.COMPLETED:
            return Member(result, [], [])
        records = await job.records(result)
        branches = [(branch, await job.routed_experts(branch)) for branch in token_branches(records)]
        return Member(result, samples_of(branches, *self._lengths), _tool_rewards(records))


class _OpenJob:
    """A session whose groups are awaited one by one."""

    def __init__(self, session: RolloutSession) -> None:
        self._session = session
        self._waiting: dict[int, asyncio.Future[FinishedGroup]] = {}
        self._failure: BaseException | None = None
        self._collecting = asyncio.create_task(self._collect())

    @classmethod
    async def open(
        cls, job: RolloutJob, model: Model | None, provider: SandboxProvider | None, private: Sequence[Path]
    ) -> "_OpenJob":
        """Open a new run. After a restart, verl submits unfinished prompts again."""
        session = RolloutSession(job, base_dir=Path.cwd(), provider=provider, model=model, new=True, private=private)
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

    async def routed_experts(self, branch: Branch) -> ExpertArray | None:
        return await self._session.routed_experts(branch)

    async def close(self) -> None:
        self._collecting.cancel()
        await asyncio.gather(self._collecting, return_exceptions=True)
        await self._session.__aexit__(None, None, None)

    async def _collect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for group in self._session:
                waiting = self._waiting.setdefault(group.sequence, loop.create_future())
                if not waiting.done():  # the waiting caller was just cancelled
                    waiting.set_result(group)
        except Exception as error:  # noqa: BLE001 raised by all waiting callers
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
