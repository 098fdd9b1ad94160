"""LoRA adapters of SGLang itself and of its stand-in, with the assertions for vLLM."""

from collections.abc import Iterator

import pytest

from tests.integration.sglang.conftest import BOTH, SglangServer, started_with
from tests.integration.vllm.test_policy_updates import (  # noqa: F401
    adapted,
    test_adapter_that_cannot_be_loaded_changes_nothing,
    test_two_adapters_are_updated_each_alone_while_calls_run,
)

FLAGS = (
    *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all", "--max-loras-per-batch", "8"),
    # The other backends need a GPU.
    *("--lora-backend", "torch_native"),
)


@pytest.fixture(scope="module", params=BOTH)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with started_with(FLAGS, request, tmp_path_factory) as server:
        yield server
