"""verl's supervised dataset for `rolloutctl export --format verl`, with the tools that the policy was given.

`data.custom_cls.path=pkg://agent_runtime.integrations.verl.conversations data.custom_cls.name=RecordedConversations`
"""

import json
from typing import Any

from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset  # type: ignore[import-not-found]

from rollout_api.records import Message


class RecordedConversations(MultiTurnSFTDataset):  # type: ignore[misc]
    """Restores messages as the chat template saw them: Parquet gives every message all fields, and stores tools as
    text.
    """

    def _read_files_and_process(self) -> None:
        super()._read_files_and_process()
        self.tools = [json.loads(text) or None for text in self.dataframe["tools_json"]]

    def _build_messages(self, example: dict[str, Any]) -> list[Message]:
        return [_as_recorded(message) for message in super()._build_messages(example)]


def _as_recorded(message: Message) -> Message:
    # As in servers: templates check whether a field exists, and need arguments as an object.
    given = {name: value for name, value in message.items() if value is not None}
    calls = [{**call, "function": _function(call["function"])} for call in given.get("tool_calls", [])]
    return {**given, **({"tool_calls": calls} if calls else {})}


def _function(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except ValueError:
        return function
