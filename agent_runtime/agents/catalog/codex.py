"""Codex. Sources: `codex exec --help`; github.com/openai/codex, docs/config.md and docs/exec.md."""

from agent_runtime.agents.catalog.entry import Entry, Package
from rollout_api.rollout_job import TrajectoryFormat

_CONFIG = """\
model = "{model}"
model_provider = "rollout"
check_for_update_on_startup = false
cli_auth_credentials_store = "file"

[analytics]
enabled = false

[feedback]
enabled = false

[model_providers.rollout]
name = "rollout"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""

CODEX = Entry(
    package=Package("npm", "@openai/codex", "0.171.0", "codex", "Node.js 16"),
    command=[
        "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{arguments}", "-",
    ],
    stdin="{prompt}",
    protocol="OpenAI Responses",
    # It puts its helpers, such as apply_patch, on PATH only if its home is not below the folder of temporary files.
    env={"TMPDIR": "{home}/tmp"},
    files={".codex/config.toml": _CONFIG, "tmp/.keep": ""},
    trajectory=".codex/sessions/*/*/*/rollout-*.jsonl",
    format=TrajectoryFormat.CODEX,
    exit_codes={1: "the turn failed, such as when the model could not be called", 2: "the arguments are wrong"},
)  # fmt: skip
