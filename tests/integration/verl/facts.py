"""Facts about verl that need no servers: errors of its loader, its texts, and a conversation as ids."""

import asyncio
import threading
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.experimental.agent_loop.utils import build_gpt_oss_tool_response_text as verls_text
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from agent_runtime.integrations.verl.chat import VerlChat
from agent_runtime.integrations.verl.gpt_oss import build_gpt_oss_tool_response_text
from agent_runtime.models.base import TokenPrefix

NAMES = (
    "RolloutManager",
    "agent_runtime.trainers.nowhere.RolloutManager",
    "agent_runtime.integrations.verl.manager.Manager",
)
TOOL_RESULTS: list[tuple[list[dict[str, Any]], list[str]]] = [
    ([], []),
    ([{"role": "tool", "content": '{"sum": 4}'}], ["add"]),
    ([{"role": "tool", "content": "один\n<|end|>"}, {"role": "tool", "content": ""}], ["a_b", "c"]),
]
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
ASKED = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "List the files."}]
CALLS = 'Looking.\n<tool_call>{"name": "bash",  "arguments": {"command":"ls"}}</tool_call>'
"""Written differently from the template: two spaces, and none after the colon."""


def loader_errors() -> list[str]:
    """Return verl's messages for names that are not classes."""
    errors = []
    for name in NAMES:
        try:
            load_class_from_fqn(name, "AgentLoopManager")
        except (ValueError, ImportError, AttributeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def gpt_oss_texts() -> list[tuple[str, str]]:
    """Return our text and verl's for the same tool results."""
    return [(build_gpt_oss_tool_response_text(*given), verls_text(*given)) for given in TOOL_RESULTS]


@ToolParser.register("blocking")
class BlockingParser(ToolParser):  # type: ignore[misc]
    """Reads an answer only after another coroutine has run."""

    others_work = threading.Event()

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Any]]:
        """Wait for other work; the answer's text says whether there was any."""
        return "worked" if self.others_work.wait(10) else "stood still", [FunctionCall(name="bash", arguments="{}")]


async def blocked(tokenizer: Any, builder: Any) -> str:
    """Return what other coroutines did while a parser blocked."""
    chat = VerlChat(tokenizer, builder, "blocking")
    reading = asyncio.create_task(chat.read([1], [TOOL], []))
    await asyncio.sleep(0)
    BlockingParser.others_work.set()
    text, _ = await reading
    return text


async def conversation(tokenizer: Any) -> dict[str, Any]:
    """Return the ids of two turns, of which the first one is answered completely, cut off, and forgotten."""
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen2")
    chat = VerlChat(tokenizer, builder, "hermes")
    first = await chat.prompt(ASKED, [TOOL], None)
    sampled = tokenizer.encode(f"{CALLS}<|im_end|>", add_special_tokens=False)
    text, calls = await chat.read(sampled, [TOOL], [])
    answer = {"role": "assistant", "content": text, "tool_calls": [{"id": "call-0", **call} for call in calls]}
    result = {"role": "tool", "tool_call_id": "call-0", "content": "a.txt"}
    whole = await chat.prompt([*ASKED, answer, result], [TOOL], TokenPrefix(3, [*first, *sampled]))
    cut = await chat.prompt(
        [*ASKED, {"role": "assistant", "content": "Look"}, {"role": "user", "content": "Go on."}],
        [TOOL],
        TokenPrefix(3, [*first, *tokenizer.encode("Look", add_special_tokens=False)]),
    )
    plain, none = await chat.read(tokenizer.encode("Final. Observation: x<|im_end|>"), [], ["Observation:"])
    return {
        "first": tokenizer.decode(first),
        "seen": [*first, *sampled],
        "text": text,
        "calls": calls,
        "whole": whole,
        "whole_text": tokenizer.decode(whole[len(first) + len(sampled) :]),
        "cut_text": tokenizer.decode(cut[len(first) :]),
        "plain": [plain, none],
        "while_a_parser_blocks": await blocked(tokenizer, builder),
    }
