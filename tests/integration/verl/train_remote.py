"""Runs with verl: starts the launcher up to verl's trainer, and prints what the trainer gets."""

import json
import os
import sys
from pathlib import Path

import tiny_model
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset

from agent_runtime.integrations.harbor_server.rows import with_remote_agent
from agent_runtime.integrations.harbor_server.settings import SettingsError, read_settings
from agent_runtime.integrations.verl import train
from agent_runtime.integrations.verl.job import Kind, rollout_job

folder = Path(sys.argv.pop(1))


def tell(config):
    tiny_model.make(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    OmegaConf.update(config, "data.cache_dir", str(folder / "cache"), force_add=True)
    rows = RLHFDataset(config.data.train_files, tokenizer, config.data)
    plain = OmegaConf.to_container(config, resolve=True)
    settings = read_settings(plain, os.environ)
    job = rollout_job(with_remote_agent(plain, settings), Kind(members=2, validate=False))
    told = {
        "agent_name": settings.agent_name,
        "max_retries": settings.max_retries,
        "harbor_timeout": settings.harbor_timeout,
        "agent": job.spec.agent.type,
        "attempts": job.spec.attempts.limit,
        "manager": config.actor_rollout_ref.rollout.agent.agent_loop_manager_class,
        "variables": OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars),
        "rows": [
            {name: rows[number][name] for name in ("instance_id", "local_task_path", "raw_prompt")}
            for number in range(len(rows))
        ],
    }
    try:
        train.prepare(config, {"REMOTE_AGENT_ENVIRONMENT_KWARGS": "{not json"}, [])
    except SettingsError as error:
        told["bad_json"] = str(error)
    print(json.dumps(told))


train.train = tell
train.main()
