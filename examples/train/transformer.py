"""Learning with a real transformer and real vLLM: `python -m examples.train.transformer`.

The policy is a Llama of 0.1 million parameters with its own tokenizer. It begins without any knowledge: `imitate` teaches
it the form of a conversation from rollouts of a player who moves at random; then `trainer.py`'s loop teaches it where to go.

Needs torch, transformers and vLLM (`pip install vllm`; `hack/vllm-environment` makes an environment without a GPU).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM

from agent_rollouts.client import Client
from agent_rollouts.records import Branch
from examples.train import lake, policy
from examples.train.laptop import LaptopServer, job_for, learn, server_process
from examples.train.trainer import Sample, Settings, Trainer, check_branch, trained

SPECIAL, END = policy.SPECIAL, policy.SPECIAL.index("<|end|>")
"""The tokens of the chat template have the first ids."""
PIECES = r"<answer>|</answer>|\n| ?[^\s<]+|."
VOCABULARY = 400
CONTEXT_LENGTH = 1024
"""20 turns have some 400 tokens; 700 if no answer has the format."""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

IMITATED = 16
"""Groups of random play to imitate."""
IMITATION_STEPS, IMITATION_RATE, BATCH = 120, 3e-3, 8
PASSES, CLIP = 4, 0.2
"""PPO: how often each sample is used in one update, and how far a token's probability may move."""
SETTINGS = Settings(tiles=lake.SMALL, groups=16, updates=12, learning_rate=1e-3)
SAME = 1e-2
"""Largest allowed difference of a log probability and its recomputation. Both have 32 bits, and other orders of addition."""
START_SECONDS = 900.0

Model = LlamaForCausalLM


async def random_play(output: Path, seed: int) -> list[str]:
    """Return episodes of a policy that knows the form of an answer and nothing else, as text."""
    async with server_process() as url, Client().session(job_for(url, output, seed), new=True) as stream:
        for number in range(IMITATED):
            await stream.submit(lake.task(number, slippery=False, tiles=lake.SMALL), "random")
        await stream.close()
        groups = [group async for group in stream]
        branches = [branch for group in groups for result in group.results for branch in await stream.tokens(result)]
        return [policy.decode(branch.token_ids, special=True) for branch in branches]


def fresh_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer, learned from texts."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def fresh_model(seed: int) -> Model:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT_LENGTH,
            eos_token_id=END,
            bos_token_id=END,
            pad_token_id=END,
        )
    )


def log_probabilities(model: Model, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return (sequences, positions - 1): the log probability of each token after the first. Ends are padded."""
    ids = _padded(sequences, END, torch.long)
    logits = model(input_ids=ids).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]


def imitate(model: Model, sequences: Sequence[Sequence[int]], seed: int, steps: int = IMITATION_STEPS) -> None:
    """Train to continue conversations."""
    optimizer, chance = torch.optim.AdamW(model.parameters(), lr=IMITATION_RATE, weight_decay=0.0), random.Random(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = IMITATION_RATE * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        batch = chance.sample(sequences, BATCH)
        mask = _padded([[1] * len(ids) for ids in batch], 0, torch.float)[:, 1:]
        _descend(model, optimizer, -(log_probabilities(model, batch) * mask).sum() / mask.sum())


class TransformerTrainer(Trainer):
    """The weights are a torch module, and a step is PPO's."""

    def __init__(self, *given: Any, model: Model) -> None:
        super().__init__(*given)
        self.weights = model
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=self._settings.learning_rate, weight_decay=0.0, betas=(0.9, 0.95)
        )

    def check(self, branches: Sequence[Branch]) -> None:
        """See Trainer."""
        for first in range(0, len(branches), BATCH):
            batch = branches[first : first + BATCH]
            with torch.inference_mode():
                computed = log_probabilities(self.weights, [branch.token_ids for branch in batch])
            for branch, row in zip(batch, computed.numpy(), strict=True):
                places = trained(branch)
                check_branch(branch, str(self.version), row[[place - 1 for place in places]], SAME)

    def learn(self, samples: Sequence[Sample]) -> None:
        """See Trainer."""
        useful, chance = [sample for sample in samples if sample.advantage], random.Random(self.version)
        for _ in range(PASSES):
            chance.shuffle(useful)
            for first in range(0, len(useful), 4 * BATCH):
                self._step(useful[first : first + 4 * BATCH])

    def _step(self, samples: Sequence[Sample]) -> None:
        branches = [sample.branch for sample in samples]
        mask = _padded([branch.mask for branch in branches], 0, torch.float)[:, 1:]
        old = _padded([branch.logprobs or [] for branch in branches], 0, torch.float)[:, 1:]
        advantages = torch.tensor([sample.advantage for sample in samples])[:, None]
        ratio = (log_probabilities(self.weights, [branch.token_ids for branch in branches]) - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        _descend(self.weights, self._optimizer, -(gain * mask).sum() / mask.sum())


def _descend(model: Model, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _padded(rows: Sequence[Sequence[float]], filler: float, kind: torch.dtype) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows], dtype=kind)


