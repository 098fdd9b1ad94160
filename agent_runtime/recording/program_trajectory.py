"""Convert the trajectory file that a program wrote into ATIF 1.7. The policy controls the file, so it is untrusted.

Sources of the formats: mini-swe-agent's `DefaultAgent.serialize` (2.4, `trajectory_format: mini-swe-agent-1.1`, with
messages of chat completions or of OpenAI's Responses), SWE-agent's documentation of `.traj` files, Harbor's RFC 0001
for ATIF.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NoReturn

from agent_runtime.recording.atif import given, text_of, tool_call
from agent_runtime.recording.session_files import SESSION_FILES, form_of_lines
from agent_runtime.recording.trajectory_steps import Json, Steps, metrics_of, time_of, trajectory_of
from rollout_api.rollout_job import TrajectoryFormat

_SOURCES: Final = {"system": "system", "developer": "system", "assistant": "agent"}
"""ATIF's source of a message, by its role; for all others it is the user."""
_MOST_PARTS: Final = 1_000_000
"""Limit of the values, names and lines of a file. In memory, each takes up to 250 bytes, however short it is in the file."""
_PARTS: Final = re.compile(rb'"(?:[^"\\\r\n]++|\\.)*+"?|[\[{,\r\n]')
"""A text, or what precedes another value or line."""
_PROBLEM_CHARACTERS: Final = 300
"""Limit of a problem's text, which may quote the file."""


class UnreadableTrajectory(Exception):
    """The file is in no supported format, or not in the requested one."""


