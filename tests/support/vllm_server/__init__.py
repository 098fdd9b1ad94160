"""A stand-in for vLLM; README.md says what it does and where it differs."""

from tests.support.vllm_server.engine import Request
from tests.support.vllm_server.faults import Faults
from tests.support.vllm_server.model import Answer, Prompt, Script, ToolCall, logprobs_by, made_by
from tests.support.vllm_server.server import VllmStandIn
from tests.support.vllm_server.template import render
from tests.support.vllm_server.tokenizer import Tokenizer, tokenizer
from tests.support.vllm_server.weights import checksums_of

__all__ = [
    "Answer",
    "Faults",
    "Prompt",
    "Request",
    "Script",
    "Tokenizer",
    "ToolCall",
    "VllmStandIn",
    "checksums_of",
    "logprobs_by",
    "made_by",
    "render",
    "tokenizer",
]
