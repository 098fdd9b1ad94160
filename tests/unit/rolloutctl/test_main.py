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


def test_command_imports_only_its_own_modules() -> None:
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stderr.split()
    assert "rolloutctl.commands.plugins" in loaded
    assert not {"rolloutctl.commands.run", "agent_runtime.engine.run", "agent_runtime.proxy.app"} & set(loaded)


def test_every_command_of_the_help_exists_under_its_name() -> None:
    group = Commands()
    assert [group.get_command(None, name).name for name in group.list_commands(None)] == COMMANDS


def test_usage_of_every_command_has_each_argument_in_one_pair_of_brackets() -> None:
    group = Commands()
    for name in COMMANDS:
        command = group.get_command(None, name)
        for each in getattr(command, "commands", {name: command}).values():
            usage = each.make_context(each.name, [], resilient_parsing=True).get_usage()
            assert "[[" not in usage, usage
