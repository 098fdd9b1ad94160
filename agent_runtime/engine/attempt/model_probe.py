"""After a model has failed at a request: does it answer another one? The request may then be what it failed at."""

import asyncio

from agent_runtime.engine.attempt.assignment import Assignment
from agent_runtime.models.answers import answered
from agent_runtime.models.base import ContentFiltered, ContextExceeded, Model, ModelError, ModelRequest
from rollout_api.model import Sampling

PROBE_SECONDS = 30.0
"""A loaded server answers a few tokens within it; one that does not is failing others too."""
PROBE_TOKENS = 16  # OpenAI's reasoning models refuse fewer
UPDATED = "OtherPolicy"
"""Reason that only an update of the policy brings about, and no request."""

SILENT = "the call had no answer when the agent's time ran out, and neither had another one"


async def probe(error: ModelError, model: Model | None, assignment: Assignment, session: str) -> None:
    """Note in the error whether the model answers a request with nothing of the policy in it.

    Routers send it to the server that failed, because it has the session of that one.
    """
    if model is None or error.answers_others or error.reason == UPDATED:
        return
    rollout = assignment.rollout
    request = ModelRequest(
        messages=[{"role": "user", "content": "Say ok."}],
        tools=[],
        sampling=Sampling(max_tokens=PROBE_TOKENS),
        seed=rollout.seed,
        session=session,
        task=rollout.task.name,
        member=rollout.member,
        turn=0,
        max_tokens=PROBE_TOKENS,
        group=assignment.model_group,
    )
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await answered(model.complete(request))
    except (TimeoutError, ModelError, ContextExceeded, ContentFiltered):
        return
    error.answers_others = True
