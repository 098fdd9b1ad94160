"""What the engine has seen of one attempt, as token ids: each prompt is stored as what comes after the ids before it.

Storing whole prompts would make a journal grow with the square of its turns. Pure.
"""

from collections.abc import Sequence
from typing import Any

from rollout_api.records import ResponseRecord


def common_length(old: Sequence[Any], new: Sequence[Any]) -> int:
    """How many items at the head are equal."""
    if len(new) >= len(old) and new[: len(old)] == old:
        return len(old)
    length = 0
    for before, after in zip(old, new, strict=False):
        if before is not after and before != after:
            break
        length += 1
    return length


def split_prompt(known: Sequence[int], prompt: Sequence[int] | None) -> tuple[int, list[int] | None]:
    """A prompt as a record has it: known ids that are kept (`ResponseRecord.prompt_keep`), and those after them."""
    if prompt is None:
        return 0, None
    keep = common_length(known, prompt)
    return keep, list(prompt[keep:])


class TokenHistory:
    """Ids of the latest answer that had any, prompt and completion, and the messages that they stand for."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.messages = 0
        """Messages at the head of the conversation, that answer included; 0 when the ids stand for no such head any more."""

    def split(self, prompt: Sequence[int] | None) -> tuple[int, list[int] | None]:
        """See `split_prompt`."""
        return split_prompt(self.ids, prompt)

    def add(self, response: ResponseRecord, messages: int) -> list[int] | None:
        """Take the next answer in; `messages` counts its conversation, the answer included. Returns its whole prompt.

        None for an answer without ids: those before it stay what is known.
        """
        if response.prompt_token_ids is None or response.completion_token_ids is None:
            return None
        prompt = [*self.ids[: response.prompt_keep], *response.prompt_token_ids]
        self.ids, self.messages = [*prompt, *response.completion_token_ids], messages
        return prompt

    def keep_messages(self, count: int) -> None:
        """The next call's conversation has only so many messages of the last one's head."""
        if count < self.messages:
            self.messages = 0
