"""A small run, recorded without an engine, with what exports must tell apart: branches, tools, tokens, lost rollouts."""

import json
from pathlib import Path
from typing import Any

from agent_runtime.recording.job_record import JobRecord
from agent_runtime.recording.journal import Journal
from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.records import (
    AttemptSummary,
    IntentRecord,
    Message,
    Observation,
    ObservationsRecord,
    Outcome,
    Record,
    ResponseRecord,
    Result,
    StopReason,
    Usage,
)
from rollout_api.rollout_job import RolloutJob

SYSTEM: Message = {"role": "system", "content": "Use tools."}
ASK: Message = {"role": "user", "content": "List the files."}
CALL = {"id": "call-0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
CALLING: Message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FOUND: Message = {"role": "tool", "tool_call_id": "call-0", "content": "a.txt"}
DONE: Message = {"role": "assistant", "content": "There is a.txt.", "reasoning": "I saw it."}
OTHER: Message = {"role": "user", "content": "Once more."}


def _tool(name: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": parameters}}


TOOLS = [_tool("bash", "command"), _tool("read", "path")]
"""Two whose parameters have different names, which one Parquet type cannot tell apart."""

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
    return ResponseRecord(
        turn=turn,
        time=102.0 + turn,
        seconds=1.0,
        message=message,
        finish_reason="stop",
        prompt_keep=keep,
        prompt_token_ids=prompt,
        completion_token_ids=sampled,
        logprobs=[-0.5] * len(sampled),
    )


BEGUN: list[Record] = [
    IntentRecord(turn=0, time=101.0, keep=0, messages=[SYSTEM, ASK], tools=TOOLS),
    _answer(0, CALLING, [1, 2], [3, 4]),
]
TOOL_USE: list[Record] = [
    *BEGUN,
    ObservationsRecord(turn=0, time=102.5, results=[Observation(call_id="call-0", tool="bash", content="a.txt")]),
    IntentRecord(turn=1, time=102.6, keep=3, messages=[FOUND]),
    _answer(1, DONE, [5], [6], keep=4),
]
FORKED: list[Record] = [
    *TOOL_USE,
    IntentRecord(turn=2, time=103.5, keep=0, messages=[OTHER], branch=1),
    _answer(2, DONE, [9], [6, 7]),
]
"""The agent forgets all, and begins a second branch."""


def _result(index: int, **fields: Any) -> Result:
    given = {
        "group": index // 2,
        "member": index % 2,
        "task": "first" if index < 2 else "second",
        "tags": ["shell"],
        "mode": "Train",
        "seed": 7,
        "outcome": Outcome.COMPLETED,
        "stop_reason": StopReason.FINISHED,
        "attempt": 0,
        "turns": 2,
        "usage": Usage(prompt_tokens=30, completion_tokens=5),
        "started": 100.0,
        "ended": 110.0,
        "seconds": {"verifier": 2.0, "total": 10.0},
    }
    return Result(index=index, **(given | fields))


LOST = {"outcome": Outcome.INFRA_FAILED, "stop_reason": None, "reason": "SandboxLost", "message": "its node is gone"}
RETRIED = [AttemptSummary(attempt=0, reason="SandboxLost", message="its node was drained")]
ROLLOUTS: list[tuple[Result, list[Record]]] = [
    (_result(0, reward=0.0, passed=False, mode="Eval"), TOOL_USE),
    (_result(1, reward=1.0, passed=True, rewards={"style": 0.5}, failed_attempts=RETRIED), FORKED),
    (_result(2, **LOST), BEGUN),
    (_result(3, **LOST, turns=0), []),
]
"""One that failed, one with two branches that passed, one lost in the midst, one lost before the first call."""


async def record_run(folder: Path) -> RunReader:
    """Write it into a folder, and open it."""
    store = Store.open(str(folder), {})
    job = RolloutJob.model_validate(json.loads(json.dumps(MANIFEST)))
    record = await JobRecord.open(store, job, job.spec.tasks.inline or [])
    for result, records in ROLLOUTS:
        journal = await Journal.claim(record, result.index, 0)
        await journal.begin()
        if records:
            await journal.append(records)
        await journal.seal(result, None, records)
    return await open_run(store, "files")
