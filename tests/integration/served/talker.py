"""An agent that only talks, for as long as it may."""

from agent_runtime.agents.base import AgentContext
from rollout_api.records import Message


class Talker:
    """Asks the model to go on until its turns are used up, or a test has seen enough."""

    enough = False

    async def run(self, context: AgentContext) -> str | None:
        messages: list[Message] = [{"role": "user", "content": context.task.prompt}]
        while not self.enough:
            reply = await context.call_model(messages)
            messages += [reply.message, {"role": "user", "content": "Go on."}]
        return None
