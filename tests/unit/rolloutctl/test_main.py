"""The command line as a whole."""

import subprocess
import sys

from rolloutctl.main import COMMANDS, Commands

LOADED = """
import sys
from rolloutctl.main import app
app(["plugins", "--help"], standalone_mode=False)
sys.stderr.write(" ".join(sys.modules))
"""


def test_a_command_does_not_wait_for_what_only_others_need() -> None:
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stderr.split()
    assert "rolloutctl.commands.plugins" in loaded
    assert not {"rolloutctl.commands.run", "agent_runtime.engine.run", "agent_runtime.proxy.app"} & set(loaded)


def test_every_command_that_help_lists_is_there_under_that_name() -> None:
    group = Commands()
    assert [group.get_command(None, name).name for name in group.list_commands(None)] == COMMANDS
