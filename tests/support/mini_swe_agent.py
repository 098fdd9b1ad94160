"""mini-swe-agent as the agent of a job: its command, and a model that works with it."""

from pathlib import Path

from tests.support.vllm_server import Answer, Prompt
from tests.support.vllm_server.model import ToolCall

_LINES = Path(__file__).with_name("mini-swe-agent.txt").read_text().splitlines()
REQUIREMENTS = [line for line in _LINES if not line.startswith("#")]
VERSION = REQUIREMENTS[0].rpartition("=")[2]
COMMAND = [
    "mini", "--agent-class", "default", "--model", "openai/{model}", "--task", "{prompt}", "--cost-limit", "0",
    "--output", "mini.traj.json",
]  # fmt: skip
ENVIRONMENT = {
    # A model that no price list has is no error.
    "MSWEA_COST_TRACKING": "ignore_errors",
    # Its first start asks a person for an API key otherwise.
    "MSWEA_CONFIGURED": "true",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini-swe-agent",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
}
STEPS = 5
TURNS = STEPS + 1
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command by which it submits."""


def working(prompt: Prompt) -> Answer | None:
    """Answer as a model that counts in steps.txt, one command a turn, and then submits."""
    if not prompt.session:
        return None
    command = f"echo {prompt.turn} >> steps.txt" if prompt.turn < STEPS else DONE
    return Answer("One step.", [ToolCall("bash", {"command": command})])
