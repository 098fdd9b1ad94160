"""A model for the programs of an attempt's workspace: the session proxy, served over the workspace's model port."""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from agent_runtime.models.base import Model
from agent_runtime.proxy.app import make_app
from agent_runtime.proxy.handler import Handler
from agent_runtime.proxy.keys import digest, key_of
from agent_runtime.proxy.limits import Limits
from agent_runtime.proxy.session import OverBudget, Session, SessionJournal, SessionSettings
from agent_runtime.proxy.sessions import LocalSessions
from agent_runtime.sandboxes.base import Workspace
from rollout_api.model import Sampling
from rollout_api.records import AttemptRecord, Record

KEY_PURPOSE = "model key"

# What aiohttp says of malformed requests, which programs could fill the runner's log with. The proxy logs its own defects.
_MALFORMED = logging.getLogger(f"{__name__}.malformed")
_MALFORMED.setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class WorkspaceModel:
    """How a program in the workspace reaches its model. All of it is the same under the runner that takes over."""

    url: str
    """Without a path; an API's own is `/v1/...`."""
    key: str
    name: str
    session: Session

    def environment(self) -> dict[str, str]:
        """Variables by which the packages of OpenAI and Anthropic find it."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.name,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.name,
        }


@asynccontextmanager
async def serve_model(
    workspace: Workspace,
    model: Model,
    journal: SessionJournal,
    recorded: Sequence[Record],
    *,
    session: str,
    task: str,
    member: int,
    seed: int,
    sampling: Sampling,
    limits: Limits,
    on_over_budget: OverBudget | None = None,
) -> AsyncIterator[WorkspaceModel]:
    """Let programs in the workspace call the model while the context is open; `session` names the attempt.

    `recorded` is what the journal has of the attempt. What is asked and answered is appended to it. On leaving, calls
    without a first word of their answer are held for the runner that serves next; others break off.
    """
    key = key_of(session, workspace.secret(KEY_PURPOSE))
    begun = next((record.time for record in recorded if isinstance(record, AttemptRecord)), time.time())
    settings = SessionSettings(
        id=session,
        key_digest=digest(key),
        created=begun,
        models=[model.name],
        limits=limits,
        sampling=sampling,
        seed=seed,
        task=task,
        member=member,
    )
    sessions = LocalSessions(model)
    opened = sessions.open(settings, journal, recorded, on_over_budget)
    # Nothing is left to wait for at the end: the workspace's connections are cut by then.
    runner = web.AppRunner(
        make_app(Handler(sessions)), handler_cancellation=True, access_log=None, logger=_MALFORMED, shutdown_timeout=0.0
    )
    await runner.setup()
    assert runner.server is not None
    try:
        async with workspace.serve_model(runner.server) as url:
            yield WorkspaceModel(url, key, model.name, opened)
    finally:
        await runner.cleanup()
        await sessions.end(session)
