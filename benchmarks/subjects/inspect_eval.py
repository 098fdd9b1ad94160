"""Rollouts of Inspect in its own process: samples whose tool does nothing. Runs in its own virtual environment.

It records each sample in its log, as we record each rollout, and scores nothing.
"""

import asyncio
import os
import tempfile
from dataclasses import asdict
from typing import Any

os.environ["INSPECT_DISPLAY"] = "none"

from inspect_ai import Task, eval_async  # type: ignore[import-not-found]
from inspect_ai.dataset import Sample  # type: ignore[import-not-found]
from inspect_ai.model import get_model  # type: ignore[import-not-found]
from inspect_ai.solver import generate, use_tools  # type: ignore[import-not-found]
from inspect_ai.tool import tool  # type: ignore[import-not-found]

from benchmarks.conversation import answer_questions
from benchmarks.measuring import Meter, pin_to_core

MEASURED_CORE = 0


@tool  # type: ignore[untyped-decorator]
def noop() -> Any:
    async def execute() -> str:
        """Does nothing."""
        return "ok"

    return execute


async def measure(question: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of concurrent samples. The question is {base_url, model, rollouts, turns}."""
    rollouts = question["rollouts"]
    task = Task(
        dataset=[Sample(input="Call noop until told otherwise.", id=number + 1) for number in range(rollouts)],
        solver=[use_tools(noop()), generate(tool_calls="loop")],
    )
    model = get_model(f"openai-api/instant/{question['model']}", base_url=question["base_url"], api_key="none")
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-bench-") as folder:
        meter = Meter()
        (log,) = await eval_async(
            task,
            model=model,
            max_samples=rollouts,
            max_connections=rollouts,
            message_limit=4 * question["turns"],
            log_dir=folder,
        )
        cost = meter.read()
        turns = sum(map(_turns, log.samples))  # it reads them from the log only now
    return {**asdict(cost), "turns": turns}


def _turns(sample: Any) -> int:
    """Return the model calls of a sample. Raises RuntimeError if it failed."""
    if sample.error:
        raise RuntimeError(f"a sample failed: {sample.error.message}")
    return sum(1 for message in sample.messages if message.role == "assistant")


if __name__ == "__main__":
    pin_to_core(MEASURED_CORE)
    asyncio.run(answer_questions(measure))
