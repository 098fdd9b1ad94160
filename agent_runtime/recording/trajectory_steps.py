"""Parts of ATIF 1.7 that conversions of programs' trajectory files share. Values come from those files, so they are
untrusted.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from agent_runtime.recording.atif import SCHEMA_VERSION, given, timestamp, tool_call

Json = dict[str, Any]


class Steps:
    """The steps so far. A result finds its step in constant time."""

    def __init__(self) -> None:
        self.all: list[Json] = []
        self.latest: Json | None = None
        """The agent's latest step."""
        self._asked: dict[str, Json] = {}
        """The latest step that has a call, by the id of the call."""

    def add(self, step: Json) -> None:
        """Append a step."""
        self.all.append(step)
        if step["source"] == "agent":
            self.latest = step
            self.note_calls(step, step.get("tool_calls", []))

    def note_calls(self, step: Json, calls: Sequence[Json]) -> None:
        """Make calls of a step known, to which results refer."""
        self._asked.update((call["tool_call_id"], step) for call in calls)

    def observe(self, call_id: object, text: str) -> None:
        """Add a result to the step whose call it answers, or else to the latest agent's step."""
        asked = self._asked.get(call_id) if isinstance(call_id, str) else None
        if (step := asked or self.latest) is None:
            raise ValueError("a tool result precedes the first answer")
        result = {"content": text} if asked is None else {"source_call_id": call_id, "content": text}
        step.setdefault("observation", {"results": []})["results"].append(result)


class Conversation:
    """Steps that are built from the parts of messages, in their order."""

    def __init__(self) -> None:
        self.steps = Steps()
        self._said: dict[tuple[int, str], tuple[Json, list[str]]] = {}
        """Parts of the texts of steps, by step and field. They are joined once, because an answer may have 100,000."""
        self._open: Json | None = None
        self._key: object = None

    @property
    def latest(self) -> Json | None:
        """The agent's latest step."""
        return self.steps.latest

    def message(self, source: str, text: str, when: object) -> None:
        """Add a message that the model did not write."""
        self._open = None
        self.steps.add({"source": source, "message": text, **time_of(when)})

    def answer(self, when: object, key: object = None) -> Json:
        """Return the step of the current answer; a new one after a result or a message, or if `key` has changed."""
        if self._open is None or key != self._key:
            self._open = {"source": "agent", "message": "", **time_of(when), "llm_call_count": 1}
            self._key = key
            self.steps.add(self._open)
        return self._open

    def say(self, step: Json, text: str, field: str = "message") -> None:
        """Add text to an answer, or to its `reasoning_content`."""
        if text:
            step.setdefault(field, "")
            self._said.setdefault((id(step), field), (step, []))[1].append(text)

    def call(self, step: Json, call_id: object, name: object, arguments: object) -> None:
        """Add a tool call to an answer."""
        calls = step.setdefault("tool_calls", [])
        calls.append(tool_call(call_id, name, arguments, len(calls)))
        self.steps.note_calls(step, calls[-1:])

    def result(self, call_id: object, text: str) -> None:
        """Add the result of a call, after which another answer begins."""
        self._open = None
        self.steps.observe(call_id, text)

    def finish(self) -> list[Json]:
        """Return all steps with their texts."""
        for (_, field), (step, texts) in self._said.items():
            step[field] = "\n".join(texts)
        return self.steps.all


def trajectory_of(
    *,
    name: str,
    version: object,
    model: object,
    steps: Sequence[Json],
    cost: object = None,
    ending: Json | None = None,
    totals: tuple[object, object] | None = None,
) -> Json:
    """Return a trajectory of these steps. `totals` are the tokens of prompts and of completions; by default, the sums
    of the steps. Raises ValueError if there are no steps.
    """
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
        **given(extra=given(**(ending or {}))),
    }


def metrics_of(prompt: object, completion: object, cost: object = None) -> Json:
    """Return the metrics of a step: tokens, and US dollars."""
    return given(metrics={**_count(prompt_tokens=prompt, completion_tokens=completion), **_money(cost_usd=cost)})


def _count(**fields: object) -> Json:
    return {name: value for name, value in fields.items() if isinstance(value, int) and not isinstance(value, bool)}


def _money(**fields: object) -> Json:
    return {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}


def time_of(seconds: object) -> Json:
    """Return the time of a step, given in Unix seconds or as an ISO 8601 text, in UTC if the text has no time zone.
    Raises ValueError.
    """
    if isinstance(seconds, str):
        time = datetime.fromisoformat(seconds)  # raises ValueError
        return {"timestamp": seconds if time.tzinfo else time.replace(tzinfo=UTC).isoformat()}
    if not isinstance(seconds, int | float):
        return {}
    return {"timestamp": timestamp(seconds)}
