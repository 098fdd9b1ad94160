"""The process that runs rollouts for verl: a Ray actor with the engine instead of verl's agent loops.

Everything else is verl's own worker: configuration, tokenizer, reward models, teachers, padding.
"""

import asyncio
import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
import transfer_queue  # type: ignore[import-not-found]
from omegaconf import OmegaConf  # type: ignore[import-not-found]
from tensordict import NonTensorData, NonTensorStack, TensorDict  # type: ignore[import-not-found]
from verl.experimental.agent_loop import AgentLoopWorker  # type: ignore[import-not-found]
from verl.protocol import DataProto  # type: ignore[import-not-found]
from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # type: ignore[import-not-found]
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder  # type: ignore[import-not-found]
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient  # type: ignore[import-not-found]

from agent_runtime.integrations.harbor_server.rows import (
    HarborRows,
    model_name_of,
    own_settings,
    with_own_settings,
    with_remote_agent,
)
from agent_runtime.integrations.harbor_server.settings import read_settings
from agent_runtime.integrations.harbor_server.trials import make_trials
from agent_runtime.integrations.verl.chat import VerlChat
from agent_runtime.integrations.verl.job import Kind, uses_verls_client
from agent_runtime.integrations.verl.model import LLMClientModel
from agent_runtime.integrations.verl.outputs import NOT_COLUMNS, outputs_by_row, outputs_of
from agent_runtime.integrations.verl.rollouts import Member, Rollouts
from agent_runtime.integrations.verl.rows import ActiveRows, Row, read_row
from agent_runtime.integrations.verl.samples import groups_of
from agent_runtime.integrations.verl.tools import register_loaded

log = logging.getLogger(__name__)


