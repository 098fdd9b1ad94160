"""OpenHands CLI. Sources: `openhands --help`; docs.openhands.dev/openhands/usage/cli/headless, /cli/command-reference."""

from agent_runtime.agents.catalog.entry import Entry, Package
from rollout_api.rollout_job import TrajectoryFormat

# Its conversation is a folder with a file for each event. Its exit code is 0 even if an error ended the conversation.
_RUN = """\
LLM_API_KEY=$OPENAI_API_KEY openhands --headless --override-with-envs "$@"
code=$?
cd "$HOME"/.openhands/conversations/*/ 2>/dev/null || exit $code
for file in base_state.json events/*.json; do cat "$file" && echo; done > "$HOME/openhands.jsonl"
grep '"kind":"ConversationErrorEvent"' "$HOME/openhands.jsonl" >&2 && [ $code = 0 ] && exit 1
exit $code
"""

OPEN_HANDS = Entry(
    package=Package("PyPI", "openhands", "1.16.0", "openhands", "Python 3.12 with venv"),
    command=["sh", "-c", _RUN, "openhands", "--task={prompt}", "{arguments}"],
    protocol="OpenAI chat completions",
    env={
        "LLM_BASE_URL": "{url}/v1",
        "LLM_MODEL": "openai/{model}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        # It clones public skills at each start. Without a network, its message about that is longer than all others.
        "LOG_LEVEL": "CRITICAL",
    },
    trajectory="openhands.jsonl",
    format=TrajectoryFormat.OPEN_HANDS,
    exit_codes={1: "an error ended the conversation, such as when the model could not be called", 2: "wrong arguments"},
)
