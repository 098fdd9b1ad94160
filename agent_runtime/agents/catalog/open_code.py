"""OpenCode. Sources: `opencode run --help`; opencode.ai/docs/config, /docs/providers, /docs/permissions."""

from agent_runtime.agents.catalog.entry import Entry, Package
from rollout_api.rollout_job import TrajectoryFormat

_CONFIG = """\
{
  "autoupdate": false,
  "share": "disabled",
  "permission": "allow",
  "provider": {
    "rollout": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {"{model}": {}}
    }
  }
}
"""
# Its sessions are in a database, which its own command exports.
_RUN = """\
opencode run --model "$@"
code=$?
opencode session list --format json --max-count 1 2>/dev/null | grep -o 'ses_[A-Za-z0-9]*' | head -n 1 | {
  read -r session && opencode export "$session" > "$HOME/session.json" 2>/dev/null
}
exit $code
"""

OPEN_CODE = Entry(
    package=Package("npm", "opencode-ai", "1.18.33", "opencode", "npm, to install a native program"),
    command=["sh", "-c", _RUN, "opencode", "rollout/{model}", "{arguments}"],
    stdin="{prompt}",
    protocol="OpenAI chat completions",
    env={
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    },
    files={".config/opencode/opencode.json": _CONFIG},
    trajectory="session.json",
    format=TrajectoryFormat.OPEN_CODE,
    exit_codes={1: "an error, such as wrong arguments"},
)
