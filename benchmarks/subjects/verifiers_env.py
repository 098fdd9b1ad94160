"""Rollouts of verifiers in its own process: a MultiTurnEnv whose tool does nothing. Runs in its own virtual environment.

It neither records nor scores here, which is an advantage for it.
"""

import asyncio
import os
from dataclasses import asdict
from typing import Any

import verifiers as vf  # type: ignore[import-not-found]
from datasets import Dataset  # type: ignore[import-not-found]
from verifiers.types import ClientConfig, Tool, ToolMessage  # type: ignore[import-not-found]

from benchmarks.conversation import answer_questions
from benchmarks.measuring import Meter, pin_to_core

MEASURED_CORE = 0


class NoopToolEnv(vf.MultiTurnEnv):  # type: ignore[misc]
    """Answers every tool call with `ok`; an answer without a tool call ends the rollout."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [ToolMessage(tool_call_id=call.id, content="ok") for call in messages[-1].tool_calls or []]

    @vf.stop  # type: ignore[untyped-decorator]
    async def no_tool_called(self, state: Any) -> bool:
        return bool(state["trajectory"]) and not state["trajectory"][-1]["completion"][-1].tool_calls


async def measure(question: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of concurrent rollouts. The question is {base_url, model, rollouts, turns}."""
    env = NoopToolEnv(
        dataset=Dataset.from_list([{"question": "Call noop until told otherwise.", "answer": ""}]),
        tool_defs=[Tool(name="noop", description="Does nothing.", parameters={"type": "object", "properties": {}})],
        max_turns=question["turns"],
        score_rollouts=False,
    )
    os.environ.setdefault("BENCHMARK_KEY", "none")
    client = ClientConfig(api_key_var="BENCHMARK_KEY", api_base_url=question["base_url"])
    meter = Meter()
    outputs = await _generate(env, client, question["model"], question["rollouts"])
    cost = meter.read()
    return {**asdict(cost), "turns": sum(_turns(output) for output in outputs)}


async def _generate(env: NoopToolEnv, client: ClientConfig, model: str, rollouts: int) -> list[Any]:
    prompt = [{"role": "user", "content": "Call noop until told otherwise."}]
    inputs = [{"prompt": prompt, "answer": "", "example_id": number} for number in range(rollouts)]
    results = await env.generate(inputs, client, model, max_concurrent=rollouts, independent_scoring=True)
    outputs: list[Any] = results["outputs"]
    return outputs


def _turns(output: Any) -> int:
    """Return the model calls of a rollout. Raises RuntimeError if it failed."""
    if output.get("error"):
        raise RuntimeError(f"a rollout failed: {output['error']}")
    return sum(1 for message in output["completion"] if message["role"] == "assistant")


if __name__ == "__main__":
    pin_to_core(MEASURED_CORE)
    asyncio.run(answer_questions(measure))
