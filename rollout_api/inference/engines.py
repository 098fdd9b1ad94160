"""All descriptions, by the type of the inference server."""

from collections.abc import Mapping
from typing import Final

from rollout_api.inference.description import Description, EngineType
from rollout_api.inference.sglang import SGLANG
from rollout_api.inference.vllm import VLLM

DESCRIPTIONS: Final[Mapping[EngineType, Description]] = {found.type: found for found in (VLLM, SGLANG)}
