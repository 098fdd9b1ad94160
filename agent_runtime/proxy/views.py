"""A session's records as others read them: verl's (verl-recipe PR #83) and rLLM's (rllm-model-gateway, TraceRecord). Pure.

Both list the turns that count: those with an answer, without the answers that reached nobody.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from agent_runtime.proxy.history import History, Turn
from agent_runtime.proxy.session import SessionSettings
from agent_runtime.recording.message_tree import undelivered_turns
from rollout_api.records import Record


def session_view(settings: SessionSettings, records: Sequence[Record], *, completed: bool) -> dict[str, Any]:
    """`GET /sessions/{id}`: PR #83's record, with what it lacks beside it."""
    history = History(records)
    return {
        "session_id": settings.id,
        "created_at": settings.created,
        "completed": completed,
        "metadata": settings.metadata,
        "turns": [_turn(history, turn) for turn in _counted(history, records)],
        "usage": {
            "requests": history.spent.requests,
            "turns": history.spent.turns,
            "tokens": history.spent.tokens,
        },
    }


def traces_view(settings: SessionSettings, records: Sequence[Record]) -> list[dict[str, Any]]:
    """`GET /sessions/{id}/traces`: rLLM's records."""
    history = History(records)
    return [_trace(settings, history, turn) for turn in _counted(history, records)]


def _counted(history: History, records: Sequence[Record]) -> Iterator[Turn]:
    extended = {turn.intent.parent for turn in history.turns.values()}
    undelivered = undelivered_turns(records) - extended
    return (turn for number, turn in sorted(history.turns.items()) if number not in undelivered)


def _turn(history: History, turn: Turn) -> dict[str, Any]:
    reply = history.reply(turn)
    return {
        "turn": turn.intent.turn,
        "parent": turn.intent.parent,
        "request_messages": history.conversation(turn)[:-1],
        "tools": turn.tools,
        "completion_text": reply.text,
        "message": reply.message,
        "tool_calls": reply.message.get("tool_calls") or [],
        "finish_reason": reply.finish_reason,
        "prompt_token_ids": reply.prompt_token_ids,
        "completion_token_ids": reply.completion_token_ids,
        "completion_logprobs": reply.logprobs,
        "policy_spans": [span.wire() for span in reply.policy_spans],
    }


def _trace(settings: SessionSettings, history: History, turn: Turn) -> dict[str, Any]:
    reply, response = history.reply(turn), turn.response
    versions = [span.version for span in reply.policy_spans]
    return {
        "trace_id": f"{settings.id}-{turn.intent.turn}",
        "session_id": settings.id,
        "model": reply.model,
        "messages": history.conversation(turn)[:-1],
        "prompt_token_ids": reply.prompt_token_ids or [],
        "response_message": reply.message,
        "completion_token_ids": reply.completion_token_ids or [],
        "logprobs": reply.logprobs,
        "finish_reason": reply.finish_reason,
        # rLLM has one number a call; the oldest is the safe one where an update came in between.
        "weight_version": int(versions[0]) if versions and versions[0] and versions[0].isdecimal() else None,
        "latency_ms": response.seconds * 1000,
        "token_counts": {"prompt": reply.usage.prompt_tokens, "completion": reply.usage.completion_tokens},
        "timestamp": response.time,
        "metadata": {"tools": turn.tools, **settings.metadata},
    }
