"""Each program of agentic-rollout-library runs here, with a model that gives the answers that it expects."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

EXAMPLES = Path(__file__).parents[2] / "examples" / "agentic_rollout_library"

Answer = str | tuple[str, dict[str, Any]]
"""Text, or a tool and its arguments."""


def action(tool: str, arguments: dict[str, Any]) -> str:
    """A tool call in text."""
    return f"Thought: That helps.\nAction: {tool}\nAction Input: {json.dumps(arguments)}"


class ScriptedServer:
    """OpenAI's and Anthropic's protocol. The n-th answer of a conversation is the n-th of the script for its prompt."""

    def __init__(self) -> None:
        self.url = ""
        self.scripts: dict[str, Sequence[Answer]] = {}
        """By text that stands in the conversation."""
        self.keys: set[str] = set()
        self.bodies: list[dict[str, Any]] = []

    def answer(self, body: dict[str, Any]) -> Answer:
        for prompt, script in self.scripts.items():
            if prompt in json.dumps(body["messages"]):
                self.bodies.append(body)
                turn: int = sum(message["role"] == "assistant" for message in body["messages"])
                return script[turn]
        return "ok"

    async def openai(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers["Authorization"])
        answer = self.answer(await request.json())
        message: dict[str, Any] = {"role": "assistant", "content": answer if isinstance(answer, str) else None}
        if not isinstance(answer, str):
            function = {"name": answer[0], "arguments": json.dumps(answer[1])}
            message["tool_calls"] = [{"id": "call", "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        return web.json_response({"object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})

    async def anthropic(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers["x-api-key"])
        answer = self.answer(await request.json())
        block: dict[str, Any] = {"type": "text", "text": answer}
        if not isinstance(answer, str):
            block = {"type": "tool_use", "id": "call", "name": answer[0], "input": answer[1]}
        stop = "end_turn" if isinstance(answer, str) else "tool_use"
        usage = {"input_tokens": 7, "output_tokens": 2}
        message = {"type": "message", "role": "assistant", "model": "m", "content": [block], "usage": usage}
        return web.json_response(message | {"stop_reason": stop})


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    served, app = ScriptedServer(), web.Application()
    app.router.add_post("/v1/chat/completions", served.openai)
    app.router.add_post("/v1/messages", served.anthropic)
    test_server = TestServer(app)
    await test_server.start_server()
    served.url = str(test_server.make_url("")).rstrip("/")
    yield served
    await test_server.close()


async def run(example: str, folder: Path, server: ScriptedServer, *arguments: str, family: str = "OPENAI") -> list[str]:
    """Return the lines that a program prints. It starts in an empty folder."""
    url = server.url if family == "ANTHROPIC" else f"{server.url}/v1"
    name = "LLM_MODEL_NAME" if family == "LLM" else f"{family}_MODEL"
    variables = {name: "m", f"{family}_BASE_URL": url, f"{family}_API_KEY": "sk-test"}
    return (await started(folder, variables, str(EXAMPLES / f"{example}.py"), *arguments)).splitlines()


async def started(folder: Path, variables: Mapping[str, str], *arguments: str) -> str:
    """Run Python; return its output."""
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await program.communicate()
    assert program.returncode == 0, errors.decode()
    return output.decode()


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    assert [name.stem for name in EXAMPLES.glob("*.py") if f'run("{name.stem}"' not in source] == []


async def test_the_first_program_makes_its_file(tmp_path: Path, server: ScriptedServer) -> None:
    create = {"command": "create", "path": "hello.py", "file_text": "print('hello')\n"}
    server.scripts["Create a hello.py"] = [action("editor", create), action("finish", {"message": "There it is."})]
    assert await run("basic_usage", tmp_path, server, family="LLM") == ["There it is."]
    assert server.keys == {"Bearer sk-test"}
    assert "print('hello')" in await started(tmp_path, {}, "-m", "rolloutctl.main", "show", "task-001", "0")


async def test_configuration_describes_an_agent_completely(tmp_path: Path, server: ScriptedServer) -> None:
    server.scripts["a seventh of 5"] = [action("calculator", {"expression": "5 / 7"}), "Final Answer: 0.7143"]
    assert await run("configuration", tmp_path, server) == ["Final response: 0.7143", "Total steps: 6"]
    assert server.bodies[1]["messages"][-1]["content"] == "Observation: 0.7143", "as precise as configured"
    assert {(body["max_tokens"], body["temperature"]) for body in server.bodies} == {(512, 0.7)}
    assert list(tmp_path.glob("trajectories/math-example-*/job.json")), "saved where the configuration says"


async def test_custom_tools_are_called_and_their_errors_reported(tmp_path: Path, server: ScriptedServer) -> None:
    server.scripts["warm is it in Berlin"] = [
        ("weather", {"city": "Bonn"}),
        ("weather", {"city": "Berlin"}),
        ("convert_temperature", {"degrees": 20, "to": "F"}),
        ("arithmetic", {"expression": "68 + 0"}),
        "68 F",
    ]
    printed = await run("custom_tool", tmp_path, server)
    assert [line for line in printed if line.startswith("action_result")] == [
        "action_result: unknown city 'Bonn'; the known cities are Berlin",
        'action_result: {"city": "Berlin", "degrees": 20.0}',
        "action_result: 68.0 F",
        "action_result: 68",
    ]
    assert printed[-1] == "final_answer: 68 F"
    told = {tool["function"]["name"]: tool["function"]["description"] for tool in server.bodies[0]["tools"]}
    assert told["arithmetic"] == "Works out one line, exactly."
    assert told["weather"] == "The temperature of a city today."


async def test_custom_agents_change_the_loop(tmp_path: Path, server: ScriptedServer) -> None:
    careful: list[Answer] = [("calculator", {"expression": "17 * 23"}), "It is 391.", "Yes, 391."]
    server.scripts = {"Use the calculator for every number": careful, "What is 17 * 23?": ["391"]}
    assert await run("custom_agent", tmp_path, server) == [
        "OneQuestion: 391 after 1 turns",
        "Careful: Yes, 391 after 3 turns",
    ]
    assert server.bodies[2]["messages"][-1]["content"] == "= 391"


async def test_custom_reasoning_agent_of_their_readme_runs(tmp_path: Path, server: ScriptedServer) -> None:
    server.scripts["What is 17 * 23?"] = ["calculate(17 * 23)", "It is 391."]
    assert await run("own_trajectory", tmp_path, server) == [
        "observation: What is 17 * 23?",
        "action: calculate(17 * 23)",
        'action_result: {"result": 391, "expression": "17 * 23"}',
        "final_answer: It is 391.",
    ]
    assert len(server.bodies) == 2
    shown = await started(tmp_path, {}, "-m", "rolloutctl.main", "show", "custom-reasoning", "0")
    assert "391" in shown, "each turn is recorded"


async def test_custom_tool_call_format_works(tmp_path: Path, server: ScriptedServer) -> None:
    command = "sed -i 's/2 - 3/2 + 3/' add.py"
    server.scripts["add.py subtracts"] = [
        "I had better look first.",
        f"I mend it. <function=bash><parameter=command>{command}</parameter></function>",
        "<function=finish><parameter=message>Done.</parameter></function>",
    ]
    assert await run("custom_action_form", tmp_path, server) == [
        f"bash: {{'command': {command!r}}}",
        "finish: {'message': 'Done.'}",
        "reward: 1.0",
    ]
    system = server.bodies[0]["messages"][0]["content"]
    assert system.startswith("You are a Python developer. Keep to PEP 8.\n\nTools:\n- bash: ")
    assert system.endswith("</function>."), "nothing is added to what the prompt says itself"
    assert "Your answer contains no valid action" in server.bodies[1]["messages"][-1]["content"]


async def test_a_prompt_is_built_of_parts(tmp_path: Path, server: ScriptedServer) -> None:
    assert [line for line in await run("prompt_builder", tmp_path, server) if line] == [
        "Available Tools:",
        "* bash: Run a command in a shell in the sandbox.",
        "* finish: End the work on the task.",
        "Context:",
        "- repo: pandas",
        "- version: 2.0",
        "Instructions:",
        "Your task: fix bug #123. Look at the code before you change it.",
    ]


async def test_claude_answers(tmp_path: Path, server: ScriptedServer) -> None:
    server.scripts["What is 17 * 23?"] = [("calculator", {"expression": "17 * 23"}), "391"]
    assert await run("claude_client", tmp_path, server, family="ANTHROPIC") == ["391", "and asked directly: ok"]
    assert server.keys == {"sk-test"}


async def test_a_function_that_asks_with_the_openai_package_is_a_model(tmp_path: Path, server: ScriptedServer) -> None:
    server.scripts["factorial of 5"] = [
        action("calculator", {"expression": "5*4*3*2*1"}),
        "Thought: That is it.\nFinal Answer: 120",
    ]
    assert await run("custom_llm_function", tmp_path, server) == ["calculator({'expression': '5*4*3*2*1'})", "120"]
    assert {(body["max_tokens"], body["temperature"]) for body in server.bodies} == {(256, 0.7)}


async def test_names_become_agents_and_tools(tmp_path: Path, server: ScriptedServer) -> None:
    printed = await run("registries", tmp_path, server)
    assert "MathTutor" in printed[0]
    assert "shout-2" in printed[1]
    assert "ReAct makes a ReAct" in printed
    assert "shout_1: ['text'], runs in the runner" in printed
    assert "did you mean 'ReAct'?" in printed[-1]


async def test_a_batch_runs_concurrently_and_one_failure_affects_no_other_task(
    tmp_path: Path, server: ScriptedServer
) -> None:
    printed = await run("batch", tmp_path, server)
    failed = "batch_5: FunctionFailed: __main__:llm_func raised ConnectionError: the server is down"
    assert printed[:-1] == [failed if number == 5 else f"batch_{number}: {number**2}" for number in range(8)]
    assert printed[-1] in ("at most 2 at once", "at most 3 at once", "at most 4 at once"), "side by side, and bounded"


async def test_a_trajectory_is_read_step_by_step(tmp_path: Path, server: ScriptedServer) -> None:
    command = {"command": "grep -c '' log.txt > n.txt"}
    server.scripts["number of lines of log.txt"] = [action("bash", command), action("finish", {"message": "Three."})]
    printed = await run("read_trajectory", tmp_path, server)
    assert [line.split(":")[0] for line in printed[:-5]] == [
        "0 observation",
        "0 observation",
        "0 thought",
        "0 action",
        "0 action_result",
        "1 thought",
        "1 action",
        "1 action_result",
        "1 final_answer",
    ]
    assert printed[-5:] == [
        "Completed: True",
        "Final response: Three.",
        "Tool calls: 2",
        "Final reward: 1.0",
        "Read again: True",
    ]


async def test_the_program_of_the_page_runs(tmp_path: Path, server: ScriptedServer) -> None:
    page = EXAMPLES.parents[1] / "docs" / "coming-from-agentic-rollout-library.md"
    program = tmp_path / "echo.py"
    program.write_text(page.read_text().split("```python\n")[1].split("```")[0])
    assert await run(str(program.with_suffix("")), tmp_path, server) == ["You said: Hello!"]
    assert len(list(tmp_path.glob("out/task-001-*"))) == 1
