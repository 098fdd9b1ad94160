"""mini-swe-agent. Sources: `mini --help`; mini-swe-agent.com/latest/advanced/global_configuration. It has no option
`--version`, and prints its version at each start.
"""

from agent_runtime.agents.catalog.entry import Entry, Package
from rollout_api.rollout_job import TrajectoryFormat

MINI_SWE_AGENT = Entry(
    # It imports mcp by way of litellm whenever a model is called, and does not require it.
    package=Package(
        "PyPI", "mini-swe-agent", "2.4.6", "mini", "Python 3.10 with venv", companions=["litellm==1.106.2", "mcp==2.3.0"]
    ),
    command=[
        "mini", "--agent-class", "default", "--model", "openai/{model}", "--task={prompt}", "--cost-limit", "0",
        "--output", "{home}/mini.traj.json", "{arguments}",
    ],
    protocol="OpenAI chat completions",
    env={
        # A model that no price list has is no error.
        "MSWEA_COST_TRACKING": "ignore_errors",
        # Its first start asks a person for an API key otherwise.
        "MSWEA_CONFIGURED": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": "{home}/mini-swe-agent",
        "MSWEA_SILENT_STARTUP": "1",
    },
    trajectory="mini.traj.json",
    format=TrajectoryFormat.MINI_SWE_AGENT,
    exit_codes={1: "an error, such as when the model could not be called", 2: "the arguments are wrong"},
)  # fmt: skip
