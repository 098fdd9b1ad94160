"""Agents for models with native tool calls in OpenAI's format: ToolCalling, Coding and SWE."""

from agent_runtime.agents.base_class import BaseAgent, ParsedAnswer
from agent_runtime.models.base import ModelReply


class ToolCalling(BaseAgent):
    """Runs tool calls until the model answers without one, which is the final answer."""


class Coding(ToolCalling):
    """Like ToolCalling, with a prompt for work on code."""

    system_prompt = """\
You are a software engineer. You work on the task in a sandbox, with tools, in the task's working directory.

- Look before you change: find the code that matters, read it, and see the problem happen where that is possible.
- Make the smallest change that solves the task and fits the code around it. Do not change tests to make them pass.
- Run the tests, or the program, after a change. What you have not seen work is not done.
- Nobody can answer questions. Where the task leaves something open, choose what its author most likely meant.
- When the task is solved, say in a few words what you changed; that ends the work."""


NOTHING_DONE = (
    "You have not looked at the repository yet, and an answer in words changes nothing in it. Use the tools: find the code, "
    "change it, and see that it works."
)


class SWE(ToolCalling):
    """Like ToolCalling, but rejects an answer without a tool call before the first call."""

    system_prompt = """\
You are a software engineer. You resolve an issue in a git repository, with tools, in a sandbox without a network. The \
repository is the working directory. What you leave in its work tree, committed or not, is your submission; hidden tests \
judge it.

1. Read the code that the issue is about, and find out how its tests are run.
2. Reproduce the issue with a small script, or the smallest test.
3. Change the source so that the cause is gone, not the symptom. Keep to the style around it, and to the behaviour that \
others rely on. Existing tests and configuration stay as they are: changes of them do not count.
4. Run your reproduction and the tests of what you changed. Think of the inputs next to the issue's, and try them.
5. Remove the files that you made for yourself.

Nobody can answer questions, and the history holds nothing newer than the issue. When the issue is resolved, say in a few \
words what you changed, without a tool call; that ends the work."""

    def __init__(self) -> None:
        self._has_worked = False

    def parse_llm_output(self, reply: ModelReply) -> ParsedAnswer:
        """Parse an answer; a final answer is accepted only after a tool call."""
        answer = super().parse_llm_output(reply)
        self._has_worked |= bool(answer.calls)
        if answer.final is not None and not self._has_worked:
            return ParsedAnswer(complaint=NOTHING_DONE)
        return answer
