"""Qwen Code. Sources: `qwen --help`; github.com/QwenLM/qwen-code, docs/users/configuration/settings.md."""

from agent_runtime.agents.catalog.entry import Entry, Package
from rollout_api.rollout_job import TrajectoryFormat

_SETTINGS = """\
{
  "general": {"enableAutoUpdate": false},
  "memory": {"enableAutoSkill": false, "enableManagedAutoDream": false, "enableManagedAutoMemory": false},
  "privacy": {"usageStatisticsEnabled": false},
  "telemetry": {"enabled": false}
}
"""

QWEN_CODE = Entry(
    package=Package("npm", "@qwen-code/qwen-code", "0.24.4", "qwen", "Node.js 22"),
    command=["qwen", "--yolo", "--auth-type", "openai", "--model", "{model}", "{arguments}"],
    stdin="{prompt}",
    protocol="OpenAI chat completions",
    env={"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
    files={".qwen/settings.json": _SETTINGS},
    trajectory=".qwen/projects/*/chats/*.jsonl",
    format=TrajectoryFormat.QWEN_CODE,
    exit_codes={1: "an error, such as when the model could not be called", 53: "its own limit of turns"},
)
