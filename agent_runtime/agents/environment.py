"""The agent that acts in an environment by text: `<answer>Right</answer>` is one action."""

import json

from agent_runtime.agents.base import AgentContext, Stop
from agent_runtime.agents.base_class import BaseAgent, Trajectory
from agent_runtime.environments.act import ACT, INVALID, Act, observation_text
from agent_runtime.environments.answers import ANSWER, AnswerForm
from agent_runtime.models.answers import answer_message
from agent_runtime.models.base import ToolCall
from rollout_api.records import StopReason

NO_ENVIRONMENT = (
    "agent Environment needs a task with an environment; give the task one (tasks.environments), or choose "
    "another agent"
)


class Environment(BaseAgent):
    """Sends the model each observation, and takes the action in its answer, until the episode is over.

    `agent.config.answerPattern` selects the action in an answer (`agent_runtime.environments.answers`). An answer
    without an action is also a step, with `formatPenalty`. With `agent.config.actionSeparator` an answer may have
    several actions, each a step.
    """

    system_prompt = "You act in an environment. Answer each turn with one action, such as <answer>ACTION</answer>."

    async def run(self, context: AgentContext) -> str | None:
        act = context.tools.get(ACT)
        if not isinstance(act, Act):
            raise Stop(StopReason.AGENT_ERROR, NO_ENVIRONMENT)
        form = AnswerForm.of(context.spec.config.get("answerPattern", ANSWER))
        self.context = context
        self.set_tools({})
        messages = self.initial_messages()
        trajectory = Trajectory(messages, head=len(messages))
        separator = context.spec.config.get("actionSeparator")
        turn, left, seen = 0, act.max_steps, ""
        while left:
            turn += 1
            current = trajectory.messages[-1]
            await self.manage_context(trajectory)
            if trajectory.messages[-1] is not current:  # a summary does not replace what is seen now
                trajectory.messages.append(current)
            reply = await context.call_model(trajectory.messages, ())
            if reply.finish_reason == "content_filter":
                raise Stop(StopReason.CONTENT_FILTER, "the server's content filter ended the answer")
            taken = _actions(form.action(reply.text), separator)[:left]
            steps = await context.call_tools(
                [ToolCall(f"{ACT}-{n}" if n else ACT, ACT, _arguments(action)) for n, action in enumerate(taken)]
            )
            # Calls that were refused, by a plugin or as too many in one answer, are no steps.
            actions = [step for step in steps if "reward" in step.data]
            refusal = next((step.content for step in steps if "reward" not in step.data), "")
            left -= len(actions)
            seen = actions[-1].content if actions else seen or refusal
            trajectory.messages.append(answer_message(reply))
            trajectory.tokens = reply.usage.prompt_tokens + reply.usage.completion_tokens
            shown = observation_text(
                act.template,
                observation=seen,
                feedback=refusal or ("" if all(step.data.get("valid") for step in actions) else INVALID),
                turn=turn + 1,
                actions_left=left,
            )
            trajectory.messages.append({"role": "user", "content": shown})
        return None


def _actions(action: str | None, separator: str | None) -> list[str | None]:
    """Return the actions of an answer; one None if it has none."""
    if action is None or not separator:
        return [action]
    return [part.strip() for part in action.split(separator) if part.strip()] or [None]


def _arguments(action: str | None) -> str:
    return json.dumps({} if action is None else {"action": action}, ensure_ascii=False)
