"""One replica of the session proxy as a process.

`python -m tests.support.proxy_replica STORE PORT LOST_SECONDS [keyless]`. Its model answers after some milliseconds,
each time with words that no other answer has.
"""

import asyncio
import random
import secrets
import signal
import sys

from agent_runtime.models.base import ModelReply, ModelRequest
from agent_runtime.proxy import peers
from agent_runtime.proxy.serve import standalone_proxy
from agent_runtime.recording.store import Store
from rollout_api.records import Usage

ADMIN_KEY = "the-admin-key"


class UniqueModel:
    """A `Model` whose answers differ."""

    name = "tiny"
    token_capture = "TextOnly"

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return three words. The message `wait` gets no answer within an hour."""
        if request.messages[-1]["content"] == "wait":
            await asyncio.sleep(3600)
        words = [secrets.token_hex(4) for _ in range(3)]
        for word in words:
            await asyncio.sleep(random.uniform(0.002, 0.03))
            if request.on_text is not None:
                request.on_text(f"{word} ")
        message = {"role": "assistant", "content": "".join(f"{word} " for word in words)}
        return ModelReply(message, "stop", self.name, Usage(prompt_tokens=1, completion_tokens=3))

    async def check(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class LateStore(Store):
    """A store whose replies come late, so that a kill often falls between a record and the reply that depends on it."""

    async def create(self, key: str, data: bytes) -> bool:
        """See `Store.create`."""
        created = await super().create(key, data)
        await asyncio.sleep(random.uniform(0, 0.03))
        return created


async def serve(uri: str, port: int, admin_key: str | None) -> None:
    """Serve until a signal or a kill."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with standalone_proxy(LateStore.open(uri, {}), UniqueModel(), admin_key, port=port):
        await stopped.wait()


if __name__ == "__main__":
    # In place of 5 s, so that a test need not wait.
    peers.LOST_SECONDS = float(sys.argv[3])  # type: ignore[misc]
    peers._ASK_SECONDS = 0.3  # type: ignore[misc]
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), None if "keyless" in sys.argv else ADMIN_KEY))