def to_atif(data: bytes, form: TrajectoryFormat | None, session: str) -> tuple[TrajectoryFormat, bytes]:
    """Return the format of a trajectory file, and the trajectory in ATIF as JSON. Raises UnreadableTrajectory with the
    problem.

    `form` is detected if left out; `session` identifies the rollout among all runs if the file does not name its session.
    """
    found: TrajectoryFormat | None = None
    try:
        found, content = _content_of(data)
        if found is None or form not in (None, found):
            keys = ", ".join(repr(key[:40]) for key in list(content[0])[:8])
            raise UnreadableTrajectory(
                f"its keys ({keys}) match {found or 'no supported format'}, "
                f"expected {form or 'one of ' + ', '.join(TrajectoryFormat)}"
            )
        converted = _CONVERSIONS[found](content[0]) if found in _CONVERSIONS else SESSION_FILES[found](content)
        written = json.dumps(
            {"session_id": session, **converted}, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
    except UnreadableTrajectory:
        raise
    except Exception as error:  # noqa: BLE001 the policy must not be able to end its attempt by a file
        problem = f"{type(error).__name__}: {error}"[:_PROBLEM_CHARACTERS]
        raise UnreadableTrajectory(f"it is not a valid {found or 'JSON'} trajectory: {problem}") from None
    return found, written.encode(errors="replace")


def _content_of(data: bytes) -> tuple[TrajectoryFormat | None, list[Json]]:
    """Return the format of a file, and its JSON object, or those of its lines. A program that was ended may have written
    a part of its last line. Raises UnreadableTrajectory.
    """
    if any(True for _ in islice(_PARTS.finditer(data), _MOST_PARTS, None)):
        raise UnreadableTrajectory(f"it has more than {_MOST_PARTS} values and lines")
    try:
        content = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        lines = [line for line in map(_line_of, data.splitlines()) if line is not None]
        if not lines:
            raise UnreadableTrajectory(f"it is not JSON: {error}") from None
        return form_of_lines(lines), lines
    if not isinstance(content, dict):
        raise UnreadableTrajectory(f"expected a JSON object, got {type(content).__name__}")
    return _form_of(content) or form_of_lines([content]), [content]


def _line_of(line: bytes) -> Json | None:
    try:
        content = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _form_of(content: Json) -> TrajectoryFormat | None:
    if str(content.get("schema_version", "")).startswith("ATIF-v1."):
        return TrajectoryFormat.ATIF
    if str(content.get("trajectory_format", "")).startswith("mini-swe-agent-1"):
        return TrajectoryFormat.MINI_SWE_AGENT
    if isinstance(content.get("trajectory"), list) and "history" in content:
        return TrajectoryFormat.SWE_AGENT
    return None


def _from_atif(content: Json) -> Json:
    agent, steps = content["agent"], content["steps"]
    if not isinstance(agent["name"], str) or not isinstance(agent["version"], str) or not steps:
        raise ValueError("agent.name, agent.version and steps are required")
    for number, step in enumerate(steps, start=1):
        if step["step_id"] != number or step["source"] not in ("system", "user", "agent"):
            raise ValueError(f"steps[{number - 1}]: step_id {number} and source system, user or agent expected")
        if not isinstance(step["message"], str | list):
            raise TypeError(f"steps[{number - 1}].message: a text or a list of parts expected")
    return content


def _from_mini_swe_agent(content: Json) -> Json:
    info = content["info"]
    config, spent = info.get("config") or {}, info.get("model_stats") or {}
    steps = Steps()
    for message in content["messages"]:
        if (result := _tool_result(message)) is not None:
            steps.observe(*result)
        elif message.get("object") == "response":
            steps.add(_response_step(message))
        else:
            steps.add(_chat_step(message))
    return trajectory_of(
        name="mini-swe-agent",
        version=info.get("mini_version"),
        model=(config.get("model") or {}).get("model_name"),
        steps=steps.all,
        cost=spent.get("instance_cost"),
        ending={"exit_status": info.get("exit_status"), "submission": info.get("submission")},
    )


def _tool_result(message: Json) -> tuple[str | None, str] | None:
    """Return (id of the call, text) of a message with a call's result, in either of OpenAI's formats."""
    if message.get("role") == "tool":
        return message.get("tool_call_id"), text_of(message.get("content"))
    if message.get("type") == "function_call_output":
        return message.get("call_id"), text_of(message.get("output"))
    return None


def _chat_step(message: Json) -> Json:
    extra = message.get("extra") or {}
    source = _SOURCES.get(str(message.get("role")), "user")
    step = {"source": source, "message": text_of(message.get("content")), **time_of(extra.get("timestamp"))}
    if source != "agent":
        # mini-swe-agent ends with a message of role "exit": its submission.
        return step | given(extra=given(role="exit" if message.get("role") == "exit" else None))
    calls = [
        tool_call(call.get("id"), call["function"].get("name"), call["function"].get("arguments"), position)
        for position, call in enumerate(message.get("tool_calls") or [])
    ]
    usage = (extra.get("response") or {}).get("usage") or {}
    return {
        **step,
        **given(reasoning_content=text_of(message.get("reasoning_content"))),
        **given(tool_calls=calls),
        **metrics_of(usage.get("prompt_tokens"), usage.get("completion_tokens"), extra.get("cost")),
        "llm_call_count": 1,
    }


def _response_step(response: Json) -> Json:
    """Return the step of an answer in the format of OpenAI's Responses."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for item in response.get("output") or []:
        if item.get("type") == "message":
            texts.append(text_of(item.get("content")))
        elif item.get("type") == "reasoning":
            thoughts.append(text_of(item.get("summary") or item.get("content")))
        elif item.get("type") == "function_call":
            calls.append(tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), len(calls)))
    usage = response.get("usage") or {}
    return {
        "source": "agent",
        "message": "\n".join(texts),
        **time_of(response.get("created_at")),
        **given(reasoning_content="\n".join(thoughts)),
        **given(tool_calls=calls),
        **metrics_of(usage.get("input_tokens"), usage.get("output_tokens"), (response.get("extra") or {}).get("cost")),
        "llm_call_count": 1,
    }


def _from_swe_agent(content: Json) -> Json:
    info = content.get("info") or {}
    spent = info.get("model_stats") or {}
    steps = Steps()
    for step in _before_the_first_answer(content["history"]):
        steps.add(step)
    for entry in content["trajectory"]:
        action, thought, response = (text_of(entry.get(name)) for name in ("action", "thought", "response"))
        calls = [tool_call(None, "action", {"command": action}, 0)] if action else []
        steps.add(
            {
                "source": "agent",
                "message": response or thought,
                **given(reasoning_content=thought if response else None),
                **given(tool_calls=calls),
                "llm_call_count": 1,
                **given(extra=given(execution_time=entry.get("execution_time"), state=entry.get("state"))),
            }
        )
        if observation := text_of(entry.get("observation")):
            steps.observe(calls[0]["tool_call_id"] if calls else None, observation)
    return trajectory_of(
        name="SWE-agent",
        version=info.get("swe_agent_version"),
        model=None,
        steps=steps.all,
        cost=spent.get("instance_cost"),
        totals=(spent.get("tokens_sent"), spent.get("tokens_received")),
        ending={
            **{name: info.get(name) for name in ("exit_status", "submission")},
            "environment": content.get("environment"),
        },
    )


def _before_the_first_answer(history: Sequence[Json]) -> Iterator[Json]:
    for message in history:
        if message.get("role") == "assistant":
            return
        source = _SOURCES.get(str(message.get("role")), "user")
        # A demonstration is part of the prompt, not an answer of this run's model.
        yield {
            "source": source,
            "message": text_of(message.get("content")),
            **given(is_copied_context=bool(message.get("is_demo"))),
        }


_CONVERSIONS: Final[Mapping[TrajectoryFormat, Callable[[Json], Json]]] = {
    TrajectoryFormat.ATIF: _from_atif,
    TrajectoryFormat.MINI_SWE_AGENT: _from_mini_swe_agent,
    TrajectoryFormat.SWE_AGENT: _from_swe_agent,
}
