"""A step of each of verl's trainers with rollouts as trials on a Harbor server. Writes the results as JSON.

The tests run it with the Python of hack/verl-environment: `python play_remote.py OUTPUT_FOLDER TASKS URL`.
"""

import json
import sys
from pathlib import Path

import play
import ray
import tiny_model
import transfer_queue as tq
from fake_server import FakeServer
from omegaconf import OmegaConf
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.router import get_router_handle

from agent_runtime.integrations.harbor_server.dataset import harbor_files


def main(folder: Path, tasks: str, url: str) -> None:
    """Run the steps; write `played.json`."""
    tiny_model.make(folder / "model")
    config = play.settings(folder)
    added = {
        "data": {"train_harbor_dir": tasks, "harbor_cache_dir": str(folder)},
        "remote_agent": {"agent_name": "mini", "harbor_server_url": url},
    }
    OmegaConf.set_struct(config, False)
    config = OmegaConf.merge(config, added)
    files = harbor_files(OmegaConf.to_container(config))["train_files"]
    play.start_ray()
    server = FakeServer.remote(str(folder / "model"))
    balancer = get_router_handle({"fake": server})
    rewards = RewardLoopManager(config)
    dataset = RLHFDataset(files, hf_tokenizer(str(folder / "model")), config.data)
    play.PROMPTS = {"hello": ""}
    tq.init(config.transfer_queue)
    legacy = play.make_manager(config, LLMServerClient(config, balancer), rewards)
    v1 = play.make_manager(config, FullyAsyncLLMServerClient(config, balancer), rewards)
    buffer = ReplayBuffer("sync", config.trainer, None, "drop", config.trainer, poll_interval=0.05)
    ray.get(server.set_version.remote(1))
    played = {
        "legacy": play.play_legacy(legacy, config, dataset, 1, ["hello"]),
        "v1": play.play_v1(v1, config, dataset, buffer, server, 1, ["hello"]),
        "seen": ray.get(server.seen.remote()),
    }
    legacy.close()
    v1.close()
    (folder / "played.json").write_text(json.dumps(played))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
