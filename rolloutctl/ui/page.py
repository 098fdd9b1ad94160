"""A run as one self-contained HTML file: `head`, then `group` for each group, then `tail`.

The page runs one script, which its Content-Security-Policy allows by digest. Text of models and tools is never markup.
"""

import base64
import gzip
import hashlib
import html
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from pydantic.alias_generators import to_camel

from rollout_api.records import Record, Result, Verdict
from rolloutctl.ui.console import harmless
from rolloutctl.ui.figures import BatchFigures, Figures, GroupFigures, batch_figures, group_figures, overall_figures
from rolloutctl.ui.transcript import Step, readable_arguments, steps

FIELD_CHARACTERS = 200_000
"""Most characters of one message or tool result. Longer ones are shortened in the middle; the record has everything."""


@dataclass(frozen=True)
class JobFacts:
    """Facts about the run in the report's head."""

    name: str
    location: str
    mode: str
    model: str
    agent: str
    group_size: int
    total: int
    """Number of rollouts, including those that have not ended."""
    aborted: str | None = None


@dataclass(frozen=True)
class Rollout:
    """A rollout as the report shows it."""

    result: Result
    records: Sequence[Record]
    verdict: Verdict | None


def head(job: JobFacts, results: Sequence[Result]) -> str:
    style = _asset("page.css")
    policy = (
        f"default-src 'none'; script-src '{_digest(_asset('page.js'))}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": policy,
        "title": html.escape(f"{job.name}: rollouts"),
        "style": style,
        "data": in_script(summary(job, results)),
    }
    return _fill(_halves()[0], values)


def group(rollouts: Sequence[Rollout]) -> str:
    """Return a script element with the transcripts of one group: JSON by index, compressed with gzip, as base64.

    The members are compressed together because they share their prompt.
    """
    transcripts = {str(rollout.result.index): transcript(rollout) for rollout in rollouts}
    data = json.dumps(transcripts, separators=(",", ":")).encode()
    packed = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()
    return f'<script type="text/plain" data-group="{rollouts[0].result.group}">{packed}</script>\n'


def tail() -> str:
    return _fill(_halves()[1], {"script": _asset("page.js")})


def _halves() -> tuple[str, str]:
    before, _, after = _asset("page.html").partition("{{transcripts}}")
    return before, after


def _asset(name: str) -> str:
    return (resources.files("rolloutctl.ui") / name).read_text(encoding="utf-8")


def _digest(inline: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Return the template with its placeholders replaced once. Values are not searched for placeholders."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def in_script(value: Any) -> str:
    """Return JSON for a script element. It has no `<`, so that it cannot end the element or begin a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def summary(job: JobFacts, results: Sequence[Result]) -> dict[str, Any]:
    groups = group_figures(results, job.group_size)
    overall = overall_figures(results, groups)
    sums, started, ended = Counter[str](), list[float](), list[float]()
    for result in results:
        started += [] if result.started is None else [result.started]
        ended += [] if result.ended is None else [result.ended]
        sums["promptTokens"] += result.usage.prompt_tokens
        sums["completionTokens"] += result.usage.completion_tokens
        sums["turns"] += result.turns
        sums["toolCalls"] += result.tool_calls
    return {
        "made": time.time(),
        "job": {**_camel(job), "sealed": len(results), "started": min(started, default=None)},
        "figures": {
            **_camel(overall),
            "k": job.group_size,
            **{name: sums[name] for name in ("promptTokens", "completionTokens", "turns", "toolCalls")},
            "wallSeconds": max(ended) - min(started) if started and ended else None,
        },
        "groups": list(map(_camel, groups)),
        "batches": list(map(_camel, batch_figures(results))),
        "rollouts": [
            _without_plugins(result) | {"tokens": result.usage.prompt_tokens + result.usage.completion_tokens}
            for result in results
        ],
    }


def _camel(figures: JobFacts | Figures | GroupFigures | BatchFigures) -> dict[str, Any]:
    return {to_camel(name): value for name, value in asdict(figures).items()}


def transcript(rollout: Rollout) -> dict[str, Any]:
    return {
        "steps": [_step(step) for step in steps(rollout.records)],
        "verdict": _clean(rollout.verdict.wire()) if rollout.verdict else None,
        "plugins": _clean([{"name": name, **report.wire()} for name, report in rollout.result.plugins.items()]),
    }


def _without_plugins(result: Result) -> dict[str, Any]:
    """Return a result without plugin data, which can be long and is part of the transcript."""
    return result.model_copy(update={"plugins": {}}).wire()


def _step(step: Step) -> dict[str, Any]:
    drawn = asdict(step)
    drawn["calls"] = [
        asdict(call) | {"arguments": [list(pair) for pair in readable_arguments(call.arguments)]} for call in step.calls
    ]
    cleaned: dict[str, Any] = _clean({name: value for name, value in drawn.items() if value or name == "turn"})
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return harmless(shortened(value))
    if isinstance(value, dict):
        return {name: _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def shortened(text: str, most: int = FIELD_CHARACTERS) -> str:
    """Return the text, or its beginning and end if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters are not shown …\n{text[-half:]}"
