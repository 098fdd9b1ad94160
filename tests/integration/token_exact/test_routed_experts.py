"""Experts for router replay of whole rollouts, compared with the stand-in's own log, and servers that do not report them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.export.formats import FILES, Format, export
from agent_runtime.models.base import ModelConfigError, ModelError, ModelRequest
from rollout_api.model import RoutedExperts
from tests.integration.token_exact.conftest import Connect
from tests.support.sglang_server import SglangStandIn
from tests.support.vllm_server import Answer, Prompt, ToolCall, VllmStandIn
from tests.support.vllm_server.experts import LAYERS, ROW_BYTES, TOP_K, experts_by

TURNS = 6
WANTED: dict[str, Any] = {"routedExperts": {}}


def working(prompt: Prompt) -> Answer:
    if prompt.turn == TURNS - 1:
        return Answer("All is counted.\n", [ToolCall("finish", {"message": "done"})])
    return Answer(f"Step {prompt.turn}.\n", [ToolCall("bash", {"command": f"echo {prompt.turn}"})])


def whole_rows(ids: Sequence[int]) -> bytes:
    """The array of a sequence whose last token was not processed."""
    return experts_by(0, ids[:-1]) + bytes(ROW_BYTES)


async def test_recorded_experts_are_those_of_the_server_and_each_turn_asks_for_new_ones(
    tmp_path: Path, run_one: Any
) -> None:
    async with VllmStandIn(script=working, routed_experts=True) as server:
        ran = await run_one(server, tmp_path, model=WANTED)
        requests = server.served_in("rollout-0")
    (branch,) = await ran.run.tokens(0)
    found = await ran.run.routed_experts(branch)
    assert (found.dtype, found.shape) == ("uint8", (len(branch.token_ids), LAYERS, TOP_K))
    assert (found.data, found.reported) == (whole_rows(branch.token_ids), [(0, len(branch.token_ids) - 1)])
    ends = [len(request.prompt_ids) + len(request.ids) - 1 for request in requests]
    assert [request.sampling["routed_experts_prompt_start"] for request in requests] == [0, *ends[:-1]]
    seal = ran.run.seals[0]
    assert sum("experts-" in item.key for item in seal.objects) == TURNS == ran.result["turns"]


async def test_exports_have_the_experts_of_each_sequence(tmp_path: Path, run_one: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    async with VllmStandIn(script=working, routed_experts=True) as server:
        ran = await run_one(server, tmp_path, model=WANTED)
    (branch,) = await ran.run.tokens(0)
    await FILES[Format.VERL_TOKENS](ran.run, tmp_path / "rows.parquet")
    (row,) = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert row["routed_experts"] == whole_rows(row["prompt_ids"] + row["response_ids"])
    assert (row["routed_experts_dtype"], row["routed_experts_shape"]) == (
        "uint8",
        [len(branch.token_ids), LAYERS, TOP_K],
    )
    assert row["routed_experts_reported"] == [[0, len(branch.token_ids) - 1]]
    (line,) = [line async for line in export(ran.run, Format.TOKENS)]
    assert len(line) < 100 * len(branch.token_ids), "the line names the arrays, and does not contain them"
    assert line.count(b"experts-") == TURNS


async def test_job_that_does_not_ask_for_experts_records_none(tmp_path: Path, run_one: Any) -> None:
    async with VllmStandIn(script=working, routed_experts=True) as server:
        ran = await run_one(server, tmp_path)
    (branch,) = await ran.run.tokens(0)
    assert branch.routed_experts is None
    assert await ran.run.routed_experts(branch) is None


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (lambda: VllmStandIn(), "start the server with --enable-return-routed-experts"),
        (lambda: VllmStandIn(scale_out=False), "start vLLM with --enable-scale-out"),
        (lambda: SglangStandIn(routed_experts=True), r"set model\.routedExperts\.topK"),
    ],
    ids=["without the flag", "without token routes", "SGLang without topK"],
)
async def test_server_without_experts_is_refused_before_the_first_rollout(
    server: Callable[[], VllmStandIn], message: str, connect: Connect
) -> None:
    async with server() as running:
        with pytest.raises(ModelConfigError, match=rf"NoRoutedExperts: model\.routedExperts: .*{message}"):
            await connect(running, experts=RoutedExperts())


async def test_answer_without_experts_is_not_recorded_as_one(
    connect: Connect, make_request: Callable[..., ModelRequest]
) -> None:
    async with VllmStandIn(routed_experts=True) as server:
        model = await connect(server, experts=RoutedExperts())
        server.routed_experts = False
        with pytest.raises(ModelError, match=r"NoRoutedExperts: .* gave an answer without routed experts"):
            await model.complete(make_request("Count."))
