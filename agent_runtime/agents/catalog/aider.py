"""Aider. Sources: `aider --help`; aider.chat/docs/config/options.html, /docs/scripting.html."""

from agent_runtime.agents.catalog.entry import Entry, Package

# Outside of a git repository, it would create one in the working directory.
_RUN = """\
git rev-parse --git-dir >/dev/null 2>&1 || set -- --no-git "$@"
exec aider "$@"
"""

AIDER = Entry(
    package=Package("PyPI", "aider-chat", "0.86.2", "aider", "Python 3.10 to 3.12 with venv"),
    command=[
        "sh", "-c", _RUN, "aider", "--message-file", "{promptFile}", "--model", "openai/{model}",
        "--openai-api-base", "{url}/v1", "--yes-always", "--no-auto-commits", "--no-dirty-commits", "--no-gitignore",
        "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-show-release-notes",
        "--no-detect-urls", "--no-pretty", "--no-fancy-input",
        # Its history files are in the working directory otherwise.
        "--input-history-file", "{home}/aider.input.history", "--chat-history-file", "{home}/aider.chat.history.md",
        "{arguments}",
    ],
    protocol="OpenAI chat completions",
    env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    exit_codes={1: "an error", 2: "the arguments are wrong"},
)  # fmt: skip
