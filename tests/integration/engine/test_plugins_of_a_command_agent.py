"""A program in the sandbox runs its tools itself: plugins see the calls in its model's answers, and change none."""

import sys
from pathlib import Path

from agent_rollouts.plugins import Refuse
from agent_runtime.engine.events import Event, JobStarted
from agent_runtime.engine.run import run_job
from agent_runtime.models.base import ToolCall as Call
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.records import CommandVerdict, Result
from rollout_api.rollout_job import RolloutJob
from tests.support.vllm_server import Answer, ToolCall, VllmStandIn

PROGRAM = """
import json, openai, os, subprocess
client = openai.OpenAI()
tool = {"type": "function", "function": {"name": "sh", "parameters": {"type": "object", "properties": {}}}}
messages = [{"role": "user", "content": "Work."}]
for _ in range(2):
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[tool])
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        subprocess.run(json.loads(call.function.arguments)["command"], shell=True)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
"""


class Watches:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def before_tool_call(self, call: Call, key: str) -> None:
        self.seen.append((call.arguments, key.partition(":")[2]))

    def filter_tool_call(self, call: Call) -> Refuse:
        self.seen.append(("filtered", call.id))
        return Refuse("never asked")

    def after_tool_call(self) -> None:
        self.seen.append(("after", ""))

    def after_verifier_command(self, result: CommandVerdict) -> None:
        self.seen.append((f"verifier {result.exit_code}", ""))


async def test_plugins_see_a_command_agents_calls_and_refuse_none(tmp_path: Path) -> None:
    script = [Answer("", [ToolCall("sh", {"command": "echo 1 > done"})]), Answer("All is done.")]
    watches, events = Watches(), list[Event]()
    async with VllmStandIn(script={"*": script}) as server:
        task = {
            "name": "work",
            "prompt": "Work.",
            "files": [{"path": "agent.py", "content": PROGRAM}],
            "verifier": {"commands": ["test -s done"]},
        }
        job = RolloutJob.model_validate(
            {
                "apiVersion": "rollout.dev/v1alpha1",
                "kind": "RolloutJob",
                "metadata": {"name": "watched"},
                "spec": {
                    "tasks": {"inline": [task]},
                    "model": {"endpoint": {"baseURL": f"{server.url}/v1", "name": "policy", "callSeconds": 120}},
                    "agent": {"type": "Command", "command": [sys.executable, "agent.py"]},
                    "attempts": {"limit": 1},
                    "output": {"uri": str(tmp_path / "out")},
                },
            }
        )
        summary = await run_job(job, base_dir=tmp_path, environ={}, plugins=[watches], observer=events.append)
    assert watches.seen == [('{"command": "echo 1 > done"}', "turn-0:call-0"), ("verifier 0", "")]
    run = await open_run(Store.open(str(tmp_path / "out"), {}), summary.folder)
    result: Result = run.results()[0]
    assert (result.reward, result.plugins["Watches"].calls, result.plugins["Watches"].failed) == (1, 2, 0)
    (started,) = [event for event in events if isinstance(event, JobStarted)]
    assert any("filter_tool_call and after_tool_call will not be called" in said for said in started.warnings)
