"""Three steps of each of verl's trainers by verl's own code, as far as rollouts are concerned. Writes the results as
JSON.

The tests run it with the Python of hack/verl-environment: `python play.py OUTPUT_FOLDER`.
"""

import asyncio
import json
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import facts
import numpy as np
import pandas
import ray
import tiny_model
import transfer_queue as tq
from fake_server import FakeServer
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop import RewardLoopManager
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.router import get_router_handle

HERE = Path(__file__).parent
STEPS = (1, 2, 3)
MEMBERS = 2
PROMPTS = {
    "plain": "Write the word apple to out.txt.",
    "looked-up": "LOOKUP a word and write it to out.txt.",
    "forgetful": "FORGET what was said. Write the word cherry to out.txt.",
    "flaky": "FLAKY server. Write the word damson to out.txt.",
    "dead": "DEAD server. Write the word elder to out.txt.",
    "cut": "CUT in the middle. Write the word fig to out.txt.",
    "sum": "SUM of 2 and 2?",
    "flaky-sum": "FLAKY server. SUM of 2 and 2?",
    "dead-sum": "DEAD server. SUM of 2 and 2?",
}
LEGACY = ("plain", "flaky", "looked-up", "dead", "forgetful")
WORDS = {
    "plain": "apple",
    "looked-up": "banana",
    "forgetful": "cherry",
    "flaky": "damson",
    "dead": "elder",
    "cut": "fig",
}


