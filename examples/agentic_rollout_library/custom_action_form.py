"""Tool calls in XML, parsed by the agent, and a system prompt that is made from the tools and the task's options."""

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.agents.base_class import BaseAgent, ParsedAnswer, Trajectory
from agent_runtime.agents.react import describe
from agent_runtime.agents.registry import agent
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.models.from_environment import model_from_environment
from rollout_api.base import API_VERSION
from rollout_api.records import Message, Observation
from rollout_api.rollout_job import RolloutJob
from rolloutctl.client import Client

CALL = re.compile(r"<function=(\w+)>(.*?)</function>", re.DOTALL)
ARGUMENT = re.compile(r"<parameter=(\w+)>(.*?)</parameter>", re.DOTALL)


@agent("XmlCalls")
class XmlCalls(BaseAgent):
    """Calls tools as <function=NAME><parameter=NAME>VALUE</parameter></function>."""

    def initial_messages(self) -> list[Message]:
        system = f"""\
You are {self.context.spec.config["role"]}. {self.context.spec.config["instructions"]}

Tools:
{describe(self.tools)}

To call one, write <function=NAME><parameter=NAME>VALUE</parameter></function>."""
        return [{"role": "system", "content": system}, {"role": "user", "content": self.context.task.prompt}]

    def tool_definitions(self, trajectory: Trajectory) -> Sequence[Mapping[str, Any]]:
        return []

    def parse_llm_output(self, reply: ModelReply) -> ParsedAnswer:
        call = CALL.search(reply.text)
        if call is None:
            return super().parse_llm_output(reply)
        return ParsedAnswer([ToolCall("call", call[1], json.dumps(dict(ARGUMENT.findall(call[2]))))])

    def observation_message(self, call: ToolCall, observation: Observation) -> Message:
        return {"role": "user", "content": f"<result>{observation.content}</result>"}


async def main() -> None:
    job = RolloutJob.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": "RolloutJob",
            "metadata": {"name": "custom-action-form"},
            "spec": {
                "mode": "Eval",
                "model": model_from_environment(os.environ),
                "agent": {
                    "type": "XmlCalls",
                    "tools": ["bash", "finish"],
                    "config": {"role": "a Python developer", "instructions": "Keep to PEP 8."},
                },
                "tasks": {
                    "inline": [
                        {
                            "name": "fix",
                            "prompt": "add.py subtracts. Mend it.",
                            "files": [{"path": "add.py", "content": "print(2 - 3)\n"}],
                            "verifier": {"commands": ['test "$(python3 add.py)" = 5']},
                        }
                    ]
                },
                "output": {"uri": "out"},
            },
        }
    )
    async for group in Client().run(job):
        print(f"{group.task}: reward {group.results[0].reward}")


asyncio.run(main())
