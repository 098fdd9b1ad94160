"""Engines and a directory that the test controls."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from agent_runtime.models.base import CallHealth, ModelError, ModelReply, ModelRequest
from agent_runtime.models.pool.fleet import View
from agent_runtime.models.pool.model import ServedModel
from agent_runtime.models.token_exact.routes import Progress
from rollout_api.model import Sampling
from rollout_api.model_server import ModelServerStatus, PolicyStatus, ServerState, ServerStatus
from rollout_api.records import Usage

WHOLE = [1, 2, 3, 4, 5, 6]
"""Ids of every answer."""
Behaviour = Callable[["FakeEngine", "Progress", Callable[[int], None]], Awaitable[None]]


async def say(
    engine: "FakeEngine", progress: Progress, on_tokens: Callable[[int], None], upto: int = len(WHOLE)
) -> None:
    """Stream what is still missing, one id at a time."""
    while len(progress.ids) < upto:
        await asyncio.sleep(0)
        progress.ids.append(WHOLE[len(progress.ids)])
        progress.logprobs.append(-0.5)
        on_tokens(1)


class FakeEngine:
    """A server whose answers a test determines."""

    def __init__(self, url: str) -> None:
        self.name, self.url, self.token_capture = "model", url, "Tokens"
        self.behaviour: Behaviour = say
        self.is_well = True
        self.asked: list[ModelRequest] = []
        self.began_with: list[list[int]] = []
        """Ids that each call went on from."""
        self.salts: list[str | None] = []
        self.prompts: list[str | Sequence[int]] = []
        self.closed = False
        self.checks = 0

    async def complete(
        self,
        request: ModelRequest,
        *,
        progress: Progress | None = None,
        on_tokens: Callable[[int], None] | None = None,
        cache_salt: str | None = None,
        priority: int | None = None,
    ) -> ModelReply:
        assert progress is not None
        assert on_tokens is not None
        self.asked.append(request)
        self.began_with.append(list(progress.ids))
        self.salts.append(cache_salt)
        await self.behaviour(self, progress, on_tokens)
        return ModelReply(
            {"role": "assistant", "content": self.url},
            "stop",
            usage=Usage(completion_tokens=len(progress.ids)),
            completion_token_ids=list(progress.ids) if self.token_capture == "Tokens" else None,
            policy_spans=list(progress.policy_spans),
        )

    def without_effect(self, fields: Mapping[str, Any], *, prompt: bool) -> list[str]:
        return [name for name in fields if name == "no_effect"]

    async def count_tokens(self, request: ModelRequest) -> int | None:
        return len(request.messages)

    async def complete_prompt(
        self,
        prompt: str | Sequence[int],
        request: ModelRequest,
        *,
        progress: Progress | None = None,
        on_tokens: Callable[[int], None] | None = None,
        cache_salt: str | None = None,
        priority: int | None = None,
    ) -> ModelReply:
        self.prompts.append(prompt)
        return await self.complete(
            request, progress=progress, on_tokens=on_tokens, cache_salt=cache_salt, priority=priority
        )

    async def check(self) -> None:
        self.checks += 1
        if not self.is_well:
            raise ModelError("Unreachable", "refused")

    async def close(self) -> None:
        self.closed = True


class FakeFleet:
    """A directory with what the test sets, and the engines at its servers' URLs."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.status = ModelServerStatus()
        self._views: asyncio.Queue[View] = asyncio.Queue()
        self.model = ServedModel("model", self, self.connect, me="uid/0")

    def connect(self, url: str) -> FakeEngine:
        return self.engines.setdefault(url, FakeEngine(url))

    async def changes(self) -> AsyncIterator[View]:
        while True:
            yield await self._views.get()

    async def tell(
        self, *names: str, ready: bool = True, odd: Mapping[str, Mapping[str, Any]] | None = None, **policy: Any
    ) -> None:
        """Set the ModelServer's servers, some of them `odd`, and this policy; return when the model has read it."""
        before = self.status.policy.model_dump()
        self.status = ModelServerStatus(
            servers=[
                ServerStatus.model_validate(
                    {"name": name, "url": f"http://{name}", "uid": "1", "ready": ready, "state": ServerState.READY}
                    | dict((odd or {}).get(name, {}))
                )
                for name in names
            ],
            policy=PolicyStatus.model_validate(before | policy),
        )
        self._views.put_nowait(View(self.status, asyncio.get_running_loop().time()))
        for _ in range(3):
            await asyncio.sleep(0)

    async def open(self, *names: str, **policy: Any) -> ServedModel:
        """Open a checked model with these servers."""
        checking = asyncio.create_task(self.model.check())
        await self.tell(*names, **policy)
        await checking
        return self.model

    def engine(self, name: str) -> FakeEngine:
        return self.engines[f"http://{name}"]

    def calls(self) -> dict[str, int]:
        """Return the number of calls of each server."""
        return {name: len(engine.asked) for name, engine in self.engines.items()}


def request(group: str = "group-0", *, turn: int = 0, health: CallHealth | None = None, **fields: Any) -> ModelRequest:
    """Return a call of that group."""
    return ModelRequest(
        messages=[{"role": "user", "content": "Hi."}],
        tools=[],
        sampling=Sampling(),
        seed=0,
        session="rollout-0",
        task="task",
        member=0,
        turn=turn,
        group=group,
        health=health or CallHealth(),
        **fields,
    )


def versions(reply: ModelReply) -> list[tuple[int, str | None]]:
    """Return the spans of a reply as tuples."""
    return [(span.tokens, span.version) for span in reply.policy_spans]
