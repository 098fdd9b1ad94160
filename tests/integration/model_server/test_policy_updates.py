"""Policy updates with real processes: stand-ins for vLLM behind real gateways, running streams, and killed processes."""

import asyncio
import random
from pathlib import Path

import pytest

from rollout_api.model_server import Gate
from tests.integration.model_server.fleet import LONG, Fleet


async def compare(fleet: Fleet) -> list[list[int]]:
    """Compare the runners' records with what engines really did. Returns the versions, in order, of each call that can
    be compared.

    Tokens whose version a runner records as unknown are never wrong.
    """
    await asyncio.sleep(0.2)  # Some tokens more.
    await fleet.end_calls()
    served = await fleet.served()
    compared = []
    for stream in fleet.streams:
        record = served.get(stream.request_id)
        if record is None or stream.lost:
            continue  # Its engine was killed under it.
        claimed = [version for tokens, version in stream.call.settled for _ in range(tokens)]
        truth = [version for version, start, end in record["spans"] for _ in range(start, end)]
        assert len(claimed) <= len(truth)
        known = [(mine, real) for mine, real in zip(claimed, truth, strict=False) if mine is not None]
        assert all(mine == real for mine, real in known), f"{stream} against {record['spans']}"
        versions = [mine for mine, _ in known]
        assert versions == sorted(versions), "a call's version never falls"
        if versions:
            compared.append(sorted(set(versions)))
    assert compared
    return compared


def straddled(calls: list[list[int]]) -> int:
    """Return how many calls changed their version."""
    return sum(len(versions) > 1 for versions in calls)


@pytest.mark.parametrize("mode", ["Pull", pytest.param("Push", marks=pytest.mark.full)])
async def test_ten_updates_with_random_kills_keep_every_tokens_version(tmp_path: Path, mode: str) -> None:
    chance = random.Random(mode)
    async with Fleet(tmp_path, servers=3, mode=mode) as fleet:
        await fleet.until_open(0)
        for version in range(1, 11):
            fleet.ask_for(version)
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(chance.random() * 0.6)
                if chance.random() < 0.5:
                    await fleet.kill_updater()
                else:
                    await fleet.kill(chance.choice(fleet.pods))
            await fleet.until_open(version, least=2)
        status = await fleet.until_open(10)
        assert status.policy.update >= 1
        assert await fleet.really_loaded() == [10, 10, 10]
        # An undisturbed update, because after kills perhaps no call continued from before an update to after it.
        await asyncio.sleep(0.5)  # Calls start at all servers meanwhile.
        fleet.ask_for(11)
        await fleet.until_open(11)
        calls = await compare(fleet)
        assert straddled(calls) > 0
        disturbed = [versions for versions in calls if versions[-1] <= 10]
        assert straddled(disturbed) > 0, "no call that was under way in an update with kills was compared"


async def test_server_that_cannot_load_leaves_and_calls_at_the_others_continue(tmp_path: Path) -> None:
    async with Fleet(tmp_path, servers=3, calls=10, tokens_per_second=20, most_tokens=30_000) as fleet:
        await fleet.until_open(0)
        bad = fleet.pods[1]
        old = bad.uid
        await fleet.fault(bad, load_failures=100)
        await fleet.until_answering()
        await fleet.until_all_have_tokens()
        fleet.ask_for(1)
        status = await fleet.until_open(1, least=2)
        assert bad.name not in {entry.name for entry in status.servers if entry.ready and entry.uid == old}
        await fleet.until_open(1)
        assert bad.uid != old
        assert await fleet.really_loaded() == [1, 1, 1]
        await fleet.until_all_have_tokens()
        assert straddled(await compare(fleet)) > 0


async def test_update_rolls_back_with_a_message_when_too_few_can_load(tmp_path: Path) -> None:
    async with Fleet(tmp_path, servers=3) as fleet:
        await fleet.until_open(0)
        fleet.ask_for(1)
        await fleet.until_open(1)
        for pod in fleet.pods[:2]:
            await fleet.fault(pod, load_failures=3)
        fleet.ask_for(2)
        assert (await fleet.until_failed(2)).policy.current == 1
        await fleet.until_open(1)
        assert await fleet.really_loaded() == [1, 1, 1]
        assert fleet.story["reason"] == "LoadFailed"
        assert "/collective_rpc answered 500" in fleet.story["message"]
        fleet.ask_for(3)
        await fleet.until_open(3)
        await compare(fleet)


async def test_missing_weights_disturb_no_call(tmp_path: Path) -> None:
    async with Fleet(tmp_path, servers=2) as fleet:
        await fleet.until_open(0)
        fleet.ask_for(1, exists=False)
        async with asyncio.timeout(LONG):
            while fleet.story["reason"] != "FetchFailed":
                assert fleet.status.policy.gate is Gate.OPEN
                await asyncio.sleep(0.02)
        assert fleet.status.policy.update == 0
        fleet.ask_for(2)
        await fleet.until_open(2)


async def test_unavailable_trainer_fails_an_update_and_removes_no_server(tmp_path: Path) -> None:
    async with Fleet(tmp_path, servers=2, mode="Push") as fleet:
        await fleet.until_open(0)
        uids = [pod.uid for pod in fleet.pods]
        fleet.trainer_away = True
        fleet.ask_for(1)
        assert "weightTransfer.push.hook" in ((await fleet.until_failed(1)).policy.failed_because or "")
        await fleet.until_open(0)
        assert [pod.uid for pod in fleet.pods] == uids
        fleet.trainer_away = False
        fleet.ask_for(2)
        await fleet.until_open(2)
        assert {server["name"] for server in fleet.asked_hook[-1]["servers"]} == {"s-0", "s-1"}


async def test_a_server_that_only_changes_the_version_name_is_replaced(tmp_path: Path) -> None:
    async with Fleet(tmp_path, servers=3) as fleet:
        await fleet.until_open(0)
        liar = fleet.pods[0]
        old = liar.uid
        await fleet.fault(liar, claim_version="1")
        fleet.ask_for(1)
        await fleet.until_open(1, least=2)
        await fleet.until_open(1)
        assert liar.uid != old
        assert await fleet.really_loaded() == [1, 1, 1]


async def test_failed_policy_restores_the_initial_weights_on_all_servers(tmp_path: Path) -> None:
    async with Fleet(tmp_path, servers=3) as fleet:
        await fleet.until_open(0)
        for pod in fleet.pods[:2]:
            await fleet.fault(pod, load_failures=3)
        fleet.ask_for(1)
        await fleet.until_failed(1)
        assert await fleet.really_loaded() == [0, 0, 0]
