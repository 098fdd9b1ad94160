"""Routed experts for router replay, on vLLM itself with a mixture of experts and on its stand-in."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from agent_runtime.models.base import ModelConfigError
from agent_runtime.models.inference_client import InferenceClient
from agent_runtime.models.routed_experts import Span, parse_npy
from rollout_api.model import RoutedExperts
from tests.integration.vllm.conftest import BOTH, PLAIN_FLAGS, InferenceServer, client_of, started_with
from tests.integration.vllm.recorder import Recorder
from tests.integration.vllm.test_jobs import MEMBERS, job, run
from tests.integration.vllm.test_turns import next_turn, request
from tests.support.vllm_environment import router_logits
from tests.support.vllm_server.experts import LAYERS, ROW_BYTES, TOP_K, experts_by

TURNS = 4
TOLERANCE = 0.5
"""Of a router's numbers, whose standard deviation is 8: rounding decides between two experts closer than this."""
FLAGS = (*PLAIN_FLAGS, "--enable-scale-out", "--enable-return-routed-experts")


@pytest.fixture(scope="module", params=BOTH)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    with started_with(FLAGS, request.param, tmp_path_factory, experts=True) as server:
        yield server


@pytest.fixture
async def server(started: InferenceServer) -> InferenceServer:
    """The server with the weights of its start: on a CPU, vLLM 0.32 damages a mixture of experts when it reloads it."""
    await started.post("/reset_prefix_cache")
    return started


@pytest.fixture
async def model(recorder: Recorder) -> AsyncIterator[InferenceClient]:
    async with client_of(recorder.url, RoutedExperts(top_k=TOP_K)) as client:
        yield client


def assert_experts(server: InferenceServer, data: bytes, ids: Sequence[int], spans: Sequence[Span] = ()) -> None:
    """Check the rows of these tokens, or of some of them: against the stand-in's own, or against transformers."""
    positions = [position for begin, end in spans or [(0, len(ids))] for position in range(begin, end)]
    rows = [data[at : at + ROW_BYTES] for at in range(0, len(data), ROW_BYTES)]
    if not server.real:
        true = experts_by(0, ids)
        assert rows == [true[position * ROW_BYTES : (position + 1) * ROW_BYTES] for position in positions]
        return
    logits = router_logits(server.checkpoint(0), list(ids))
    assert len(rows) == len(positions)
    for row, position in zip(rows, positions, strict=True):
        for layer, given in enumerate(logits[position]):
            chosen = {*row[layer * TOP_K : (layer + 1) * TOP_K]}
            assert len(chosen) == TOP_K
            least = sorted(given)[-TOP_K] - TOLERANCE
            assert all(given[expert] > least for expert in chosen), (position, layer, chosen, given)


async def test_server_reports_all_tokens_but_the_last_from_the_position_asked(server: InferenceServer) -> None:
    ids = list(range(40, 80))
    for first in (0, 30, 40):
        answer = await server.generate(ids, sampling={"max_tokens": 6, "routed_experts_prompt_start": first})
        (choice,) = answer["choices"]
        rows = parse_npy(choice["routed_experts"])
        assert (len(rows), rows.layers, rows.top_k, rows.item_bytes) == (45 - first, LAYERS, TOP_K, 1)
        assert_experts(server, rows.data, [*ids, *choice["token_ids"][:-1]], [(first, 45)])


async def test_each_turn_adds_the_rows_of_its_new_tokens(server: InferenceServer, model: InferenceClient) -> None:
    asked, data, known = request(), b"", 0
    for _ in range(TURNS):
        reply = await model.complete(asked)
        ids = [*(reply.prompt_token_ids or ()), *(reply.completion_token_ids or ())]
        assert reply.routed_experts is not None
        assert reply.routed_experts.spans == [(known, len(ids) - 1)]
        data, known = data + reply.routed_experts.rows.data, len(ids) - 1
        asked = next_turn(asked, reply)
    assert_experts(server, data, ids[:-1])


async def test_rows_that_were_lost_with_a_stream_are_left_out(
    server: InferenceServer, model: InferenceClient, recorder: Recorder
) -> None:
    recorder.cut_after = 10
    reply = await model.complete(request(tokens=40))
    first, second = recorder.of("s")
    prompt, begun, end = len(first.prompt_ids), len(second.prompt_ids), len(first.prompt_ids) + 39
    assert prompt < begun < end
    found = reply.routed_experts
    assert found is not None
    assert found.spans == [(0, prompt - 1), (begun - 1, end)]
    ids = [*first.prompt_ids, *(reply.completion_token_ids or ())[:-1]]
    assert_experts(server, found.rows.data, ids, found.spans)


async def test_job_records_the_experts_of_whole_sequences(
    server: InferenceServer, recorder: Recorder, tmp_path: Path
) -> None:
    reader = await run(job(recorder.url, tmp_path, TURNS, model={"routedExperts": {"topK": TOP_K}}))
    for branch in [branch for member in range(MEMBERS) for branch in await reader.tokens(member)]:
        found = await reader.routed_experts(branch)
        assert found is not None
        assert (found.dtype, found.shape) == ("uint8", (len(branch.token_ids), LAYERS, TOP_K))
        assert found.reported == [(0, len(branch.token_ids) - 1)]
        assert_experts(server, found.data[:-ROW_BYTES], branch.token_ids[:-1])


async def test_server_with_other_experts_than_expected_is_refused(server: InferenceServer) -> None:
    with pytest.raises(ModelConfigError, match="topK"):
        async with client_of(server.url, RoutedExperts(top_k=7)):
            pass
