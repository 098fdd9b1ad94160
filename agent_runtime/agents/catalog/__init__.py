"""Coding agents that are published programs: one file of facts for each, no code.

`agent_runtime/agents/program.py` turns an entry into what the engine runs. The names are also in
`rollout_api.rollout_job.CATALOG_AGENTS`.
"""

from collections.abc import Mapping
from typing import Final

from agent_runtime.agents.catalog.aider import AIDER
from agent_runtime.agents.catalog.claude_code import CLAUDE_CODE
from agent_runtime.agents.catalog.codex import CODEX
from agent_runtime.agents.catalog.entry import Entry
from agent_runtime.agents.catalog.gemini_cli import GEMINI_CLI
from agent_runtime.agents.catalog.mini_swe_agent import MINI_SWE_AGENT
from agent_runtime.agents.catalog.open_code import OPEN_CODE
from agent_runtime.agents.catalog.open_hands import OPEN_HANDS
from agent_runtime.agents.catalog.pi import PI
from agent_runtime.agents.catalog.qwen_code import QWEN_CODE
from agent_runtime.agents.catalog.terminus import TERMINUS

CATALOG: Final[Mapping[str, Entry]] = {
    "ClaudeCode": CLAUDE_CODE,
    "Codex": CODEX,
    "QwenCode": QWEN_CODE,
    "Pi": PI,
    "OpenCode": OPEN_CODE,
    "GeminiCLI": GEMINI_CLI,
    "MiniSWEAgent": MINI_SWE_AGENT,
    "Aider": AIDER,
    "OpenHands": OPEN_HANDS,
    "Terminus": TERMINUS,
}
"""Entries by `agent.type`."""
