"""The coding agents of the catalog: their tools, and a scripted model that fixes the quickstart's first bug with them."""

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.vllm_server import Answer, Prompt
from tests.support.vllm_server.model import ToolCall
from tests.support.vllm_server.template import GENERATION_PROMPT

REPOSITORY = Path(__file__).parents[2]
FILE = "/workspace/median.py"
_RUN = "python3 -c 'import median; print(median.median([3, 1, 2]))'"
_SORTED = '    if not values:\n        raise ValueError("empty")\n    values = sorted(values)'
_MIDDLE = "    half = len(values) // 2\n    return (values[half] + values[-half - 1]) / 2"
FIXES = (("    values.sort()", _SORTED), ("    return values[len(values) // 2 - 1]", _MIDDLE))
LAST_WORDS = "median() is right now."


@dataclass(frozen=True)
class Tools:
    """How to call an agent's own tools."""

    marker: str
    """Text in the prompt of its main conversation that no side call contains."""
    read: Callable[[], ToolCall]
    edit: Callable[[str, str], ToolCall]
    shell: Callable[[str], ToolCall]
    end: ToolCall | None = None
    """The call that submits the work; None if an answer without calls does."""


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def _patch(old: str, new: str) -> str:
    lines = [*(f"-{line}" for line in old.splitlines()), *(f"+{line}" for line in new.splitlines())]
    return "\n".join(["*** Begin Patch", "*** Update File: median.py", "@@", *lines, "*** End Patch"])


def _replace(old: str, new: str) -> str:
    """Return a shell command that replaces a text."""
    lines = [
        "from pathlib import Path",
        'file = Path("median.py")',
        f"file.write_text(file.read_text().replace({old!r}, {new!r}))",
    ]
    return "\n".join(["python3 - <<'EOF'", *lines, "EOF"])


def _keys(command: str) -> ToolCall:
    """Return the call as which Terminus records the keystrokes of a command. It waits for `duration` seconds, always."""
    return _call("bash_command", keystrokes=f"{command}\n", duration=1.5)


def _block(old: str, new: str) -> str:
    """Return an edit in Aider's text form."""
    return f"median.py\n```python\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"


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
    "MiniSWEAgent": Tools(
        '"name": "bash"',
        lambda: _call("bash", command="cat median.py"),
        lambda old, new: _call("bash", command=_replace(old, new)),
        lambda command: _call("bash", command=command),
        _call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
    "OpenHands": Tools(
        '"name": "terminal"',
        lambda: _call("file_editor", command="view", path=FILE, security_risk="LOW", summary="Read it"),
        lambda old, new: _call(
            "file_editor",
            command="str_replace",
            path=FILE,
            old_str=old,
            new_str=new,
            security_risk="LOW",
            summary="Edit it",
        ),
        lambda command: _call("terminal", command=command, security_risk="LOW", summary="Run it"),
    ),
    "Terminus": Tools(
        '"keystrokes"',
        lambda: _keys("cat median.py"),
        lambda old, new: _keys(_replace(old, new)),
        _keys,
        _call("mark_task_complete"),
    ),
}


TASK = "median.py should return"


def is_main(agent: str, prompt: Prompt) -> bool:
    """Whether a request is of the conversation that works on the task. Agents make side calls, such as for a title."""
    marker = TOOLS[agent].marker if agent in TOOLS else "SEARCH/REPLACE"
    return marker in prompt.text and TASK in prompt.text


def turns(agent: str) -> list[Answer]:
    """Return the model's answers in the conversation that works on the task."""
    return [_as_json(step) for step in steps(agent)] if agent == "Terminus" else steps(agent)


def _as_json(step: Answer) -> Answer:
    """Return a step in Terminus' text form."""
    commands = [dict(call.arguments) for call in step.tool_calls if call.name == "bash_command"]
    complete = len(commands) < len(step.tool_calls)
    return Answer(json.dumps({"analysis": step.text, "plan": "", "commands": commands, "task_complete": complete}))


def steps(agent: str) -> list[Answer]:
    """Return the model's answers as an agent that writes a trajectory records them: with a call for each action."""
    if agent == "Aider":
        # It has no tools: it applies the edits in an answer, and reports one that does not fit, or the failure of its
        # test, at most three times.
        return [
            Answer(f"It sorts its argument.\n\n{_block(*FIXES[0])}"),
            Answer(f"The middle is wrong.\n\n{_block('    nothing', '    something')}"),
            Answer(f"Again.\n\n{_block(*FIXES[1])}"),
        ]
    tools = TOOLS[agent]
    return [
        Answer("I look at it.", [tools.read(), tools.shell("ls")]),
        Answer("What does it do?", [tools.shell(_RUN)]),
        Answer("It sorts its argument.", [tools.edit(*FIXES[0])]),
        Answer("Again.", [tools.shell(_RUN)]),
        Answer("The middle is wrong.", [tools.edit(*FIXES[1])]),
        Answer("Once more.", [tools.read(), tools.shell(_RUN)]),
        # It asks whether the task is complete.
        *([Answer("It is done.", [tools.end])] if agent == "Terminus" and tools.end else []),
        Answer(LAST_WORDS, [tools.end] if tools.end else []),
    ]


def answer(agent: str, prompt: Prompt) -> Answer | str:
    """What the model answers to a request, which depends on the request's conversation only."""
    found = turns(agent)
    return found[min(turn_of(agent, prompt), len(found) - 1)] if is_main(agent, prompt) else "Fix the median"


def turn_of(agent: str, prompt: Prompt) -> int:
    """Return how many of the model's answers a request contains. Agents may add answers that the model did not give."""
    return sum(f"{GENERATION_PROMPT}{turn.text.splitlines()[0]}" in prompt.text for turn in turns(agent))


def _settings(agent: str) -> dict[str, Any]:
    """Return `config` of the agent, and changes of the task."""
    if agent != "Aider":
        return {}
    test = "python3 -c 'import median; assert median.median([3, 1, 2]) == 2'"
    commit = "git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -q -m a"
    return {
        "config": {"arguments": ["--edit-format", "diff", "--auto-test", "--test-cmd", test]},
        "task": {"setup": [commit]},
    }


def agent_environment() -> Path:
    """Return the environment of `hack/agent-environment`, installed if it is not there."""
    done = subprocess.run([REPOSITORY / "hack/agent-environment"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip()).parent.parent


def manifest(agent: str, url: str, environment: Path, **spec: Any) -> dict[str, Any]:
    """Return a job in which the agent fixes the quickstart's first bug."""
    quickstart = yaml.safe_load((REPOSITORY / "examples/quickstart/job.yaml").read_text())
    settings = _settings(agent)
    task = quickstart["spec"]["tasks"]["inline"][0] | settings.get("task", {})
    path = f"{environment}/bin:/usr/local/bin:/usr/bin:/bin"
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": agent.lower()},
        "spec": {
            "tasks": {"inline": [task]},
            "groupSize": 1,
            "model": {"endpoint": {"baseURL": f"{url}/v1", "name": "policy", "callSeconds": 120}},
            "agent": {"type": agent, "config": settings.get("config", {})},
            "sandbox": {"env": [{"name": "PATH", "value": path}], "workspaces": {"mode": "Overlay"}},
            "attempts": {"limit": 1},
            "output": {"uri": "out"},
            **spec,
        },
    }
