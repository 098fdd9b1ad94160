"""The model is an async function. It returns text, a message with `tool_calls`, or a ModelReply with token ids."""

import asyncio
from typing import Any

from rollout_api.base import API_VERSION
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client


async def generate(
    messages: list[dict[str, Any]], max_tokens: int = 512, temperature: float = 0.7, **kw: Any
) -> str | dict[str, Any]:
    """Call here what you have. This one calls the calculator once and repeats what it said."""
    if messages[-1]["role"] == "tool":
        return f"It is {messages[-1]['content']} (at most {max_tokens} tokens, temperature {temperature})."
    function = {"name": "calculator", "arguments": '{"expression": "6 * 7"}'}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


async def main() -> None:
    job = RolloutJob.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": "RolloutJob",
            "metadata": {"name": "custom-llm-function"},
            "spec": {
                "mode": "Eval",
                "model": {"function": "__main__:generate"},
                "sampling": {"maxTokens": 256},
                "agent": {"tools": ["calculator"]},
                "tasks": {"inline": [{"name": "product", "prompt": "What is 6 * 7?"}]},
                "output": {"uri": "out"},
            },
        }
    )
    async for group in Client().run(job):
        print(f"{group.task}: {group.results[0].message}")


asyncio.run(main())
