"""Routed experts for router replay, on SGLang itself with a mixture of experts and on its stand-in, with the assertions for
vLLM.
"""

from collections.abc import Iterator

import pytest

from tests.integration.sglang.conftest import BOTH, SglangServer, started_with
from tests.integration.vllm.test_routed_experts import (  # noqa: F401
    model,
    test_each_turn_adds_the_rows_of_its_new_tokens,
    test_job_records_the_experts_of_whole_sequences,
    test_rows_that_were_lost_with_a_stream_are_left_out,
    test_server_with_other_experts_than_expected_is_refused,
)


@pytest.fixture(scope="module", params=BOTH)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with started_with(("--enable-return-routed-experts",), request, tmp_path_factory, experts=True) as server:
        yield server
