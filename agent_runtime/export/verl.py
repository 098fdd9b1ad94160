"""A run as Parquet files for verl: conversations for its datasets, token sequences for other trainers.

The columns are those that verl 0.9.1 names: RLHFDataset and MultiTurnSFTDataset (`verl/utils/dataset`), and the fields of
AgentLoopOutput (`verl/experimental/agent_loop`).
"""

from collections.abc import AsyncIterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from agent_runtime.export.parquet import Row, json_text, write_table
from agent_runtime.models.base import ModelReply, ToolCall
from agent_runtime.recording.atif import reasoning_of, text_of
from agent_runtime.recording.expert_arrays import ExpertArray
from agent_runtime.recording.messages import fold, last_of_each_branch
from agent_runtime.recording.reader import RunReader
from rollout_api.records import Message, Result


async def write_conversations(run: RunReader, file: Path) -> int:
    """Write a row for each branch of the sealed rollouts; return the number of rows. Raises RecordCorrupt,
    PyarrowMissing, OSError.

    `prompt` has the messages before the first answer, `messages` all of them; the call's tools are JSON text
    (`tools_json`).
    """
    return await write_table(file, _conversation_schema, _conversations(run))


async def write_tokens(run: RunReader, file: Path) -> int:
    """Write a row for each token sequence of the sealed rollouts; return the number of rows. Raises as
    `write_conversations` does.

    `prompt_ids` end before the first token to train on; the three `response_` lists have equal lengths. None if token
    ids were not recorded. `routed_experts` has the experts of all tokens of the prompt and the response.
    """
    return await write_table(file, _token_schema, _token_rows(run))


async def _conversations(run: RunReader) -> AsyncIterator[Row]:
    for index, seal in run.seals.items():
        for turn in last_of_each_branch(fold(await run.records(index))):
            messages = turn.conversation()
            yield {
                **_sample(run, seal.result, turn.branch),
                "prompt": [
                    {"role": message["role"], "content": text_of(message.get("content"))}
                    for message in takewhile(lambda message: message["role"] != "assistant", messages)
                ],
                "ability": next(iter(seal.result.tags), ""),
                "reward_model": {"style": "rule", "ground_truth": ""},
                "messages": [_message(message) for message in messages],
                "tools_json": json_text(turn.tools),
            }


async def _token_rows(run: RunReader) -> AsyncIterator[Row]:
    for index, seal in run.seals.items():
        for number, branch in enumerate(await run.tokens(index)):
            start = first_trained(branch.mask)
            yield {
                **_sample(run, seal.result, number),
                "prompt_ids": branch.token_ids[:start],
                "response_ids": branch.token_ids[start:],
                "response_mask": branch.mask[start:],
                "response_logprobs": None if branch.logprobs is None else branch.logprobs[start:],
                "policy_versions": branch.policy_versions[start:],
                **_experts(await run.routed_experts(branch)),
            }


def _experts(experts: ExpertArray | None) -> Row:
    if experts is None:
        return {}
    return {
        "routed_experts": experts.data,
        "routed_experts_dtype": experts.dtype,
        "routed_experts_shape": experts.shape,
        "routed_experts_reported": experts.reported,
    }


def first_trained(mask: Sequence[int]) -> int:
    """Return where the response begins; the end if nothing is trained on."""
    return next((position for position, trained in enumerate(mask) if trained), len(mask))


def _sample(run: RunReader, result: Result, branch: int) -> Row:
    return {
        "data_source": run.job.metadata.name,
        "extra_info": {
            "index": result.group,
            "task_name": result.task,
            "member": result.member,
            "rollout": result.index,
            "branch": branch,
            "seed": result.seed,
        },
        "mode": result.mode,
        "outcome": result.outcome.value,
        "reward": result.reward,
        "advantage": result.advantage,
        "passed": result.passed,
    }


def _message(message: Message) -> Row:
    # Ids, names and arguments become text, because a model or an agent may have written other types.
    calls = ModelReply(message, "").tool_calls
    return {
        "role": message["role"],
        "content": text_of(message.get("content")),
        "reasoning_content": reasoning_of(message) or None,
        "tool_calls": [_call(call) for call in calls] or None,
        "tool_call_id": None if (answered := message.get("tool_call_id")) is None else str(answered),
    }


def _call(call: ToolCall) -> Row:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _sample_columns(pa: Any) -> list[tuple[str, Any]]:
    numbers = ("member", "rollout", "branch", "seed")
    extra = [("index", pa.int64()), ("task_name", pa.string()), *((name, pa.int64()) for name in numbers)]
    return [
        ("data_source", pa.string()),
        ("extra_info", pa.struct(extra)),
        ("mode", pa.string()),
        ("outcome", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("passed", pa.bool_()),
    ]


def _conversation_schema(pa: Any) -> Any:
    text = [("role", pa.string()), ("content", pa.string())]
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    call = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", function)])
    message = [*text, ("reasoning_content", pa.string()), ("tool_calls", pa.list_(call)), ("tool_call_id", pa.string())]
    return pa.schema(
        [
            *_sample_columns(pa),
            ("prompt", pa.list_(pa.struct(text))),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("messages", pa.list_(pa.struct(message))),
            ("tools_json", pa.string()),
        ]
    )


def _token_schema(pa: Any) -> Any:
    return pa.schema(
        [
            *_sample_columns(pa),
            ("prompt_ids", pa.list_(pa.int64())),
            ("response_ids", pa.list_(pa.int64())),
            ("response_mask", pa.list_(pa.int8())),
            ("response_logprobs", pa.list_(pa.float64())),
            ("policy_versions", pa.list_(pa.string())),
            ("routed_experts", pa.binary()),
            ("routed_experts_dtype", pa.string()),
            ("routed_experts_shape", pa.list_(pa.int64())),
            ("routed_experts_reported", pa.list_(pa.list_(pa.int64()))),
        ]
    )