def write_dataset(path: Path) -> None:
    """Write verl's Parquet columns. A task's files and verifier are in `extra_info.task`."""
    rows = []
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        word = WORDS.get(name)
        # Without a verifier the reward is verl's own, by data source.
        verifier = {"verifier": {"commands": [f"grep -qx {word} out.txt"]}} if word else {}
        rows.append(
            {
                "data_source": "fruit" if word else "openai/gsm8k",
                "prompt": [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": prompt}],
                "reward_model": {"style": "rule", "ground_truth": word or "4"},
                "extra_info": {
                    "index": index,
                    "task": json.dumps({"name": name, **verifier}),
                    "tools_kwargs": {"lookup": {"create_kwargs": {"word": word}}},
                },
            }
        )
    pandas.DataFrame(rows).to_parquet(path)


def documented_settings() -> list[str]:
    """Return the settings of docs/trainers-verl.md."""
    page = (HERE.parents[2] / "docs/trainers-verl.md").read_text()
    return page.split("```text\n")[1].split("```")[0].split()


def settings(folder: Path) -> DictConfig:
    """Return verl's own configuration with the documented settings, for a small model and few processes."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder / 'model'}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.prompt_length=2048",
                "actor_rollout_ref.rollout.response_length=4096",
                f"actor_rollout_ref.rollout.n={MEMBERS}",
                *documented_settings(),
                f"actor_rollout_ref.rollout.multi_turn.tool_config_path={HERE / 'tools.yaml'}",
                "+actor_rollout_ref.rollout.custom.agent_rollouts.agent.type='extensions:Forgetful'",
                "+actor_rollout_ref.rollout.custom.agent_rollouts.attempts.limit=1",
                "+actor_rollout_ref.rollout.custom.agent_rollouts.completion.maxInfraFailureFraction=1",
                f"trainer.default_local_dir={folder}",
                "trainer.experiment_name=fruit",
                "algorithm.adv_estimator=grpo",
                "reward.num_workers=1",
                # Computing log probabilities would need a policy, so those of the servers are used.
                "algorithm.rollout_correction.bypass_mode=true",
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
                "transfer_queue.enable=true",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            ],
        )
    OmegaConf.resolve(config)
    return config


def batch_of(dataset: RLHFDataset, names: list[str]) -> dict[str, Any]:
    """Return the batch of verl's data loader for those prompts."""
    batch: dict[str, Any] = collate_fn([dataset[list(PROMPTS).index(name)] for name in names])
    batch["uid"] = np.array([str(uuid.uuid4()) for _ in names], dtype=object)
    return batch


def make_manager(config: DictConfig, client: LLMServerClient, rewards: RewardLoopManager) -> Any:
    """Create the manager as both trainers do."""
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    return load_class_from_fqn(name, "AgentLoopManager").create(
        config=config,
        llm_client=client,
        teacher_client=None,
        reward_loop_worker_handles=rewards.reward_loop_worker_handles,
    )


def play_legacy(manager: Any, config: DictConfig, dataset: RLHFDataset, step: int, names: list[str]) -> dict[str, Any]:
    """Run steps like RayPPOTrainer.fit, up to the advantages."""
    batch = DataProto.from_single_dict(batch_of(dataset, names))
    kept = {"data_source", "reward_model", "extra_info", "uid"}
    gen = batch.pop(non_tensor_batch_keys=list(set(batch.non_tensor_batch) - kept))
    gen.non_tensor_batch.update(batch.non_tensor_batch)
    gen.meta_info["global_steps"] = step
    output = manager.generate_sequences(gen.repeat(repeat_times=MEMBERS, interleave=True))
    timing = {key: float(value) for key, value in output.meta_info.pop("timing").items()}
    batch = batch.repeat(repeat_times=MEMBERS, interleave=True).union(output)
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    batch = compute_advantage(
        batch, adv_estimator="grpo", num_repeat=MEMBERS, norm_adv_by_std_in_grpo=True, config=config.algorithm
    )
    tensors = batch.batch
    rows = []
    for i, name in enumerate(name for name in names for _ in range(MEMBERS)):
        prompt_width = tensors["prompts"].shape[1]
        attended = tensors["attention_mask"][i].bool()
        prompt, response = attended[:prompt_width], attended[prompt_width:]
        other = {
            key: batch.non_tensor_batch[key][i] for key in ("uid", "branches", "lost", "tool_rewards", "__num_turns__")
        }
        rows.append(
            {
                "task": name,
                "prompt": tensors["prompts"][i][prompt].tolist(),
                "response": tensors["responses"][i][response].tolist(),
                "mask": tensors["response_mask"][i][response].tolist(),
                "masked_padding": int(tensors["response_mask"][i][~response].sum()),
                "logprobs": tensors["rollout_log_probs"][i][response].tolist(),
                "experts": tensors["routed_experts"][i][attended].squeeze(1).tolist(),
                "score": float(tensors["rm_scores"][i].sum()),
                "score_at": int(tensors["rm_scores"][i].abs().argmax()),
                "advantage": float(tensors["advantages"][i].abs().max()),
                "positions": tensors["position_ids"][i][attended].tolist() == list(range(int(attended.sum()))),
                "versions": [int(batch.non_tensor_batch[f"{end}_global_steps"][i]) for end in ("min", "max")],
                **{key: value.item() if hasattr(value, "item") else value for key, value in other.items()},
            }
        )
    return {"rows": rows, "timing": timing}


def play_v1(
    manager: Any,
    config: DictConfig,
    dataset: RLHFDataset,
    buffer: ReplayBuffer,
    server: Any,
    step: int,
    names: list[str],
    *,
    validate: bool = False,
) -> dict[str, Any]:
    """Run steps like PPOTrainer of V1: register, submit, sample from the replay buffer, advantages."""
    partition = "val" if validate else "train"
    batch_dict = batch_of(dataset, names)
    task_of = dict(zip(batch_dict["uid"], names, strict=True))
    if not validate:
        batch_dict["__rollout_n__"] = np.array([3 if name == "plain" else MEMBERS for name in names], dtype=object)
    batch = tu.get_tensordict(batch_dict)
    tu.assign_non_tensor_data(batch, "global_steps", step)
    if validate:
        tu.assign_non_tensor_data(batch, "validate", True)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in names]
    tq.kv_batch_put(keys=list(batch["uid"]), partition_id=partition, tags=tags)

    def statuses_now() -> dict[str, str]:
        return {key: tag["status"] for key, tag in tq.kv_list(partition)[partition].items() if key in task_of}

    ray.get(server.hold.remote())
    manager.generate_sequences(batch)
    on_return = statuses = statuses_now()
    ray.get(server.release.remote())
    while not all(statuses.get(uid) in ("finished", "failure") for uid in task_of):
        time.sleep(0.05)
        statuses = statuses_now()
    sampled, _ = buffer.sample(global_steps=step, partition_id=partition, batch_size=len(names))
    data = tq.kv_batch_get(keys=sampled.keys, partition_id=partition)
    rows = []
    for i, key in enumerate(sampled.keys):
        uid, member, branch = key.split("_")
        rows.append(
            {
                "task": task_of[uid],
                "member": int(member),
                "branch": int(branch),
                "tag": sampled.tags[i],
                "prompt": data["prompts"][i].tolist(),
                "response": data["responses"][i].tolist(),
                "mask": data["response_mask"][i].tolist(),
                "loss_mask": data["loss_mask"][i].tolist(),
                "input_ids": data["input_ids"][i].tolist(),
                "position_ids": data["position_ids"][i].tolist(),
                "logprobs": data["rollout_log_probs"][i].tolist(),
                "experts": data["routed_experts"][i].squeeze(1).tolist(),
                "score": float(data["rm_scores"][i].sum()),
                "score_at": int(data["rm_scores"][i].abs().argmax()),
                "num_turns": int(data["num_turns"][i]),
            }
        )
    if not validate:
        trainer = SimpleNamespace(config=config)
        PPOTrainer._compute_old_log_prob(trainer, sampled, {})
        PPOTrainer._compute_advantage(trainer, sampled, {})
        trained = tq.kv_batch_get(keys=sampled.keys, partition_id=partition, select_fields=["advantages"])
        for i, row in enumerate(rows):
            row["advantage"] = float(trained["advantages"][i].sum())
    tq.kv_clear(keys=sampled.keys, partition_id=partition)
    return {
        "rows": rows,
        "fields": sorted(data.keys()),
        "on_return": {task_of[uid]: status for uid, status in on_return.items()},
        "statuses": {task_of[uid]: status for uid, status in statuses.items()},
    }


