"""One conversation of an attempt with the model: what of its next call is new. An attempt has one, and one for each of its
sub-agents. Pure."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.recording.token_history import TokenHistory, common_length
from rollout_api.records import IntentRecord, Message


class Conversation:
    """Its messages up to the latest answer, and the ids that the engine has seen of them."""

    def __init__(self) -> None:
        self.tokens = TokenHistory()
        self._id: int | None = None
        self._messages: list[Message] = []
        self._tools: list[dict[str, Any]] | None = None
        self._asked: tuple[int, list[Message], list[dict[str, Any]]] = -1, [], []
        """The latest call, which nothing goes on from before it is answered: an agent may give a call up."""
        self.turn: int | None = None
        """Its latest answered turn."""

    def intent(self, turn: int, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> IntentRecord:
        """The record of its next call, which is turn `turn` of the attempt."""
        # Copies: agents may change what they passed, and a changed message has to differ from the one before.
        sent: list[Message] = _copied(messages)
        definitions: list[dict[str, Any]] = _copied(tools)
        keep = common_length(self._messages, sent)
        same_tools = definitions == self._tools
        self.tokens.keep_messages(keep if same_tools else 0)
        if self._id is None:
            self._id = turn
        record = IntentRecord(
            turn=turn,
            time=time.time(),
            conversation=self._id,
            parent=self.turn,
            keep=keep,
            messages=sent[keep:],
            tools=None if same_tools else definitions,
        )
        self._asked = turn, sent, definitions
        return record

    def unrecorded(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Those behind the ones that its latest answered call has in common with `messages`."""
        return messages[common_length(self._messages, messages) :]

    def answered(self, message: Message) -> int:
        """Take the answer in; how many messages there are now."""
        self.turn, self._messages, self._tools = self._asked
        self._messages.append(_copied(message))
        return len(self._messages)


def _copied(value: Any) -> Any:
    """The same value in containers of its own, as the journal gives it back: tuples become lists."""
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value
