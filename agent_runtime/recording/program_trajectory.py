"""Convert the trajectory file that a program wrote into ATIF 1.7. The policy controls the file, so it is untrusted.

Sources of the formats: mini-swe-agent's `DefaultAgent.serialize` (2.4, `trajectory_format: mini-swe-agent-1.1`, with
messages of chat completions or of OpenAI's Responses), SWE-agent's documentation of `.traj` files, Harbor's RFC 0001
for ATIF.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from agent_runtime.recording.atif import SCHEMA_VERSION, given, text_of, timestamp, tool_call
from rollout_api.rollout_job import TrajectoryFormat

Json = dict[str, Any]
_SOURCES: Final = {"system": "system", "developer": "system", "assistant": "agent"}
"""ATIF's source of a message, by its role; for all others it is the user."""


class UnreadableTrajectory(Exception):
    """The file is in no supported format, or not in the requested one."""


def to_atif(data: bytes, form: TrajectoryFormat | None, session: str) -> tuple[TrajectoryFormat, bytes]:
    """Return the format of a trajectory file, and the trajectory in ATIF as JSON. Raises UnreadableTrajectory with the
    problem.

    `form` is detected if left out; `session` identifies the rollout among all runs if the file does not name its session.
    """
    try:
        content = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UnreadableTrajectory(f"it is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UnreadableTrajectory(f"expected a JSON object, got {type(content).__name__}")
    found = _form_of(content)
    if found is None or form not in (None, found):
        raise UnreadableTrajectory(
            f"its keys ({', '.join(repr(key[:40]) for key in list(content)[:8])}) match "
            f"{found or 'no supported format'}, "
            f"expected {form or 'one of ' + ', '.join(TrajectoryFormat)}"
        )
    try:
        converted = {"session_id": session, **_CONVERSIONS[found](content)}
        written = json.dumps(converted, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, OSError, RecursionError) as error:
        raise UnreadableTrajectory(f"it is not a valid {found} trajectory: {type(error).__name__}: {error}") from None
    return found, written.encode(errors="replace")


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


class _Steps:
    """The steps so far. A result finds its step in constant time."""

    def __init__(self) -> None:
        self.all: list[Json] = []
        self._latest: Json | None = None
        """The agent's latest step."""
        self._asked: dict[str, Json] = {}
        """The latest step that has a call, by the id of the call."""

    def add(self, step: Json) -> None:
        self.all.append(step)
        if step["source"] == "agent":
            self._latest = step
            self._asked.update((call["tool_call_id"], step) for call in step.get("tool_calls", []))

    def observe(self, call_id: object, text: str) -> None:
        """Add a result to the step whose call it answers, or else to the latest agent's step."""
        asked = self._asked.get(call_id) if isinstance(call_id, str) else None
        if (step := asked or self._latest) is None:
            raise ValueError("a tool result precedes the first answer")
        result = {"content": text} if asked is None else {"source_call_id": call_id, "content": text}
        step.setdefault("observation", {"results": []})["results"].append(result)


def _from_mini_swe_agent(content: Json) -> Json:
    info = content["info"]
    config, spent = info.get("config") or {}, info.get("model_stats") or {}
    steps = _Steps()
    for message in content["messages"]:
        if (result := _tool_result(message)) is not None:
            steps.observe(*result)
        elif message.get("object") == "response":
            steps.add(_response_step(message))
        else:
            steps.add(_chat_step(message))
    return _trajectory(
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
    step = {"source": source, "message": text_of(message.get("content")), **_timestamp(extra.get("timestamp"))}
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
        **_metrics(usage.get("prompt_tokens"), usage.get("completion_tokens"), extra.get("cost")),
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
        **_timestamp(response.get("created_at")),
        **given(reasoning_content="\n".join(thoughts)),
        **given(tool_calls=calls),
        **_metrics(usage.get("input_tokens"), usage.get("output_tokens"), (response.get("extra") or {}).get("cost")),
        "llm_call_count": 1,
    }


def _from_swe_agent(content: Json) -> Json:
    info = content.get("info") or {}
    spent = info.get("model_stats") or {}
    steps = _Steps()
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
    return _trajectory(
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


def _trajectory(
    *,
    name: str,
    version: object,
    model: object,
    steps: Sequence[Json],
    cost: object,
    ending: Json,
    totals: tuple[object, object] | None = None,
) -> Json:
    if not steps:
        raise ValueError("the file has no steps")
    if totals is None:
        metrics = [step.get("metrics", {}) for step in steps]
        totals = sum(m.get("prompt_tokens", 0) for m in metrics), sum(m.get("completion_tokens", 0) for m in metrics)
    return {
        "schema_version": SCHEMA_VERSION,
        "agent": {"name": name, "version": str(version or "unknown"), **given(model_name=model and str(model))},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {
            **_count(total_prompt_tokens=totals[0], total_completion_tokens=totals[1]),
            **_money(total_cost_usd=cost),
            "total_steps": len(steps),
        },
        **given(extra=given(**ending)),
    }


def _metrics(prompt: object, completion: object, cost: object) -> Json:
    return given(metrics={**_count(prompt_tokens=prompt, completion_tokens=completion), **_money(cost_usd=cost)})


def _count(**fields: object) -> Json:
    return {name: value for name, value in fields.items() if isinstance(value, int) and not isinstance(value, bool)}


def _money(**fields: object) -> Json:
    return {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}


def _timestamp(seconds: object) -> Json:
    if not isinstance(seconds, int | float):
        return {}
    return {"timestamp": timestamp(seconds)}
