"""Replaces a GPU: a server with the interface of verl's LLM servers, whose policy is a few rules. It records every
call.
"""

import asyncio
import contextlib
import json
import re
from collections import Counter
from typing import Any

import numpy as np
import ray
from transformers import AutoTokenizer
from verl.workers.rollout.replica import TokenOutput

HELD_SECONDS = 30
"""Limit of a hold. A caller that waits for rollouts meanwhile gets them at its end, so that a test can detect the wait.
"""


@ray.remote
class FakeServer:
    """Every second rollout of a prompt gets the wrong word."""

    def __init__(self, model: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.version = 0
        self.log: list[dict[str, Any]] = []
        self.begun: Counter[str] = Counter()
        self.sampled = 0
        self.rest: dict[str, list[int]] = {}
        """What is still to come of answers that were cut."""
        self.free = asyncio.Event()
        self.free.set()

    async def hold(self) -> None:
        """Hold all answers until `release`."""
        self.free.clear()

    async def release(self) -> None:
        """Answer all held calls."""
        self.free.set()

    async def set_version(self, version: int) -> None:
        """Have other weights answer from now on, as after a weight update."""
        self.version = version
        self.begun.clear()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **fields: Any
    ) -> TokenOutput:
        """See verl's vLLMHttpServer.generate."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.free.wait(), HELD_SECONDS)
        text = self.tokenizer.decode(prompt_ids)
        task = re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)[1]
        if "DEAD" in task:
            raise RuntimeError("out of memory")
        if text.endswith("<|im_start|>assistant\n"):
            if "FLAKY" in task and text.count("<|im_start|>assistant") == 1 and self._number(task) == 0:
                raise RuntimeError("a replica went away")
            ids = self.tokenizer.encode(self._answer(text, task) + "<|im_end|>", add_special_tokens=False)
        else:
            ids = self.rest[task]
        stop_reason = "completed"
        if "CUT" in task and task not in self.rest:
            half = len(ids) // 2
            ids, self.rest[task], stop_reason = ids[:half], ids[half:], "aborted"
        assert len(ids) <= sampling_params["max_tokens"], (len(ids), sampling_params)
        seen = {"prompt": list(prompt_ids), "ids": ids, "version": self.version, "params": dict(sampling_params)}
        self.log.append(seen)
        output = TokenOutput(
            token_ids=ids,
            log_probs=[logprob_of(self.version)] * len(ids),
            stop_reason=stop_reason,
            extra_fields={"global_steps": self.version},
            routed_experts=experts_of([*prompt_ids, *ids][:-1]),
        )
        if stop_reason == "aborted":
            self.version += 1
        return output

    async def seen(self) -> list[dict[str, Any]]:
        """Return every answered call."""
        return self.log

    def _number(self, task: str) -> int:
        self.begun[task] += 1
        return self.begun[task] - 1

    def _answer(self, text: str, task: str) -> str:
        self.sampled += 1
        if "SUM" in task:
            return f"#### {4 if self._number(task) % 2 == 0 else 5}"
        told = text.rsplit("<tool_response>", 1)[1] if "<tool_response>" in text else None
        if "Finish now." in text or (told is not None and "the word is" not in told):
            return f"Done, answer {self.sampled}."
        if "LOOKUP" in task and "the word is" not in text:
            return _call("lookup", {"name": "verl"})
        found = re.search(r"the word is (\w+)", text) or re.search(r"the word (\w+)", task)
        word = found[1] if self._number(task) % 2 == 0 else "wrong"
        return f"Call {self.sampled}." + _call("bash", {"command": f"echo {word} > out.txt"})


def experts_of(ids: list[int]) -> np.ndarray:
    """Return routed experts by a rule: two experts in one layer, from a token and its position."""
    return np.array([[[token % 200, position % 200]] for position, token in enumerate(ids)], dtype=np.uint8)


def logprob_of(version: int) -> float:
    """Return the log probability that shows which weights sampled a token."""
    return -0.25 * (version + 1)


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"\n<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
