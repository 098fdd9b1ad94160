"""Terminus CLI, the fork of Harbor's Terminus 2 that runs in the workspace. Sources: `terminus --help`; its files cli.py,
terminus.py and tmux_session.py. It has no option `--version`.
"""

from agent_runtime.agents.catalog.entry import Entry, Package
from rollout_api.rollout_job import TrajectoryFormat

# Without asciinema, it runs the image's package manager as root, which fails without a network. It uses no recording.
# Its terminal is a login shell, for which /etc/profile replaces PATH. It always gives its tmux session the same name.
_RUN = """\
TMUX_TMPDIR=$(mktemp -d) && export AGENT_PATH="$PATH" TMUX_TMPDIR || exit 1
mkdir -p "$HOME/bin" && printf '#!/bin/sh\\n' > "$HOME/bin/asciinema" && chmod +x "$HOME/bin/asciinema" || exit 1
PATH=$PATH:$HOME/bin exec terminus "$@"
"""

TERMINUS = Entry(
    # Each later Harbor may change the classes that it inherits from.
    package=Package(
        "PyPI", "terminus-ai", "2.0.4", "terminus", "Python 3.12 with venv, bash and tmux", companions=["harbor==0.26.0"],
        version_command=(
            'ls -d "$(dirname "$(readlink -f "$(command -v terminus)")")"/../lib/python3*/*-packages/terminus_ai-*'
        ),
    ),
    command=[
        "sh", "-c", _RUN, "terminus", "--model", "openai/{model}", "--api-base", "{url}/v1",
        "--logs-dir", "{home}/logs", "--trajectory-path", "{home}/trajectory.json", "{arguments}", "--", "{prompt}",
    ],
    protocol="OpenAI chat completions",
    env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    files={".profile": 'PATH=$AGENT_PATH\n'},
    trajectory="trajectory.json",
    format=TrajectoryFormat.ATIF,
    exit_codes={1: "an error, such as when the model could not be called, or tmux is missing", 2: "wrong arguments"},
)  # fmt: skip
