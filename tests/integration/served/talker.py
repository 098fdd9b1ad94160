"""An agent that only calls its model."""

from agent_runtime.agents.base import AgentContext
from rollout_api.records import Message


class Talker:
    """Asks the model to continue until its turns are used up or the test sets `enough`."""

    enough = False

    async def run(self, context: AgentContext) -> str | None:
        messages: list[Message] = [{"role": "user", "content": context.task.prompt}]
        while not self.enough:
            reply = await context.call_model(messages)
            messages += [reply.message, {"role": "user", "content": "Go on."}]
        return None
