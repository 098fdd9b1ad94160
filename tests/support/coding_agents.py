"""Coding agents of the catalog: their tools, and a scripted model that fixes the quickstart's first bug with them."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.vllm_server import Answer, Prompt
from tests.support.vllm_server.model import ToolCall

REPOSITORY = Path(__file__).parents[2]
FILE = "/workspace/median.py"
_RUN = "python3 -c 'import median; print(median.median([3, 1, 2]))'"
_SORTED = '    if not values:\n        raise ValueError("empty")\n    values = sorted(values)'
_MIDDLE = "    half = len(values) // 2\n    return (values[half] + values[-half - 1]) / 2"
FIXES = (("    values.sort()", _SORTED), ("    return values[len(values) // 2 - 1]", _MIDDLE))
LAST_WORDS = "median() is right now."


@dataclass(frozen=True)
class Tools:
    """How an agent's own tools are called."""

    marker: str
    """Text in the prompt of its main conversation, and of no side call."""
    read: Callable[[], ToolCall]
    edit: Callable[[str, str], ToolCall]
    shell: Callable[[str], ToolCall]


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def _patch(old: str, new: str) -> str:
    lines = [*(f"-{line}" for line in old.splitlines()), *(f"+{line}" for line in new.splitlines())]
    return "\n".join(["*** Begin Patch", "*** Update File: median.py", "@@", *lines, "*** End Patch"])


TOOLS: Mapping[str, Tools] = {
    "ClaudeCode": Tools(
        '"name": "Edit"',
        lambda: _call("Read", file_path=FILE),
        lambda old, new: _call("Edit", file_path=FILE, old_string=old, new_string=new),
        lambda command: _call("Bash", command=command, description="Run it"),
    ),
    "Codex": Tools(
        '"name": "exec_command"',
        lambda: _call("exec_command", cmd="cat median.py"),
        lambda old, new: _call("exec_command", cmd=f"apply_patch <<'EOF'\n{_patch(old, new)}\nEOF"),
        lambda command: _call("exec_command", cmd=command),
    ),
    "QwenCode": Tools(
        '"name": "run_shell_command"',
        lambda: _call("read_file", file_path=FILE),
        lambda old, new: _call("edit", file_path=FILE, old_string=old, new_string=new),
        lambda command: _call("run_shell_command", command=command, is_background=False),
    ),
    "Pi": Tools(
        '"name": "bash"',
        lambda: _call("read", path="median.py"),
        lambda old, new: _call("edit", path="median.py", edits=[{"oldText": old, "newText": new}]),
        lambda command: _call("bash", command=command),
    ),
    "OpenCode": Tools(
        '"name": "bash"',
        lambda: _call("read", filePath=FILE),
        lambda old, new: _call("edit", filePath=FILE, oldString=old, newString=new),
        lambda command: _call("bash", command=command, description="Run it"),
    ),
    "GeminiCLI": Tools(
        '"name": "run_shell_command"',
        lambda: _call("read_file", file_path="median.py"),
        lambda old, new: _call("replace", file_path="median.py", instruction="Fix it.", old_string=old, new_string=new),
        lambda command: _call("run_shell_command", command=command, description="Run it"),
    ),
}


STEPS = 6
"""Turns with tool calls. One without follows."""


def is_main(agent: str, prompt: Prompt) -> bool:
    """Whether a request is of the conversation that works on the task. Agents make side calls, such as for a title."""
    return TOOLS[agent].marker in prompt.text and "median.py should return" in prompt.text


def answer(agent: str, prompt: Prompt) -> Answer | str:
    """What the model answers to a request, which depends on the request's conversation only."""
    if not is_main(agent, prompt):
        return "Fix the median"
    tools = TOOLS[agent]
    steps = [
        Answer("I look at it.", [tools.read(), tools.shell("ls")]),
        Answer("What does it do?", [tools.shell(_RUN)]),
        Answer("It sorts its argument.", [tools.edit(*FIXES[0])]),
        Answer("Again.", [tools.shell(_RUN)]),
        Answer("The middle is wrong.", [tools.edit(*FIXES[1])]),
        Answer("Once more.", [tools.read(), tools.shell(_RUN)]),
    ]
    return steps[prompt.turn] if prompt.turn < STEPS else LAST_WORDS


def agent_environment() -> Path:
    """Return the environment of `hack/agent-environment`, installed if it is not there."""
    done = subprocess.run([REPOSITORY / "hack/agent-environment"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip()).parent.parent


def manifest(agent: str, url: str, environment: Path, **spec: Any) -> dict[str, Any]:
    """Return a job in which the agent fixes the quickstart's first bug."""
    quickstart = yaml.safe_load((REPOSITORY / "examples/quickstart/job.yaml").read_text())
    task = quickstart["spec"]["tasks"]["inline"][0]
    path = f"{environment}/bin:/usr/local/bin:/usr/bin:/bin"
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": agent.lower()},
        "spec": {
            "tasks": {"inline": [task]},
            "groupSize": 1,
            "model": {"endpoint": {"baseURL": f"{url}/v1", "name": "policy", "callSeconds": 120}},
            "agent": {"type": agent},
            "sandbox": {"env": [{"name": "PATH", "value": path}], "workspaces": {"mode": "Overlay"}},
            "attempts": {"limit": 1},
            "output": {"uri": "out"},
            **spec,
        },
    }
