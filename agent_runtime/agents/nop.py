"""The agent that does nothing: shows what a verifier says of an untouched workspace."""

from agent_runtime.agents.base import AgentContext


class Nop:
    """Does nothing."""

    async def run(self, context: AgentContext) -> str | None:
        return None
