"""Whoever comes from agentic-rollout-library runs each of its programs here, against a model that says what they expect."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

EXAMPLES = Path(__file__).parents[2] / "examples" / "agentic_rollout_library"

Answer = str | tuple[str, dict[str, Any]]
"""Text, or a tool and its arguments."""


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
                return script[sum(message["role"] == "assistant" for message in body["messages"])]
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
    """The lines that a program prints. Started in an empty folder, as a person would."""
    url = server.url if family == "ANTHROPIC" else f"{server.url}/v1"
    name = "LLM_MODEL_NAME" if family == "LLM" else f"{family}_MODEL"
    variables = {name: "m", f"{family}_BASE_URL": url, f"{family}_API_KEY": "sk-test"}
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / f"{example}.py"),
        *arguments,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await program.communicate()
    assert program.returncode == 0, errors.decode()
    return output.decode().splitlines()


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    assert [name.stem for name in EXAMPLES.glob("*.py") if f'run("{name.stem}"' not in source] == []


@pytest.mark.parametrize("family", ["OPENAI", "LLM"])
async def test_the_first_program_makes_its_file_and_is_graded(
    tmp_path: Path, server: ScriptedServer, family: str
) -> None:
    create = {"command": "create", "path": "hello.py", "file_text": "print('hello')\n"}
    server.scripts["Create a hello.py"] = [("editor", create), ("finish", {"message": "There it is."})]
    assert await run("basic_usage", tmp_path, server, family=family) == ["hello: Finished, reward 1.0"]
    assert server.keys == {"Bearer sk-test"}


async def test_a_react_agent_calculates(tmp_path: Path, server: ScriptedServer) -> None:
    server.scripts["factorial of 5"] = [
        'Thought: Five numbers.\nAction: calculator\nAction Input: {"expression": "5*4*3*2*1"}',
        "Thought: That is it.\nFinal Answer: 120",
    ]
    assert await run("react_calculator", tmp_path, server) == ["calculator({'expression': '5*4*3*2*1'})", "120"]
    assert {body["max_tokens"] for body in server.bodies} == {512}
    assert {body["temperature"] for body in server.bodies} == {0.7}


async def test_tools_of_ones_own_are_called_and_their_errors_told(tmp_path: Path, server: ScriptedServer) -> None:
    server.scripts["warm is it in Berlin"] = [
        ("weather", {"city": "Bonn"}),
        ("weather", {"city": "Berlin"}),
        ("convert_temperature", {"degrees": 20, "to": "F"}),
        ("arithmetic", {"expression": "68 + 0"}),
        "68 F",
    ]
    printed = await run("custom_tool", tmp_path, server)
    assert [line for line in printed if line.startswith("action_result")] == [
        "action_result: 'Bonn' is not known; there are Berlin",
        "action_result: 20.0 C",
        "action_result: 68.0 F",
        "action_result: 68",
    ]
    assert printed[-1] == "final_answer: 68 F"
    told = {tool["function"]["name"]: tool["function"]["description"] for tool in server.bodies[0]["tools"]}
    assert told["arithmetic"] == "Works out one line of arithmetic, exactly."


async def test_agents_of_ones_own_change_the_loop(tmp_path: Path, server: ScriptedServer) -> None:
    careful = [("calculator", {"expression": "17 * 23"}), "It is 391.", "Yes, 391."]
    server.scripts = {"Use the calculator for every number": careful, "What is 17 * 23?": ["391"]}
    assert await run("custom_agent", tmp_path, server) == [
        "OneQuestion: 391 after 1 turns",
        "Careful: Yes, 391 after 3 turns",
    ]
    assert server.bodies[2]["messages"][-1]["content"] == "= 391"


async def test_a_form_of_tool_calls_of_ones_own_works(tmp_path: Path, server: ScriptedServer) -> None:
    command = "sed -i 's/2 - 3/2 + 3/' add.py"
    server.scripts["add.py subtracts"] = [
        f"I mend it. <function=bash><parameter=command>{command}</parameter></function>",
        "<function=finish><parameter=message>Done.</parameter></function>",
    ]
    assert await run("custom_action_form", tmp_path, server) == ["fix: reward 1.0"]
    system = server.bodies[0]["messages"][0]["content"]
    assert system.startswith("You are a Python developer. Keep to PEP 8.\n\nTools:\n- bash: ")


async def test_claude_answers(tmp_path: Path, server: ScriptedServer) -> None:
    server.scripts["What is 17 * 23?"] = [("calculator", {"expression": "17 * 23"}), "391"]
    assert await run("claude_client", tmp_path, server, family="ANTHROPIC") == ["product: 391"]
    assert server.keys == {"sk-test"}


async def test_a_function_is_a_model(tmp_path: Path, server: ScriptedServer) -> None:
    assert await run("custom_llm_function", tmp_path, server) == [
        "product: It is 42 (at most 256 tokens, temperature 0.7)."
    ]


async def test_names_become_agents_and_tools(tmp_path: Path, server: ScriptedServer) -> None:
    printed = await run("registries", tmp_path, server)
    assert "MathTutor" in printed[0]
    assert "shout-2" in printed[1]
    assert "ReAct makes a ReAct" in printed
    assert "shout_1: ['text'], runs in the runner" in printed
    assert "did you mean 'ReAct'?" in printed[-1]


async def test_a_batch_runs_side_by_side_and_one_failure_stays_alone(tmp_path: Path, server: ScriptedServer) -> None:
    printed = await run("batch", tmp_path, server)
    squares = [f"square-{number}: {number**2}" for number in range(12) if number != 5]
    assert sorted(printed[:-1]) == sorted([*squares, "square-5: InfraFailed, Unreachable"])
    assert printed[-1] in ("at most 2 at once", "at most 3 at once", "at most 4 at once"), "side by side, and bounded"


async def test_a_trajectory_is_read_step_by_step(tmp_path: Path, server: ScriptedServer) -> None:
    command = {"command": "grep -c '' log.txt > n.txt"}
    server.scripts["number of lines of log.txt"] = [("bash", command), ("finish", {"message": "Three."})]
    printed = await run("read_trajectory", tmp_path, server)
    assert [line.split(":")[0] for line in printed[:-5]] == [
        "0 observation",
        "0 observation",
        "0 action",
        "0 action_result",
        "1 action",
        "1 action_result",
        "1 final_answer",
    ]
    assert printed[-5:] == [
        "completed: True",
        "final response: Three.",
        "total reward: 1.0",
        f"commands: [{command}]",
        "read again: True",
    ]


async def test_their_configuration_is_a_manifest(tmp_path: Path, server: ScriptedServer) -> None:
    server.scripts = {"12 + 30": ["Final Answer: 42"], "2 ** 10": ["Final Answer: 1024"]}
    assert sorted(await run("configuration", tmp_path, server, "3")) == ["power: 1024", "sum: 42"]
    assert list(tmp_path.glob("trajectories/react-math-*/job.json")), "saved where the manifest says"


async def test_the_program_of_the_page_runs_and_a_second_start_runs_nothing(
    tmp_path: Path, server: ScriptedServer
) -> None:
    page = EXAMPLES.parents[1] / "docs" / "coming-from-agentic-rollout-library.md"
    program = tmp_path / "echo.py"
    program.write_text(page.read_text().split("```python\n")[1].split("```")[0])
    for _ in range(2):
        assert await run(str(program.with_suffix("")), tmp_path, server) == ["task-001 Completed", "You said: Hello!"]
    assert len(list(tmp_path.glob("trajectories/echo-*"))) == 1
