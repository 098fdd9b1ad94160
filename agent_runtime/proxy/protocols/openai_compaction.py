"""OpenAI's compaction of a conversation (platform.openai.com/docs/api-reference/responses/compact). Pure.

The model itself writes the summary. The call is recorded like any other.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent_runtime.proxy.chat import ChatAnswer, ChatRequest, Earlier, JsonObject
from agent_runtime.proxy.protocols.openai_responses import OpenAIResponses
from agent_runtime.proxy.protocols.responses_items import COMPACTION, response_usage

PROMPT = (
    "Summarise this conversation for the one who continues it, and who will see your summary instead of it. Keep the "
    "task, what was done and found, the names of files and commands that matter, and what is left to do."
)
SUMMARY_HEAD = "Summary of the conversation so far:\n"


class OpenAICompaction(OpenAIResponses):
    """A `Translation`."""

    name = "compaction"
    path = "/responses/compact"

    def parse(self, body: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        request = super().parse({**body, "stream": False}, earlier)
        users = [message["content"] for message in request.messages if message["role"] == "user"]
        return replace(
            request,
            messages=[*request.messages, {"role": "user", "content": PROMPT}],
            extra={**request.extra, "users": users},
        )

    def answer(self, request: ChatRequest, answer: ChatAnswer) -> JsonObject:
        """Return the user's messages, and the summary as the content that only this proxy reads."""
        users = [
            {
                "id": f"msg_{answer.id}-u{i}",
                "type": "message",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": text}],
            }
            for i, text in enumerate(request.extra["users"])
        ]
        summary = {"id": f"cmp_{answer.id}", "type": COMPACTION, "encrypted_content": SUMMARY_HEAD + answer.reply.text}
        return {
            "id": f"resp_{answer.id}",
            "object": "response.compaction",
            "created_at": answer.created,
            "output": [*users, summary],
            "usage": response_usage(answer.reply),
        }