class VllmServer(LaptopServer):
    """A policy server that is vLLM. Its checksums are of its own layout of the weights, so rollouts show what it serves."""

    def save(self, weights: Any, folder: Path) -> None:
        weights.save_pretrained(folder)

    def verify(self, version: int, weights: Any, checksums: Mapping[str, str]) -> None:
        pass


def save_first(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write all that vLLM needs to start."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@contextlib.asynccontextmanager
async def vllm_process(folder: Path, port: int, log: Path) -> AsyncIterator[str]:
    """Serve a folder's model. Raises RuntimeError if vLLM ends before it answers."""
    flags = ["--served-model-name", "lake", "--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
    # On the CPU vLLM 0.32 ends where it splits the prompt of a request with a seed.
    flags += ["--no-enable-chunked-prefill"]
    flags += ["--max-model-len", str(CONTEXT_LENGTH), "--dtype", "float32", "--enforce-eager"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(folder), *flags),
            env=os.environ | environment | {"VLLM_NO_USAGE_STATS": "1"},
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as http:
            while not await _answers(http, url):
                if process.returncode is not None:
                    raise RuntimeError(f"vLLM has ended; the end of {log}:\n{log.read_text()[-2000:]}")
                await asyncio.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def imitator(texts: Sequence[str], seed: int) -> tuple[Model, Tokenizer]:
    """Return a model that answers in the right form, and as good as at random, with its tokenizer."""
    tokenizer = fresh_tokenizer(texts)
    model = fresh_model(seed)
    imitate(model, [tokenizer.encode(text).ids for text in texts], seed)
    return model, tokenizer


async def train(
    output: Path, settings: Settings, seed: int, port: int, trainer: type[TransformerTrainer] = TransformerTrainer
) -> list[float]:
    """Return the learning curve; the rollouts go into `output`. vLLM listens on that port. Raises as `learn`."""
    with tempfile.TemporaryDirectory(prefix="lake-") as scratch:
        folder = Path(scratch)
        model, tokenizer = imitator(await random_play(folder / "random", seed), seed)
        save_first(model, tokenizer, folder / "first")
        async with vllm_process(folder / "first", port, folder / "vllm.log") as url:
            return await learn(url, output, settings, seed, partial(trainer, model=model), VllmServer)


async def _main(options: argparse.Namespace) -> None:
    settings = replace(SETTINGS, groups=options.groups, updates=options.updates)
    await train(options.output, settings, options.seed, options.port)
    print(f"rolloutctl report {options.output} draws the curve")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.train.transformer", description=__doc__)
    parser.add_argument("--updates", type=int, default=SETTINGS.updates)
    parser.add_argument("--groups", type=int, default=SETTINGS.groups, help="groups of 8 rollouts of each update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000, help="port of vLLM")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the recorded run (default: out)")
    asyncio.run(_main(parser.parse_args()))
