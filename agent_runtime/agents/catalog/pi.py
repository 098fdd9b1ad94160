"""Pi. Sources: `pi --help`; docs/models.md, docs/environment-variables.md and docs/session-format.md of the package."""

from agent_runtime.agents.catalog.entry import Entry, Package
from rollout_api.rollout_job import TrajectoryFormat

_MODELS = """\
{
  "providers": {
    "rollout": {
      "baseUrl": "{url}/v1",
      "api": "openai-completions",
      "apiKey": "$OPENAI_API_KEY",
      "models": [{"id": "{model}"}]
    }
  }
}
"""

PI = Entry(
    package=Package("npm", "@earendil-works/pi-coding-agent", "1.5.2", "pi", "Node.js 22.19"),
    command=["pi", "--print", "--offline", "--provider", "rollout", "--model", "{model}", "{arguments}"],
    stdin="{prompt}",
    protocol="OpenAI chat completions",
    env={"PI_TELEMETRY": "0"},
    files={".pi/agent/models.json": _MODELS},
    trajectory=".pi/agent/sessions/*/*.jsonl",
    format=TrajectoryFormat.PI,
    exit_codes={1: "an error, such as when the model could not be called"},
)
