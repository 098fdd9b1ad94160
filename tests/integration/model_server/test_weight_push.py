"""vLLM's own trainer engine, as docs/weight-push.md uses it, sends weights to engines that the operator updates."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.model_server.fleet import Fleet
from tests.support.ports import free_ports, listens
from tests.support.vllm_environment import start_with_vllm

pytestmark = pytest.mark.full


@pytest.mark.timeout(600)
async def test_vllms_trainer_engine_sends_each_version_to_all_servers(tmp_path: Path) -> None:
    hook, group = free_ports(2)
    with start_with_vllm("tests.support.vllm_trainer", hook, group) as trainer:
        try:
            while not listens(hook):
                assert trainer.poll() is None
                await asyncio.sleep(0.2)  # another process
            async with Fleet(tmp_path, servers=3, mode="Push", hook=f"http://127.0.0.1:{hook}/") as fleet:
                await fleet.until_open(0)
                fleet.ask_for(1)
                await fleet.until_open(1)
                assert await fleet.really_loaded() == [1, 1, 1]
                # A server that has restarted gets the current version alone, in a group of two.
                await fleet.kill(fleet.pods[1])
                await fleet.until_open(1)
                assert await fleet.really_loaded() == [1, 1, 1]
                fleet.ask_for(2)
                await fleet.until_open(2)
                assert await fleet.really_loaded() == [2, 2, 2]
            assert trainer.poll() is None
        finally:
            trainer.kill()
