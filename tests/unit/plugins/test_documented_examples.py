"""The examples of docs/plugins.md, run unchanged."""

import inspect
import re
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_rollouts.plugins import FinishedRollout, RolloutInfo
from agent_runtime.models.base import ToolCall
from agent_runtime.plugins.base import KINDS
from agent_runtime.plugins.hooks import HOOKS, Hooks
from agent_runtime.plugins.registry import describe_plugin, load_plugins, registry
from rollout_api.manifest import load_manifest
from rollout_api.records import IntentRecord, Record, ResponseRecord, Result
from rollout_api.tasks import Task
from tests.support.documentation import read_blocks

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "plugins.md").read_text()


def shown(language: str) -> list[str]:
    return [block.text for block in read_blocks("docs/plugins.md", PAGE) if block.language == language]


@pytest.fixture
def examples() -> Iterator[dict[str, Any]]:
    """The page's Python, as the modules that the page names."""
    module = types.ModuleType("my_plugins")
    package = types.ModuleType("my_package")
    sys.modules |= {"my_plugins": module, "my_package": package, "my_package.plugins": module}
    for block in shown("python"):
        exec(compile(block, "docs/plugins.md", "exec"), vars(module))
    yield vars(module)
    for name in ("my_plugins", "my_package", "my_package.plugins"):
        del sys.modules[name]


def test_the_manifest_of_the_page_loads_with_its_plugins(examples: dict[str, Any]) -> None:
    (written,) = shown("yaml")
    job = yaml.safe_load((ROOT / "rolloutctl" / "starter.yaml").read_text())
    job["spec"] |= yaml.safe_load(written)["spec"]
    spec = load_manifest(yaml.safe_dump(job)).spec
    names = ["SafetyFilter", "PerformanceStop", "my_package.plugins:Brevity"]
    assert [plugin.name for plugin in load_plugins(spec.plugins)] == names
    (entry_points,) = shown("toml")
    assert tomllib.loads(entry_points)["project"]["entry-points"][registry.group] == {"Prints": "my_plugins:Prints"}


async def test_plugins_of_the_page_have_the_described_effects(
    examples: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (prints,) = load_plugins([], [examples["Prints"]])
    result = Result(index=0, group=0, member=2, task="t", mode="Eval", seed=0, outcome="Completed", reward=1, attempt=0)
    prints.plugin.after_rollout(result=result)
    assert capsys.readouterr().out == "t 2 Completed 1.0\n"
    function = {"name": "bash", "arguments": "{}"}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": str(n), "function": function} for n in range(5)],
    }
    records: list[Record] = [
        IntentRecord(turn=0, time=0, keep=0, messages=[]),
        ResponseRecord(turn=0, time=0, seconds=0, message=message, finish_reason="tool_calls"),
    ]
    rollout = RolloutInfo(0, 0, 0, 0, 0, Task(name="t", prompt="p"))
    scores = await examples["Brevity"]().evaluate_rollout(FinishedRollout(rollout, result, None, records))
    assert scores == {"brevity": 0.75}
    assert isinstance(FinishedRollout(rollout, result, None, records).tool_uses[0].call, ToolCall)


def test_table_of_hooks_has_every_hook_with_its_arguments_and_kind() -> None:
    rows = [line.split("|")[1:4] for line in PAGE.splitlines() if re.match(r"\| `[a-z]+_[a-z_]+` \| `", line)]
    written = {hook.strip(" `"): re.findall(r"`(\w+)`", arguments) for hook, arguments, _ in rows if "key" not in hook}
    written = {hook: arguments for hook, arguments in written.items() if hook in HOOKS and arguments != [hook]}
    assert list(written) == list(HOOKS)
    for hook, arguments in written.items():
        assert arguments == [
            name for name in inspect.signature(getattr(Hooks, hook)).parameters if name not in ("self", "key")
        ]
    kinds = {hook.strip(" `"): kind for hook, _, what in rows for kind in re.findall(r"\*\*(\w+)\*\*", what)}
    assert kinds == {hook: kind for kind, hook in KINDS.items()}


def test_page_lists_all_built_ins() -> None:
    rows = re.findall(r"^\| `([A-Z]\w+)` \| ([\w, ]+) \|", PAGE, re.MULTILINE)
    assert {name: kinds.split(", ") for name, kinds in rows} == {
        name: describe_plugin(name).kinds for name in [*registry.builtin, *registry.optional]
    }
