"""Gemini CLI. Sources: `gemini --help`; github.com/google-gemini/gemini-cli, docs/reference/configuration.md; the exit codes
are those of its `FatalError` classes.
"""

from agent_runtime.agents.catalog.entry import Entry, Package
from rollout_api.rollout_job import TrajectoryFormat

_SETTINGS = """\
{
  "general": {"enableAutoUpdate": false, "enableAutoUpdateNotification": false},
  "privacy": {"usageStatisticsEnabled": false},
  "security": {"auth": {"selectedType": "gemini-api-key"}},
  "telemetry": {"enabled": false}
}
"""

GEMINI_CLI = Entry(
    package=Package("npm", "@google/gemini-cli", "0.61.0", "gemini", "Node.js 20"),
    command=["gemini", "--yolo", "--skip-trust", "--model", "{model}", "{arguments}"],
    stdin="{prompt}",
    protocol="Google Gemini",
    files={".gemini/settings.json": _SETTINGS},
    trajectory=".gemini/tmp/*/chats/session-*.json*",
    format=TrajectoryFormat.GEMINI_CLI,
    exit_codes={
        1: "an error, such as when the model could not be called",
        41: "no credentials",
        42: "wrong input",
        52: "wrong configuration",
        53: "its own limit of turns",
    },
)