def start_ray() -> None:
    """Start Ray, with up to three attempts. Ray gives its processes 30 s (ray/_private/node.py), too little on a busy
    machine.
    """
    for _ in range(2):
        try:
            ray.init(num_cpus=4, include_dashboard=False)
        except Exception as error:  # noqa: BLE001 (ray raises Exception itself)
            print(f"ray did not start: {error}", file=sys.stderr)
            ray.shutdown()
        else:
            return
    ray.init(num_cpus=4, include_dashboard=False)


def main(folder: Path) -> None:
    """Run both trainers; write `played.json`."""
    tiny_model.make(folder / "model")
    write_dataset(folder / "train.parquet")
    config = settings(folder)
    start_ray()
    server = FakeServer.remote(str(folder / "model"))
    balancer = get_router_handle({"fake": server})
    rewards = RewardLoopManager(config)
    tokenizer = hf_tokenizer(str(folder / "model"))
    dataset = RLHFDataset(str(folder / "train.parquet"), tokenizer, config.data)
    tq.init(config.transfer_queue)
    shared = config.copy()
    shared.actor_rollout_ref.rollout.agent.num_workers = 2
    legacy = make_manager(shared, LLMServerClient(config, balancer), rewards)
    v1 = make_manager(config, FullyAsyncLLMServerClient(config, balancer), rewards)
    buffer = ReplayBuffer("sync", config.trainer, None, "drop", config.trainer, poll_interval=0.05)
    played: dict[str, Any] = {"legacy": [], "v1": []}
    for step in STEPS:
        ray.get(server.set_version.remote(step))
        played["legacy"].append(play_legacy(legacy, config, dataset, step, list(LEGACY)))
    played["graded_by_verl"] = play_legacy(legacy, config, dataset, STEPS[-1], ["sum", "dead-sum", "flaky-sum"])
    for step in STEPS:
        ray.get(server.set_version.remote(step))
        names = [*LEGACY, *(["cut", "sum"] if step == STEPS[-1] else [])]
        played["v1"].append(play_v1(v1, config, dataset, buffer, server, step, names))
    played["validation"] = play_v1(v1, config, dataset, buffer, server, STEPS[-1], ["plain"], validate=True)
    legacy.close()
    v1.close()
    played["seen"] = ray.get(server.seen.remote())
    played["texts"] = {
        "words": WORDS,
        "ids": {word: tokenizer.encode(word) for word in WORDS.values()},
        "wrong": tokenizer.encode("wrong"),
    }
    played["conversation"] = asyncio.run(facts.conversation(tokenizer))
    played["loader_errors"], played["gpt_oss"] = facts.loader_errors(), facts.gpt_oss_texts()
    (folder / "played.json").write_text(json.dumps(played))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
