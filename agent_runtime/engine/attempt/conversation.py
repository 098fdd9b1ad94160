"""One conversation of an attempt with the model. It determines which messages of the next call are new."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.models.token_history import TokenHistory, common_length
from rollout_api.records import IntentRecord, Message


class Conversation:
    """Messages of a conversation up to the latest answer, and their token ids as the inference server reported them."""

    def __init__(self) -> None:
        self.tokens = TokenHistory()
        self._id: int | None = None
        self._messages: list[Message] = []
        self._tools: list[dict[str, Any]] | None = None
        self._asked: tuple[int, list[Message], list[dict[str, Any]]] = -1, [], []
        """The latest call. No call follows before it is answered, because an agent may cancel a call."""
        self.turn: int | None = None
        """Latest answered turn."""

    def intent(
        self,
        turn: int,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        agent_seconds: float | None = None,
    ) -> IntentRecord:
        """Return the record of the next call, which is turn `turn` of the attempt."""
        # Copies: agents may change the objects that they passed, and a changed message must differ from the earlier
        # one.
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
            agent_seconds=agent_seconds,
        )
        self._asked = turn, sent, definitions
        return record

    def unrecorded(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages after those that `messages` shares with the latest answered call."""
        return messages[common_length(self._messages, messages) :]

    def answered(self, message: Message) -> int:
        """Add the answer; return the number of messages."""
        self.turn, self._messages, self._tools = self._asked
        self._messages.append(_copied(message))
        return len(self._messages)


def _copied(value: Any) -> Any:
    """Copy the value as the journal would return it: tuples become lists."""
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value
