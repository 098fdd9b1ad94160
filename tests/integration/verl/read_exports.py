"""Runs with verl: reads conversations and token sequences with verl's own classes, and prints what it found."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import tiny_model
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_extern_object

folder = Path(sys.argv[1])
tiny_model.make(folder / "model")
tokenizer = AutoTokenizer.from_pretrained(folder / "model")
conversations = str(folder / "verl.parquet")

prompts = RLHFDataset(
    [conversations],
    tokenizer,
    OmegaConf.create({"cache_dir": str(folder / "cache"), "filter_overlong_prompts_workers": 1}),
)
recorded = load_extern_object("pkg://agent_runtime.integrations.verl.conversations", "RecordedConversations")
sft = recorded([conversations], tokenizer, OmegaConf.create({"max_length": 4096}))


def trained(sample):
    return tokenizer.decode(sample["input_ids"][sample["loss_mask"] == 1])


def whole(sample):
    return tokenizer.decode(sample["input_ids"][sample["attention_mask"] == 1])


def loop_output(row):
    fields = {name: row[name] for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs")}
    return AgentLoopOutput(**fields, reward_score=row["reward"], metrics=AgentLoopMetrics())


outputs = [loop_output(row).as_dict() for row in pq.read_table(folder / "tokens.parquet").to_pylist()]
print(
    json.dumps(
        {
            "prompts": [prompts[number]["raw_prompt"] for number in range(len(prompts))],
            "rewards": [prompts[number]["reward"] for number in range(len(prompts))],
            "trained": [trained(sft[number]) for number in range(len(sft))],
            "whole": whole(sft[0]),
            "responses": [output["responses"].tolist() for output in outputs],
            "masks": [output["response_mask"].tolist() for output in outputs],
        }
    )
)
