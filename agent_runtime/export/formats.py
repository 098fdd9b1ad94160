"""A run in formats for other programs: JSON lines, a Parquet file, or a folder."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from agent_runtime.export.harbor import write_trials
from agent_runtime.export.parquet import write_rollouts
from agent_runtime.export.predictions import prediction
from agent_runtime.export.real_work import write_real_work
from agent_runtime.export.verifiers import rollout_output
from agent_runtime.export.verifiers_traces import episode
from agent_runtime.export.verl import write_conversations, write_tokens
from agent_runtime.recording.messages import fold, last_of_each_branch
from agent_runtime.recording.reader import RunReader


class Format(StrEnum):
    """Export formats; docs/exports.md has a table."""

    RESULTS = "results"
    """The result of each rollout."""
    ATIF = "atif"
    """The trajectory of each rollout, ATIF 1.7; its `extra` is the result."""
    PROGRAM_ATIF = "program-atif"
    """The trajectory that the program of a `Command` wrote (`agent.trajectory`), as ATIF."""
    OPENAI = "openai"
    """Conversations: `messages` and `tools` in OpenAI's format, with the result. One for each branch."""
    TOKENS = "tokens"
    """Token sequences: ids, mask, logprobs, policy versions, with the result. One for each branch."""
    SWE_BENCH = "swe-bench"
    """SWE-bench predictions: `instance_id`, `model_name_or_path`, `model_patch`."""
    VERIFIERS = "verifiers"
    """Rollouts as `vf-eval` of verifiers 0.1 saves them in `results.jsonl`."""
    VERIFIERS_TRACES = "verifiers-traces"
    """Rollouts as verifiers 0.4 saves them in `traces.jsonl`."""
    PARQUET = "parquet"
    """A Parquet file with one row for each rollout."""
    VERL = "verl"
    """A Parquet file for verl's datasets, with one conversation in each row. One row for each branch."""
    VERL_TOKENS = "verl-tokens"
    """A Parquet file with one token sequence in each row, with verl's column names. One row for each branch."""
    HARBOR = "harbor"
    """A folder with a trial in Harbor's layout for each rollout."""
    REAL_WORK = "real-work"
    """A folder with a trajectory in Real Work's format for each rollout, and statistics."""


async def export(run: RunReader, form: Format) -> AsyncIterator[bytes]:
    """Yield the sealed rollouts of a run by index, as JSON lines of a line format. Raises RecordCorrupt."""
    for index in run.seals:
        for line in await _LINES[form](run, index):
            yield json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"


async def _results(run: RunReader, index: int) -> list[dict[str, Any]]:
    return [run.seals[index].result.wire()]


async def _atif(run: RunReader, index: int) -> list[dict[str, Any]]:
    trajectory = await run.trajectory(index)
    return [] if trajectory is None else [trajectory]


async def _program_atif(run: RunReader, index: int) -> list[dict[str, Any]]:
    trajectory = await run.program_trajectory(index)
    return [] if trajectory is None else [trajectory]


async def _openai(run: RunReader, index: int) -> list[dict[str, Any]]:
    result = run.seals[index].result.wire()
    return [
        {"messages": turn.conversation(), "tools": turn.tools, "branch": turn.branch, "result": result}
        for turn in last_of_each_branch(fold(await run.records(index)))
    ]


async def _tokens(run: RunReader, index: int) -> list[dict[str, Any]]:
    result = run.seals[index].result.wire()
    return [
        {**branch.wire(), "branch": number, "result": result} for number, branch in enumerate(await run.tokens(index))
    ]


FOLDERS: Final[dict[Format, Callable[[RunReader, Path], Awaitable[int]]]] = {
    Format.HARBOR: write_trials,
    Format.REAL_WORK: write_real_work,
}
"""Formats that are written as a folder, with an entry for each rollout."""

FILES: Final[dict[Format, Callable[[RunReader, Path], Awaitable[int]]]] = {
    Format.PARQUET: write_rollouts,
    Format.VERL: write_conversations,
    Format.VERL_TOKENS: write_tokens,
}
"""Formats that are written as one binary file. They need pyarrow."""

_LINES: Final[dict[Format, Callable[[RunReader, int], Any]]] = {
    Format.RESULTS: _results,
    Format.ATIF: _atif,
    Format.PROGRAM_ATIF: _program_atif,
    Format.OPENAI: _openai,
    Format.TOKENS: _tokens,
    Format.SWE_BENCH: prediction,
    Format.VERIFIERS: rollout_output,
    Format.VERIFIERS_TRACES: episode,
}
