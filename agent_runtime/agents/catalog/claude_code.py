"""Claude Code. Sources: `claude --help`; code.claude.com/docs/en/settings (environment variables), /en/headless."""

from agent_runtime.agents.catalog.entry import Entry, Package
from rollout_api.rollout_job import TrajectoryFormat

CLAUDE_CODE = Entry(
    package=Package("npm", "@anthropic-ai/claude-code", "2.1.332", "claude", "npm, to install a native program"),
    command=[
        "claude", "--print", "--dangerously-skip-permissions", "--model", "{model}", "{arguments}",
    ],
    stdin="{prompt}",
    protocol="Anthropic Messages",
    env={
        # It has no telemetry, no update check and no error reports with this variable.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        # Its side calls use a smaller model otherwise.
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
        # As root, it refuses to skip permissions outside of a sandbox.
        "IS_SANDBOX": "1",
    },
    trajectory=".claude/projects/*/*.jsonl",
    format=TrajectoryFormat.CLAUDE_CODE,
    exit_codes={1: "the model could not be called, or the arguments are wrong"},
)  # fmt: skip
