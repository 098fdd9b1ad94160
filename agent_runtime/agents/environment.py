"""The agent that acts in an environment by text: `<answer>Right</answer>` is one action."""

import json

from agent_runtime.agents.base import AgentContext, Stop
from agent_runtime.environments.act import ACT, INVALID, Act, told
from agent_runtime.environments.answers import ANSWER, AnswerForm
from agent_runtime.models.base import ToolCall
from agent_runtime.models.history import answer_message
from rollout_api.records import Message, StopReason

NO_ENVIRONMENT = (
    "agent Environment acts in an environment, and the task has none; give it one (tasks.environments), or choose "
    "another agent"
)


class Environment:
    """Tells the model what is seen, and takes the action in its answer, until the episode is over.

    `agent.config.answerPattern` says where the action stands (`agent_runtime.environments.answers`). An answer without an
    action is a step too, and costs `formatPenalty`.
    """

    system_prompt = "You act in an environment. Answer each turn with one action, such as <answer>ACTION</answer>."

    async def run(self, context: AgentContext) -> str | None:
        """Act until the episode ends; see `Agent.run`."""
        act = context.tools.get(ACT)
        if not isinstance(act, Act):
            raise Stop(StopReason.AGENT_ERROR, NO_ENVIRONMENT)
        form = AnswerForm.of(context.spec.config.get("answerPattern", ANSWER))
        system = self.system_prompt if context.spec.system_prompt is None else context.spec.system_prompt
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": context.task.prompt})
        for turn in range(1, act.max_steps + 1):
            reply = await context.call_model(messages, ())
            if reply.finish_reason == "content_filter":
                raise Stop(StopReason.CONTENT_FILTER, "the server's content filter ended the answer")
            action = form.action(reply.text)
            arguments = {} if action is None else {"action": action}
            [seen] = await context.call_tools([ToolCall(ACT, ACT, json.dumps(arguments, ensure_ascii=False))])
            messages.append(answer_message(reply))
            shown = told(
                act.template,
                observation=seen.content,
                # A plugin may have refused the call: then nothing was taken.
                feedback="" if seen.data.get("valid") else INVALID,
                turn=turn + 1,
                actions_left=act.max_steps - turn,
            )
            messages.append({"role": "user", "content": shown})
        return None
