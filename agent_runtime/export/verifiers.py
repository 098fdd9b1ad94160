"""A run as the `results.jsonl` of verifiers' `vf-eval`: one line for each rollout (`RolloutOutput` of verifiers
0.1.14).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from agent_runtime.export.parquet import json_text
from agent_runtime.recording.atif import reasoning_of, text_of
from agent_runtime.recording.branches import copied_turn
from agent_runtime.recording.messages import Turn, fold, last_made, prompt_in
from agent_runtime.recording.reader import RunReader
from rollout_api.records import Message, Outcome, Result


async def rollout_output(run: RunReader, index: int) -> list[dict[str, Any]]:
    """Return the line of a rollout. Raises RecordCorrupt.

    The conversation is that of the last turn, as in verifiers; its messages before the first answer are the prompt. That
    includes turns that were copied from another rollout.
    Ungraded rollouts have a null reward, and an error; verifiers' own lines would have a reward of 0.
    """
    result = run.seals[index].result
    records = await run.records(index)
    turns, copied = fold(records), copied_turn(records)
    last = last_made(turns)
    conversation = last.conversation() if last else []
    prompt, own = prompt_in(conversation, turns, copied), [turn for turn in turns if turn.number > copied]
    return [
        {
            "example_id": result.group,
            "prompt": [_message(message) for message in prompt],
            "completion": [_message(message) for message in conversation[len(prompt) :]],
            "reward": result.reward,
            "timing": _timing(result, own),
            "is_completed": result.outcome is Outcome.COMPLETED,
            "is_truncated": any(turn.response is not None and turn.response.finish_reason == "length" for turn in own),
            "stop_condition": result.stop_reason,
            "metrics": {**result.rewards, "num_turns": float(result.turns), "num_tool_calls": float(result.tool_calls)},
            "tool_defs": [_tool(tool) for tool in last.tools] if last else [],
            "token_usage": {
                "input_tokens": float(result.usage.prompt_tokens),
                "output_tokens": float(result.usage.completion_tokens),
            },
            "info": result.wire(),
            "error": _error(result),
        }
    ]


def _message(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls") or []
    given = {"tool_call_id": message.get("tool_call_id"), "reasoning_content": reasoning_of(message)}
    return {
        "role": message["role"],
        "content": text_of(message.get("content")),
        **{name: value for name, value in given.items() if value},
        # Calls are JSON texts, because Hugging Face's datasets would give each call the fields of all calls.
        **(
            {"tool_calls": [json_text({"id": call.get("id", ""), **call.get("function", {})}) for call in calls]}
            if calls
            else {}
        ),
    }


def _tool(definition: dict[str, Any]) -> dict[str, Any]:
    function = definition.get("function", definition)
    return {
        "name": function.get("name", ""),
        "description": function.get("description", ""),
        "parameters": function.get("parameters", {}),
    }


def _error(result: Result) -> dict[str, str] | None:
    if result.outcome is Outcome.COMPLETED:
        return None
    name = result.reason or result.outcome.value
    return {"error": name, "error_chain_repr": f"{name}({result.message!r})", "error_chain_str": result.message or name}


def _timing(result: Result, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return spans in Unix seconds; 0 for phases that were not reached."""
    started, ended = result.started or 0.0, result.ended or 0.0
    calls = [turn.response for turn in turns if turn.response is not None]
    setup_end = turns[0].time if turns else started
    generation_end = max((call.time for call in calls), default=setup_end)
    graded = result.seconds.get("verifier", 0.0) if result.reward is not None else 0.0
    return {
        "start_time": started,
        "setup": _span(started, setup_end),
        "generation": _span(setup_end, generation_end),
        "scoring": _span(ended - graded, ended) if graded else _span(0.0, 0.0),
        "model": _spans((call.time - call.seconds, call.time) for call in calls),
    }


def _span(start: float, end: float) -> dict[str, float]:
    return {"start": start, "end": end, "duration": end - start}


def _spans(spans: Iterable[tuple[float, float]]) -> dict[str, Any]:
    found = [_span(*span) for span in spans]
    return {"spans": found, "duration": sum(span["duration"] for span in found)}
