"""Mode `Push`: vLLM's own trainer engine sends weights to the memory of vLLM itself, and of its stand-in.

Without a GPU, one thing takes NCCL's place at both ends (tests/support/without_gpu).
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.vllm.conftest import PLAIN_FLAGS, InferenceServer, started_with
from tests.integration.vllm.operated import Operated
from tests.integration.vllm.test_policy_updates import assert_update_loses_no_call, first_tokens
from tests.support.ports import free_ports, listens
from tests.support.vllm_environment import start_with_vllm

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
# As the operator starts a server of mode Push (operator/rollout_operator/model_server/launch.py).
FLAGS = (
    *PLAIN_FLAGS,
    *("--enable-scale-out", "--enable-prompt-tokens-details", "--scheduling-policy", "priority"),
    *("--enable-prefix-caching", "--weight-transfer-config", '{"backend": "nccl"}'),
)
DELETED, OF_ANOTHER_MODEL = 3, 4
"""Versions that the trainer has not, and that no server can load."""


@pytest.fixture(scope="module", params=["stand-in", "vLLM"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    with started_with(FLAGS, request.param, tmp_path_factory, push=True) as server:
        if server.real:
            (server.checkpoints / str(OF_ANOTHER_MODEL)).symlink_to(server.checkpoints / "experts-1")
        yield server


@pytest.fixture(scope="module")
def hook(started: InferenceServer) -> Iterator[str]:
    """URL of the trainer's hook."""
    port, group = free_ports(2)
    folder = (started.checkpoints,) if started.real else ()
    with start_with_vllm("tests.support.vllm_trainer", port, group, *folder) as trainer:
        try:
            asyncio.run(until_listens(port))
            yield f"http://127.0.0.1:{port}/"
            assert trainer.poll() is None
        finally:
            trainer.kill()


async def until_listens(port: int) -> None:
    async with asyncio.timeout(120):
        while not listens(port):  # noqa: ASYNC110
            await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Served:
    """What a server with some weights serves."""

    digest: str
    tokens: list[int]
    """A greedy answer."""


async def what_is_served(server: InferenceServer, served: Operated) -> Served:
    await server.post("/reset_prefix_cache")
    digest = await served.control("POST", "/policy/digest")
    return Served(digest["digest"], await server.greedy([300, 301, 302]))


@pytest.fixture
async def served(server: InferenceServer, hook: str, tmp_path: Path) -> AsyncIterator[Operated]:
    async with Operated(server, tmp_path, hook=hook) as served:
        yield served


@pytest.fixture
async def from_files(server: InferenceServer, served: Operated) -> list[Served]:
    """The weights of each version as they are served from their files."""
    found: list[Served] = []
    for version in (2, 1, 0):
        status, answer = await server.load(server.checkpoint(version))
        assert status == 200, answer
        found.insert(0, await what_is_served(server, served))
    assert len({one.digest for one in found}) == len({tuple(one.tokens) for one in found}) == len(found)
    return found


async def test_sent_weights_are_those_of_the_files_and_lose_no_call(
    server: InferenceServer, served: Operated, from_files: list[Served]
) -> None:
    zero = await first_tokens(served)
    await assert_update_loses_no_call(server, served, None)
    one = await first_tokens(served)
    assert await what_is_served(server, served) == from_files[1]
    served.patch(2)
    await served.until(2)
    two = await first_tokens(served)
    assert await what_is_served(server, served) == from_files[2]
    served.patch(0)
    await served.until(0)
    assert await first_tokens(served) == zero
    assert await what_is_served(server, served) == from_files[0]
    assert len({tuple(tokens) for tokens in (zero, one, two)}) == 3


async def test_version_that_the_trainer_has_deleted_changes_nothing(
    server: InferenceServer, served: Operated, from_files: list[Served], tmp_path: Path
) -> None:
    served.patch(1)
    await served.until(1)
    served.patch(DELETED)
    await served.until_failed(DELETED)
    assert served.status.policy.current == 1
    assert await what_is_served(server, served) == from_files[1]
    async with asyncio.timeout(60):  # the reason is written after the status
        while f"version {DELETED} is deleted" not in (tmp_path / "story.json").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_weights_of_another_model_fail_and_the_old_ones_are_sent_again(
    server: InferenceServer, served: Operated, from_files: list[Served]
) -> None:
    if not server.real:
        pytest.skip("the stand-in's weights have no names")
    served.patch(1)
    await served.until(1)
    one = await first_tokens(served)
    served.patch(OF_ANOTHER_MODEL)
    await served.until_failed(OF_ANOTHER_MODEL)
    assert served.status.policy.current == 1
    assert await first_tokens(served) == one
    assert await what_is_served(server, served) == from_files[1]


async def test_restarted_server_gets_the_current_version_from_the_trainer(
    server: InferenceServer, served: Operated, from_files: list[Served]
) -> None:
    served.patch(1)
    await served.until(1)
    await served.restart()
    await served.until(1)
    assert await what_is_served(server, served) == from_files[1]
