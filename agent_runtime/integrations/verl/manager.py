"""Entry point for verl's setting `agent_loop_manager_class`: `agent_runtime.integrations.verl.manager.RolloutManager`."""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray  # type: ignore[import-not-found]
import torch
from omegaconf import OmegaConf  # type: ignore[import-not-found]
from tensordict import TensorDict  # type: ignore[import-not-found]
from verl.experimental.agent_loop import AgentLoopManager  # type: ignore[import-not-found]
from verl.protocol import DataProto  # type: ignore[import-not-found]
from verl.utils.ray_utils import auto_await  # type: ignore[import-not-found]
from verl.utils.skip import SkipManager  # type: ignore[import-not-found]

from agent_runtime.integrations.harbor_server.rows import not_honoured, with_remote_agent
from agent_runtime.integrations.harbor_server.settings import read_settings
from agent_runtime.integrations.harbor_server.trials import make_trials
from agent_runtime.integrations.verl.job import Kind, rollout_job
from agent_runtime.integrations.verl.samples import groups_of, shares_of
from agent_runtime.integrations.verl.worker import RolloutWorker

log = logging.getLogger(__name__)


class RolloutManager(AgentLoopManager):  # type: ignore[misc]
    """An `AgentLoopManager` that runs rollouts with this engine, distributed over `rollout.agent.num_workers`
    processes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(RolloutWorker)
        super().__init__(*args, **kwargs)
        # Report invalid settings here, before other processes are started.
        settings = OmegaConf.to_container(self.config, resolve=True)
        remote = read_settings(settings, os.environ)
        rollout_job(with_remote_agent(settings, remote), Kind(members=1, validate=False))
        make_trials(remote, os.environ)
        for warning in () if remote is None else not_honoured(remote):
            log.warning("%s", warning)

    @auto_await  # type: ignore[untyped-decorator]
    def generate_sequences(self, prompts: TensorDict | DataProto) -> Any:
        """Generate rollouts. V1 passes a TensorDict and gets no result: samples go into TransferQueue. The legacy
        trainer gets its rows back.
        """
        if isinstance(prompts, DataProto):
            return self._generate_batch(prompts)
        workers = self.agent_loop_workers
        chunks = prompts.chunk(len(workers))
        ray.get([worker.submit.remote(chunk) for worker, chunk in zip(workers, chunks, strict=False)])
        return None

    def close(self) -> None:
        """Delete all sandboxes. verl does not call this; remaining sandboxes end 15 minutes after their last use."""
        ray.get([worker.close.remote() for worker in self.agent_loop_workers])

    @SkipManager.annotate(role="rollout")  # type: ignore[untyped-decorator]
    async def _generate_batch(self, prompts: DataProto) -> DataProto:
        columns = prompts.non_tensor_batch
        rows = [
            {name: columns[name][i] for name in ("uid", "__do_sample__") if name in columns}
            for i in range(len(prompts))
        ]
        shares = shares_of(groups_of(rows), len(self.agent_loop_workers))
        outputs = await asyncio.gather(
            *(
                worker.generate_sequences.remote(prompts.select_idxs(share))
                for worker, share in zip(self.agent_loop_workers, shares, strict=False)
            )
        )
        _give_all_the_same_reward_keys(outputs)
        _give_all_routed_experts(outputs)
        output = DataProto.concat(outputs)
        metrics = [part.meta_info.pop("metrics") for part in outputs]
        timing = self._performance_metrics(metrics, output)
        timing["agent_loop/forked_rollouts"] = int(np.sum(output.non_tensor_batch["branches"] > 1))
        timing["agent_loop/lost_rollouts"] = int(np.sum(output.non_tensor_batch["lost"].astype(bool)))
        if "rm_scores" in output.batch:
            output.batch["rm_scores"] = _with_mean_for_lost_groups(output.batch["rm_scores"])
        output = output.select_idxs(np.argsort(np.concatenate(shares)))
        output.meta_info = {"timing": timing, **outputs[0].meta_info}
        return output


def _give_all_the_same_reward_keys(outputs: Sequence[DataProto]) -> None:
    """Add missing reward keys: the output of a worker that lost all its rollouts has no further values of a reward
    function.
    """
    keys = sorted({key for output in outputs for key in output.meta_info.get("reward_extra_keys", [])})
    for output in outputs:
        if "reward_extra_keys" in output.meta_info:
            output.meta_info["reward_extra_keys"] = keys
            for key in keys:
                output.non_tensor_batch.setdefault(key, np.full(len(output), np.nan))


def _give_all_routed_experts(outputs: Sequence[DataProto]) -> None:
    """Add missing routed experts: a worker that lost all its rollouts does not know their shape. Its rows have mask 0."""
    known = next((output.batch["routed_experts"] for output in outputs if "routed_experts" in output.batch), None)
    if known is not None:
        for output in outputs:
            if "routed_experts" not in output.batch:
                shape = *output.batch["input_ids"].shape, *known.shape[2:]
                output.batch["routed_experts"] = known.new_zeros(shape)


def _with_mean_for_lost_groups(scores: torch.Tensor) -> torch.Tensor:
    """Return rewards by token, with those of wholly lost groups (NaN) replaced by the mean. Raises RuntimeError if all
    are lost.
    """
    lost = scores.isnan()
    if not lost.any():
        return scores
    rows = scores.sum(dim=1)
    if rows.isnan().all():
        raise RuntimeError(
            "every rollout of the batch was lost to infrastructure; see the workers' logs and results for the reasons"
        )
    return torch.where(lost, rows.nanmean(), scores)
