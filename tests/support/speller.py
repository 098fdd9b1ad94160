"""A model whose tokens are letters, for tests of its record."""

import asyncio
from collections.abc import Awaitable, Callable

from agent_runtime.models.base import ModelReply, ModelRequest
from rollout_api.records import Usage


async def at_once(_question: int, _letter: int) -> None:
    """Spell without pauses between letters."""


class Speller:
    """Answers question N of a conversation with `answer N of NAME`, letter by letter; token ids are code points.

    `before` is awaited before each letter, with the numbers of question and letter.
    """

    token_capture = "Tokens"

    def __init__(self, name: str = "speller", before: Callable[[int, int], Awaitable[None]] = at_once) -> None:
        self.name, self.signature = "speller", name
        self.cancelled = 0
        self._before = before

    async def complete(self, request: ModelRequest) -> ModelReply:
        """See Model."""
        number = sum(message["role"] == "user" for message in request.messages)
        text = f"answer {number} of {self.signature}"
        try:
            for position, letter in enumerate(text):
                await self._before(number, position)
                if request.on_text is not None:
                    request.on_text(letter)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        known = list(request.prefix.ids) if request.prefix else []
        further = request.messages[request.prefix.messages if request.prefix else 0 :]
        prompt = [*known, *(ord(letter) for message in further for letter in message["content"])]
        ids = [ord(letter) for letter in text]
        return ModelReply(
            message={"role": "assistant", "content": text},
            finish_reason="stop",
            model=self.name,
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(ids)),
            prompt_token_ids=prompt,
            completion_token_ids=ids,
            logprobs=[-0.5] * len(ids),
        )

    async def check(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
