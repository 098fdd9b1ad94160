"""A readable form of a rollout, for terminals and reports: the records of its journal combined into steps."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_runtime.models.answers import decoded_object
from agent_runtime.models.base import ModelReply
from agent_runtime.recording.messages import results_by_turn
from rollout_api.records import (
    AttemptRecord,
    CommandRecord,
    FailedRecord,
    IntentRecord,
    Observation,
    Record,
    ResponseRecord,
    StopRecord,
)

SENT = "assistant message"
"""Role of an assistant message in a prompt that is not a recorded answer, such as an example of the agent's."""


@dataclass(frozen=True)
class Call:
    """A tool call and its result. `result` is None if none was recorded."""

    name: str
    arguments: str
    result: str | None = None
    error: bool = False
    seconds: float = 0
    traceback: str | None = None
    """Traceback of the tool's own exception."""


@dataclass(frozen=True)
class Step:
    """One message with its tool calls. `role` is a role of OpenAI's API, `SENT`, `agent` for a command of the agent's own
    code, or `note` for a remark.
    """

    role: str
    text: str = ""
    turn: int | None = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    seconds: float = 0
    tokens: tuple[int, int] = (0, 0)
    """Prompt and completion tokens of the model call."""


def steps(records: Sequence[Record]) -> list[Step]:
    """Return the steps of an attempt in order. Works on an unfinished journal too."""
    shown: list[Step] = []
    # Places of tool calls by their ids: the step, and the call in it.
    asked: dict[str, tuple[int, int]] = {}
    answers: set[str] = set()
    branch = 0
    observations = results_by_turn(records)
    # Storing the agent's files may add another one, and the last one counts.
    stop = next((record for record in reversed(records) if isinstance(record, StopRecord)), None)
    for record in records:
        if isinstance(record, AttemptRecord):
            shown.append(Step("note", _place(record)))
        elif isinstance(record, IntentRecord):
            if record.branch != branch:
                branch = record.branch
                shown.append(Step("note", _new_branch(record)))
            for message in record.messages:
                role, text = str(message.get("role", "user")), text_of(message.get("content"))
                if role == "assistant":
                    # Not an answer: an agent sends an earlier one again, perhaps without its calls, or an example.
                    if text.strip() and text not in answers:
                        shown.append(Step(SENT, text))
                elif (place := asked.get(str(message.get("tool_call_id")))) is None:
                    shown.append(Step(role, text, record.turn))
                else:
                    # A program in the sandbox reports the results of its calls in its next request only.
                    shown[place[0]] = _with_reported_result(shown[place[0]], place[1], text)
        elif isinstance(record, ResponseRecord):
            ids, step = _answer(record, observations.get(record.turn, ()))
            asked.update((call_id, (len(shown), number)) for number, call_id in enumerate(ids))
            shown.append(step)
            answers.add(step.text)
        elif isinstance(record, CommandRecord):
            arguments = json.dumps({"command": record.command}, ensure_ascii=False)
            call = Call("run_command", arguments, record.result, seconds=record.seconds)
            shown.append(Step("agent", calls=(call,), seconds=record.seconds))
        elif isinstance(record, StopRecord) and record is stop:
            why = f": {record.message}" if record.message else ""
            shown.append(Step("note", f"The agent stopped, {record.stop_reason.value}{why}"))
        elif isinstance(record, FailedRecord):
            shown.append(Step("note", f"The attempt was lost, {record.reason}: {record.message}"))
    return shown


def _place(record: AttemptRecord) -> str:
    kind = " ".join(str(record.sandbox[key]) for key in ("provider", "mode") if record.sandbox.get(key))
    return f"Sandbox: {kind}" if kind else "Sandbox ready"


def _new_branch(record: IntentRecord) -> str:
    if not record.keep:
        return f"Another conversation begins here, or the same one without its messages so far. Branch {record.branch}."
    return f"The conversation was rewritten here: its first {record.keep} messages remain. Branch {record.branch}."


def _answer(response: ResponseRecord, observed: Sequence[Observation]) -> tuple[list[str], Step]:
    """Return the ids of an answer's calls, and its step."""
    results = {result.call_id: result for result in observed}
    native = ModelReply(response.message, "").tool_calls
    found = [(call.id, Call(str(call.name or "?"), text_of(call.arguments))) for call in native]
    # Results without native calls: of calls that the agent's own code makes, or that a model writes as text.
    others = set(results) - {call.id for call in native}
    found += [
        (result.call_id, Call(result.tool, result.arguments or "")) for result in observed if result.call_id in others
    ]
    calls = [_with_result(call, results[call_id]) if call_id in results else call for call_id, call in found]
    return [call_id for call_id, _ in found], Step(
        role="assistant",
        text=text_of(response.message.get("content")),
        turn=response.turn,
        reasoning=text_of(response.message.get("reasoning_content") or response.message.get("reasoning")),
        calls=tuple(calls),
        seconds=response.seconds,
        tokens=(response.usage.prompt_tokens, response.usage.completion_tokens),
    )


def _with_reported_result(step: Step, number: int, result: str) -> Step:
    """Return a step with the result of a call, unless it has one already."""
    call = step.calls[number]
    if call.result is not None:
        return step
    calls = [*step.calls]
    calls[number] = replace(call, result=result)
    return replace(step, calls=tuple(calls))


def _with_result(call: Call, result: Observation) -> Call:
    return replace(call, result=result.content, error=result.error, seconds=result.seconds, traceback=result.traceback)


def text_of(content: Any) -> str:
    """Return the text of a message's content in any format of OpenAI's API."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else json.dumps(part)
            for part in content
        )
    return json.dumps(content, ensure_ascii=False)


def readable_arguments(arguments: str) -> list[tuple[str, str]]:
    """Return arguments by name, with strings unquoted; a single entry without a name if they are not a JSON object."""
    if (parsed := decoded_object(arguments or "{}")) is None:
        return [("", arguments)]
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in parsed.items()
    ]