class RolloutWorker(AgentLoopWorker):  # type: ignore[misc]
    """An `AgentLoopWorker` for both trainers: `generate_sequences` for the legacy one, `submit` for V1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings: dict[str, Any] = OmegaConf.to_container(self.config, resolve=True)
        self._rows = ActiveRows()
        names = register_loaded(self.tools, self._rows.tools_kwargs)
        agent = own_settings(self._settings).get("agent") or {}
        if names and "tools" not in agent:
            self._settings = with_own_settings(self._settings, {"agent": {**agent, "tools": names}})
        self._builder = create_continuous_token_builder(
            self.tokenizer,
            hf_model_type=self.hf_model_type,
            chat_template_kwargs=self._settings["data"].get("apply_chat_template_kwargs") or {},
        )
        remote = read_settings(self._settings, os.environ)
        self._harbor = HarborRows(self._settings, os.environ, remote)
        self._model_name = model_name_of(remote)
        self._settings = with_remote_agent(self._settings, remote)
        make_model = self._make_model if uses_verls_client(self._settings) else None
        self._rollouts = Rollouts(self._settings, make_model, make_trials(remote, os.environ))
        self._background: set[asyncio.Task[None]] = set()
        if self._settings["transfer_queue"]["enable"]:  # V1 sets this before it creates a manager
            transfer_queue.init()

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Run the legacy trainer's rows; return them in the same order, each with its rollout.

        Rows with the same uid are the members of one group, so all of them must reach the same worker.
        """
        validate = bool(batch.meta_info.get("validate", False))
        version = weights_of(int(batch.meta_info.get("global_steps", 0)))
        rows = [{key: column[i] for key, column in batch.non_tensor_batch.items()} for i in range(len(batch))]
        groups = groups_of(rows)
        played = await asyncio.gather(
            *(
                self._play(read_row(rows[group.rows[0]], self._harbor), len(group.rows), validate, greedy=group.greedy)
                for group in groups
            )
        )
        outputs = await outputs_by_row(self, rows, groups, played, validate=validate, version=version)
        return self._postprocess(outputs, input_non_tensor_batch=batch.non_tensor_batch, validate=validate)

    async def submit(self, batch: TensorDict) -> None:
        """Accept V1's rows and return; their samples go into TransferQueue, group by group.

        Raises RowError for a row that is not a task, and errors that ended the rollouts of earlier rows externally.
        """
        self._rollouts.raise_failure()
        validate = bool(_unwrapped(batch["validate"])) if "validate" in batch else False
        taken = [
            (read_row(fields, self._harbor), fields) for fields in (_fields_of(batch, i) for i in range(len(batch)))
        ]
        for row, fields in taken:
            task = asyncio.create_task(self._run_prompt(row, fields, validate))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        await self._rollouts.close()

    async def _run_prompt(self, row: Row, fields: dict[str, Any], validate: bool) -> None:
        """Run a group, from `running` to `finished`, or to `failure` if none of it can be trained on."""
        partition = "val" if validate else "train"
        await transfer_queue.async_kv_put(key=row.uid, partition_id=partition, tag={"status": "running"})
        settings = self._settings["actor_rollout_ref"]["rollout"]
        written = 0
        try:
            size = int(fields.pop("__rollout_n__", settings["val_kwargs"]["n"] if validate else settings["n"]))
            greedy = not validate and not bool(fields.pop("__do_sample__", True))
            for number, member in enumerate(await self._play(row, size, validate, greedy=greedy)):
                if not member.is_lost:
                    written += await self._written(member, number, fields, partition)
        except Exception:
            log.exception("the rollouts of prompt %s ended with an error", row.uid)
        status = "finished" if written else "failure"
        await transfer_queue.async_kv_put(key=row.uid, partition_id=partition, tag={"status": status})

    async def _play(self, row: Row, size: int, validate: bool, *, greedy: bool) -> list[Member]:
        row = self._rows.begin(row)
        return await self._rollouts.run(row, Kind(size, validate, greedy, row.system_prompt))

    async def _written(self, member: Member, number: int, fields: Mapping[str, Any], partition: str) -> int:
        """Do as `_write`. A reward function that raises for one member does not lose the others."""
        try:
            return await self._write(member, number, fields, partition)
        except Exception:
            log.exception("rollout %d of prompt %s is not trained on", number, fields["uid"])
            return 0

    async def _write(self, member: Member, number: int, fields: Mapping[str, Any], partition: str) -> int:
        """Put a member's samples into TransferQueue, with verl's keys, fields and tags; return their number."""
        global_steps = int(fields["global_steps"])
        outputs = outputs_of(member, weights_of(global_steps))
        if not outputs:
            return 0
        columns = {key: value for key, value in fields.items() if key not in NOT_COLUMNS} | {"session_id": number}
        await self._compute_score(outputs, kwargs=columns)
        final = outputs[-1]
        await self._compute_teacher_logprobs(
            final,
            prompt_ids=final.prompt_ids,
            response_ids=final.response_ids,
            validate=partition == "val",
            sample_kwargs=columns,
        )
        for output in outputs[:-1]:
            output.reward_score = final.reward_score
            output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]
        samples = [self._sample(output, columns) for output in outputs]
        await transfer_queue.async_kv_batch_put(
            keys=[f"{fields['uid']}_{number}_{branch}" for branch in range(len(outputs))],
            fields=list_of_dict_to_tensordict(samples),
            tags=[_tag(sample, global_steps) for sample in samples],
            partition_id=partition,
        )
        return len(outputs)

    def _sample(self, output: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return TransferQueue's fields of a sample: verl's fields, and the columns of its row."""
        sample: dict[str, Any] = {**output.as_dict(), **columns}
        ids = torch.cat([sample["prompts"], sample["responses"]])
        sample |= {"input_ids": ids, "loss_mask": sample["response_mask"], "multi_modal_inputs": {}}
        batched = ids.unsqueeze(0)
        sample["position_ids"] = self._compute_position_ids(batched, torch.ones_like(batched), {}).squeeze(0)
        return sample

    def prompt_ids(self, row: Mapping[str, Any]) -> list[int]:
        """Return the ids of a row's prompt; only the end of one that is too long."""
        prompt = row["raw_prompt"]  # with PR #83's `prompt_key: instance_id` it is a text
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        ids: list[int] = self._builder.build_initial_tokens(messages)
        return ids[-int(self._settings["actor_rollout_ref"]["rollout"]["prompt_length"]) :]

    def _make_model(self) -> LLMClientModel:
        settings = self._settings["actor_rollout_ref"]["rollout"]
        generate = self.llm_client.generate
        if isinstance(self.llm_client, FullyAsyncLLMServerClient):
            # The subclass's `generate` joins pieces across weight updates, which loses their versions.
            generate = functools.partial(LLMServerClient.generate, self.llm_client)
        return LLMClientModel(
            generate,
            VerlChat(self.tokenizer, self._builder, settings["multi_turn"]["format"]),
            context=context_length(settings),
            name=self._model_name,
        )


def weights_of(step: int) -> int:
    """Return the version of the weights with which a training step begins: verl counts steps from 1, and updates at
    their end.
    """
    return max(0, step - 1)


def context_length(rollout: Mapping[str, Any]) -> int:
    """Return the limit of tokens of prompt and answer together, from the trainer's tensors and the servers."""
    widest = int(rollout["prompt_length"]) + int(rollout["response_length"])
    return min(widest, int(rollout.get("max_model_len") or widest))


def _fields_of(batch: TensorDict, index: int) -> dict[str, Any]:
    """Return the columns of one row. `validate` applies to the batch."""
    return {key: _unwrapped(value, index) for key, value in batch.items() if key != "validate"}


def _unwrapped(value: Any, index: int | None = None) -> Any:
    """Return a row's part of a column, or the value that all rows share."""
    if isinstance(value, NonTensorData):
        return value.data
    if index is None:
        return value
    item = value[index]
    return item.data if isinstance(value, NonTensorStack) and hasattr(item, "data") else item


def _tag(sample: Mapping[str, Any], global_steps: int) -> dict[str, Any]:
    """Tag by which V1 balances batches and distinguishes old samples from new ones."""
    prompt, response = len(sample["prompts"]), len(sample["responses"])
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": global_steps,
        "min_global_steps": sample["extra_fields"]["min_global_steps"],
        "max_global_steps": sample["extra_fields"]["max_global_steps"],
    }
