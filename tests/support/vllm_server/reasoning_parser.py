"""Reasoning in an answer, as vLLM reads it by `--reasoning-parser hf` and the template of `tests/support/tiny_llama.py`.

vLLM 0.32, vllm/parser/response_template.py: ResponseTemplateParser.
"""

from tests.support.vllm_server.template import GENERATION_PROMPT
from tests.support.vllm_server.tokenizer import TURN_END

OPEN, CLOSE = "<think>", "</think>"


def parse(prompt: str, text: str) -> tuple[str | None, str | None]:
    """Return reasoning and content of an answer. The prompt, empty if unknown, may have opened the reasoning."""
    begun = prompt.rpartition(GENERATION_PROMPT)[2]
    is_open = begun.rfind(OPEN) > begun.rfind(CLOSE)
    before, opened, rest = ("", OPEN, text) if is_open else text.partition(OPEN)
    reasoning, _, after = rest.partition(CLOSE) if opened else ("", "", "")
    return reasoning or None, f"{before}{after}".partition(TURN_END)[0] or None
