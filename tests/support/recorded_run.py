"""A small run, recorded without an engine, with everything that exports distinguish: branches, tools, tokens, lost
rollouts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.records import AttemptSummary, BranchRecord, Message, Outcome, Record, ResponseRecord, Result, Usage
from rollout_api.rollout_job import RolloutJob
from tests.support.records import answered, asked, call, completed, gave, told

SYSTEM: Message = {"role": "system", "content": "Use tools."}
ASK: Message = {"role": "user", "content": "List the files."}
CALLING: Message = {"role": "assistant", "content": None, "tool_calls": [call("call-0", '{"command": "ls"}')]}
FOUND = told("call-0", "a.txt")
DONE: Message = {"role": "assistant", "content": "There is a.txt.", "reasoning": "I saw it."}
OTHER: Message = {"role": "user", "content": "Once more."}


def _tool(name: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": parameters}}


TOOLS = [_tool("bash", "command"), _tool("read", "path")]
"""Two tools whose parameters have different names, which one Parquet type cannot distinguish."""

MANIFEST = {
    "apiVersion": "rollout.dev/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "files"},
    "spec": {
        "tasks": {"inline": [{"name": name, "prompt": "List the files."} for name in ("first", "second")]},
        "agent": {"type": "Nop"},
        "groupSize": 2,
        "output": {"uri": "out"},
    },
}


def _answer(turn: int, message: Message, prompt: list[int], sampled: list[int], keep: int = 0) -> ResponseRecord:
    tokens = {"prompt_keep": keep, "prompt_token_ids": prompt, "completion_token_ids": sampled}
    return answered(turn, message, time=102.0 + turn, logprobs=[-0.5] * len(sampled), **tokens)


BEGUN: list[Record] = [asked(0, 0, SYSTEM, ASK, tools=TOOLS, time=101.0), _answer(0, CALLING, [1, 2], [3, 4])]
TOOL_USE: list[Record] = [
    *BEGUN,
    gave(0, ("call-0", "a.txt"), time=102.5),
    asked(1, 3, FOUND, time=102.6),
    _answer(1, DONE, [5], [6], keep=4),
]
FORKED: list[Record] = [*TOOL_USE, asked(2, 0, OTHER, branch=1, time=103.5), _answer(2, DONE, [9], [6, 7])]
"""The agent drops its conversation and begins a second branch."""


def _result(index: int, **fields: Any) -> Result:
    given = {
        "group": index // 2,
        "member": index % 2,
        "task": "first" if index < 2 else "second",
        "tags": ["shell"],
        "seed": 7,
        "turns": 2,
        "usage": Usage(prompt_tokens=30, completion_tokens=5),
        "started": 100.0,
        "ended": 110.0,
        "seconds": {"verifier": 2.0, "total": 10.0},
    }
    return completed(index, **given | fields)


LOST = {"outcome": Outcome.INFRA_FAILED, "stop_reason": None, "reason": "SandboxLost", "message": "its node is gone"}
RETRIED = [AttemptSummary(attempt=0, reason="SandboxLost", message="its node was drained")]
ROLLOUTS: list[tuple[Result, list[Record]]] = [
    (_result(0, reward=0.0, passed=False, mode="Eval"), TOOL_USE),
    (_result(1, reward=1.0, passed=True, rewards={"style": 0.5}, failed_attempts=RETRIED), FORKED),
    (_result(2, **LOST), BEGUN),
    (_result(3, **LOST, turns=0), []),
]
"""One that failed, one with two branches that passed, one lost in the middle, one lost before its first call."""


BRANCHED: list[Record] = [BranchRecord(time=100.0, job="file:///source", index=0, attempt=0, turn=0), *TOOL_USE]
"""The first turn is copied from another rollout."""

SHORTENED: list[Record] = [
    BRANCHED[0],
    *TOOL_USE[:4],
    asked(2, 0, ASK, CALLING, FOUND, branch=1, time=103.5),
    _answer(2, DONE, [9], [6, 7]),
]
"""The first turn is copied; then the agent keeps only a part of its conversation, in which a copied answer is."""

DELEGATED: list[Record] = [
    *BEGUN,
    asked(1, 0, OTHER, time=102.2, conversation=1, tools=TOOLS[1:]),
    _answer(1, {"role": "assistant", "content": "Done in part."}, [7], [8]),
    gave(0, ("call-0", "a.txt"), time=103.1),
    asked(2, 3, FOUND, time=103.2, conversation=0, parent=0),
    _answer(2, DONE, [5], [6], keep=4),
]
"""The agent starts a sub-agent in its first turn, and answers after it."""


async def record_run(folder: Path, rollouts: Sequence[tuple[Result, list[Record]]] = ROLLOUTS) -> RunReader:
    """Write the rollouts into a folder, and open it."""
    store = Store.open(str(folder), {})
    job = RolloutJob.model_validate(json.loads(json.dumps(MANIFEST)))
    record = await JobRecord.open(store, job, job.spec.tasks.inline or [])
    for result, records in rollouts:
        journal = await Journal.claim(record, result.index, 0)
        await journal.begin()
        if records:
            await journal.append(records)
        await journal.seal(result, None, records)
    return await open_run(store, "files")
