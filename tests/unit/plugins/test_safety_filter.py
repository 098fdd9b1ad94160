import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rollouts.plugins import Refuse, RolloutInfo
from agent_runtime.models.base import ToolCall
from agent_runtime.plugins.safety_filter import LONGEST, SafetyFilter
from rollout_api.tasks import Task

ROLLOUT = RolloutInfo(0, 0, 0, 0, 0, Task(name="t", prompt="p"))


async def asked(written: Any, **options: Any) -> Refuse | ToolCall | None:
    arguments = written if isinstance(written, str) else json.dumps(written)
    return await SafetyFilter(**options).filter_tool_call(ROLLOUT, ToolCall("c", "bash", arguments))


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /",
        "rm -fr /*",
        "sudo rm -r --no-preserve-root /",
        "rm -rf /etc",
        "rm -rf ~",
        "chmod -R 777 /",
        "chown -R me /usr",
        "find / -delete",
        "dd if=/dev/zero of=/dev/sda",
        "mkfs.ext4 /dev/sdb",
        "shutdown -h now",
        "systemctl reboot",
        "format c:",
        "kill -9 -1",
        ":(){ :|:& };:",
        "make && reboot",
        "bash -c 'poweroff'",
        'echo "$(halt)"',
    ],
)
async def test_destructive_command_is_refused_with_a_reason(command: str) -> None:
    answer = await asked({"command": command})
    assert isinstance(answer, Refuse)
    assert len(answer.reason.split()) > 5, "the model is told why"


@pytest.mark.parametrize(
    "command",
    [
        "echo format",
        "ruff format .",
        "git log --format=%h",
        "printf 'reboot\\n' > notes.txt",
        "grep -rn shutdown src",
        "./format x",
        "rm -rf build",
        "rm -rf /tmp/work",
        "rm -r ./*",
        "find . -name '*.pyc' -delete",
        "chmod -R u+w src",
        "kill -9 123",
        "kill %1",
        "dd if=/dev/zero of=disk.img count=1",
        "cat > doc.md <<EOF\nreboot\nrm -rf /\nEOF",
        "python3 -m json.tool",
        "# shutdown",
    ],
)
async def test_ordinary_commands_pass_with_any_words(command: str) -> None:
    assert await asked({"command": command}) is None


async def test_command_longer_than_a_program_can_take_is_refused_unread() -> None:
    assert isinstance(await asked({"command": "a" * (LONGEST + 1)}), Refuse)
    assert await asked({"command": "a" * LONGEST}) is None


@given(st.text(max_size=100))
async def test_no_arguments_make_it_fail(text: str) -> None:
    assert await asked(text) is None or isinstance(await asked({"command": text}), Refuse | None)
    await asked({"command": [text, 1, None]})


async def test_job_can_extend_the_refused_commands_and_the_checked_arguments() -> None:
    assert isinstance(await asked({"command": "curl x | sh"}, blocked_patterns=[r"curl .*\| *sh"]), Refuse)
    assert isinstance(await asked({"command": "nc -l 1"}, blocked_programs=["nc"]), Refuse)
    assert await asked({"command": "reboot"}, blocked_programs=["nc"]) is None
    assert isinstance(await asked({"keys": "reboot"}, arguments=["keys"]), Refuse)
    assert isinstance(await asked({"keys": "reboot"}, arguments=["bash.keys"]), Refuse)
    assert await asked({"keys": "reboot"}, arguments=["terminal.keys"]) is None
