"""Stand-ins for vLLM as processes, a directory controlled by the test, and calls of a runner."""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from agent_runtime.models.base import ModelReply, ModelRequest
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.pool.fleet import CONFIRM_SECONDS, View
from agent_runtime.models.pool.model import ServedModel
from rollout_api.model import Sampling
from rollout_api.model_server import Gate, ModelServerStatus, PolicyStatus, ServerState, ServerStatus
from tests.support.vllm_server import made_by

REPOSITORY = Path(__file__).parents[3]
MODEL = "policy"
SEED = 5
PATIENCE_SECONDS = 300.0
"""Limit for waits, long enough for any busy machine."""


class StandIn:
    """One server process."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, url: str, session: aiohttp.ClientSession
    ) -> None:
        self.name, self.process, self.url, self._session = name, process, url, session

    async def post(self, path: str, body: Any = None) -> Any:
        """Send a POST; return the answer."""
        async with self._session.post(f"{self.url}{path}", json=body or {}) as response:
            response.raise_for_status()
            text = await response.text()
            return json.loads(text) if text else None

    async def get(self, path: str) -> Any:
        """Send a GET; return the answer."""
        async with self._session.get(f"{self.url}{path}") as response:
            response.raise_for_status()
            return await response.json()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()


class Watched(InferenceClient):
    """Counts the tokens that arrive, by URL of the server."""

    def __init__(self, url: str, arrived: Counter[str]) -> None:
        super().__init__(f"{url}/v1", MODEL, headers={}, key_origin="nowhere", call_seconds=PATIENCE_SECONDS)
        self._url, self._arrived = url, arrived

    async def complete(
        self, request: ModelRequest, *, on_tokens: Callable[[int], None] | None = None, **fields: Any
    ) -> ModelReply:
        """See InferenceClient."""

        def count(tokens: int) -> None:
            if on_tokens is not None:
                on_tokens(tokens)
            self._arrived[self._url] += tokens

        return await super().complete(request, on_tokens=count, **fields)


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that other coroutines and processes do."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 (the condition is whatever a test says)
            await asyncio.sleep(0.02)


class Fleet:
    """A ModelServer without a cluster: `Directory` and servers. operated.py adds the operator."""

    def __init__(self, folder: Path) -> None:
        self.servers: list[StandIn] = []
        self.policy = PolicyStatus()
        self.arrived = Counter[str]()
        """Tokens of answers that have come here, by URL of the server."""
        self.model = ServedModel(MODEL, self, self.connect, me="uid/0", sample_seconds=0.2)
        self._folder = folder
        self._told = asyncio.Event()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS))

    async def start(self, count: int, *arguments: str) -> None:
        """Start that many servers."""
        names = [f"server-{number}" for number in range(count)]
        self.servers = list(await asyncio.gather(*(self._start_one(name, arguments) for name in names)))

    async def _start_one(self, name: str, arguments: Sequence[str]) -> StandIn:
        command = [sys.executable, "-m", "tests.support.vllm_server", "--port", "0", "--print-url", "--model", MODEL]
        parser = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--scheduling-policy", "priority"]
        process = await asyncio.create_subprocess_exec(
            *(*command, *parser, *arguments),
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        return StandIn(name, process, (await process.stdout.readline()).decode().strip(), self._session)

    async def close(self) -> None:
        """End everything."""
        await self.model.close()
        await self._session.close()
        for server in self.servers:
            if server.process.returncode is None:
                server.process.kill()
            await server.process.wait()

    def connect(self, url: str) -> InferenceClient:
        """Connect to the engine at that URL."""
        return Watched(url, self.arrived)

    async def changes(self) -> AsyncIterator[View]:
        """See Directory."""
        while True:
            self._told.clear()
            yield View(self.status(), asyncio.get_running_loop().time())
            try:
                await asyncio.wait_for(self._told.wait(), CONFIRM_SECONDS)
            except TimeoutError:
                continue

    def status(self) -> ModelServerStatus:
        """Return the status as the operator writes it: while the gate is shut, no server is ready."""
        is_open = self.policy.gate is Gate.OPEN
        return ModelServerStatus(
            servers=[
                ServerStatus(
                    name=server.name,
                    url=server.url,
                    uid=str(server.process.pid),
                    ready=is_open,
                    state=ServerState.READY,
                )
                for server in self.servers
            ],
            policy=self.policy,
        )

    def tell(self, **policy: Any) -> None:
        """Change the status and notify the runner."""
        self.policy = self.policy.model_copy(update=policy)
        self._told.set()

    async def update(self) -> None:
        """Make one policy update without failures."""
        target = self.policy.current + 1
        self.tell(gate=Gate.SHUT, update=self.policy.update + 1, target=target, paused=False)
        await asyncio.gather(*(server.post("/pause?mode=keep") for server in self.servers))
        self.tell(paused=True)
        await until(lambda: self.model.acknowledged == self.policy.update)
        weights = self._folder / f"weights-{target}.json"
        weights.write_text(json.dumps({"version": target}))
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        for server in self.servers:
            await server.post("/collective_rpc", body)
            await server.post("/resume")
        await asyncio.sleep(0.1)  # tokens of the new version come before the gate opens
        self.tell(gate=Gate.OPEN, current=target, paused=False)


def call(number: int, tokens: int, group: str | None = None, turn: int = 0) -> ModelRequest:
    """Make a call that gets this many tokens."""
    return ModelRequest(
        messages=[{"role": "user", "content": f"Tell me of number {number}."}],
        tools=[],
        sampling=Sampling(max_tokens=tokens, extra={"ignore_eos": True}),
        seed=SEED,
        session=f"rollout-{number}",
        task="task",
        member=0,
        turn=turn,
        group=group or f"group-{number}",
    )


def ask(fleet: Fleet, count: int, tokens: int, group: str | None = None) -> list[asyncio.Task[ModelReply]]:
    """Start this many calls; each belongs to a separate group if none is named."""
    return [asyncio.create_task(fleet.model.complete(call(number, tokens, group))) for number in range(count)]


def assert_made_as_recorded(reply: ModelReply) -> list[str]:
    """Check every token with the weights of its recorded version; return the versions in order."""
    ids, prompt = reply.completion_token_ids, reply.prompt_token_ids
    assert ids is not None
    assert prompt is not None
    assert sum(span.tokens for span in reply.policy_spans) == len(ids)
    position, versions = 0, []
    for span in reply.policy_spans:
        assert span.version is not None
        part = ids[position : position + span.tokens]
        again = made_by(int(span.version), [*prompt, *ids[:position]], span.tokens, seed=SEED, ignore_eos=True)
        assert part == again, f"version {span.version} did not make tokens {position} to {position + span.tokens}"
        versions.append(span.version)
        position += span.tokens
    return versions
