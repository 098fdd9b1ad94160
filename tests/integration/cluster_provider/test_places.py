"""Placement of workspaces: groups share a sandbox, places are used again, empty sandboxes are deleted, nothing is
created twice.
"""

import asyncio

import pytest

from agent_runtime.sandboxes.base import SandboxFailure, SetupFailed
from agent_runtime.sandboxes.cluster import fleet
from tests.integration.cluster_provider.conftest import Opened, acquire, rollout_job, say, until
from tests.integration.cluster_provider.stand_in_operator import StandInOperator


async def test_a_group_shares_one_sandbox_and_its_setup_runs_once(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    members = await asyncio.gather(*(acquire(provider, f"{number}-0") for number in range(4)))
    assert [await say(member, "cat given.txt setup.log") for member in members] == ["given\nprepared"] * 4
    assert len({member.handle["sandbox"] for member in members}) == 1
    assert len({member.handle["prepared"] for member in members}) == 1
    assert operator.api.writes == [("create", members[0].handle["sandbox"])]


async def test_workspace_in_an_existing_sandbox_makes_no_api_write(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    await (await acquire(provider)).release()
    writes = list(operator.api.writes)
    for number in range(1, 6):
        workspace = await acquire(provider, f"{number}-0", group="g1")
        assert await say(workspace, "echo here") == "here"
        await workspace.release()
    assert operator.api.writes == writes


async def test_workspace_beyond_one_sandbox_goes_to_the_next(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    members = await asyncio.gather(*(acquire(provider, f"{number}-0", group=f"g{number // 4}") for number in range(10)))
    by_sandbox: dict[str, list[int]] = {}
    for number, member in enumerate(members):
        by_sandbox.setdefault(member.handle["sandbox"], []).append(number // 4)
    assert sorted(by_sandbox.values()) == [[0] * 4, [1] * 4, [2] * 2]
    assert len(operator.api.writes) == 3


async def test_build_before_a_group_opens_no_further_sandbox(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened(rollout_job(places=1, group_size=1))
    for number in range(2):
        build = await acquire(provider, f"build0-{number}", group=f"build0-{number}", is_single=True)
        await build.release()
        await provider.forget_group(f"build0-{number}")
    await acquire(provider)
    await asyncio.sleep(0.5)
    assert len(operator.api.writes) == 1


async def test_empty_sandbox_is_deleted_after_some_time(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "KEEP_EMPTY_SECONDS", 0.5)
    provider = await opened()
    workspace = await acquire(provider)
    await asyncio.sleep(1.5)
    assert operator.api.sandboxes
    await workspace.release()
    await until(lambda: not operator.api.sandboxes)
    assert provider.sandbox_states() == {}


async def test_plain_sandbox_serves_one_workspace_and_the_next_one_is_ready(
    opened: Opened, operator: StandInOperator
) -> None:
    provider = await opened(rollout_job("Plain"))
    agent = await acquire(provider)
    assert await say(agent, "cat given.txt setup.log") == "given\nprepared"
    assert any("its own pod" in warning for warning in provider.warnings)
    await until(lambda: provider.sandbox_states() == {"Ready": 2})
    await agent.release()
    grading = await acquire(provider, name="grading")
    assert grading.handle["sandbox"] != agent.handle["sandbox"]
    await until(lambda: agent.handle["sandbox"] not in operator.api.sandboxes)


async def test_nodes_without_overlay_give_plain_sandboxes(opened: Opened, operator: StandInOperator) -> None:
    operator.modes = ["Plain"] * 9
    provider = await opened(rollout_job("Auto"))
    members = await asyncio.gather(*(acquire(provider, f"{number}-0") for number in range(3)))
    assert len({member.handle["sandbox"] for member in members}) == 3
    assert members[0].description["mode"] == "Plain"
    assert members[0].description["modeReason"] == "the kernel refused the mount"


async def test_pod_whose_overlay_trial_fails_is_replaced_by_a_plain_one(
    opened: Opened, operator: StandInOperator
) -> None:
    operator.trial_fails = True
    provider = await opened(rollout_job("Auto"))
    workspace = await acquire(provider)
    assert await say(workspace, "cat setup.log") == "prepared"
    assert workspace.description["mode"] == "Plain"


async def test_failed_setup_is_reported_to_all_and_frees_its_places(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    tries = [acquire(provider, f"{number}-0", group="bad", setup=["exit 3"]) for number in range(4)]
    failures = await asyncio.gather(*tries, return_exceptions=True)
    assert all(isinstance(failure, SetupFailed) for failure in failures)
    members = await asyncio.gather(*(acquire(provider, f"{number}-1", group="good") for number in range(4)))
    assert {("create", member.handle["sandbox"]) for member in members} == set(operator.api.writes[:1])


async def test_cancelled_requests_leave_their_places_free(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    held = [await acquire(provider)]
    for pause in (0.0, 0.002, 0.004, 0.006, 0.01, 0.02):
        tasks = [asyncio.create_task(acquire(provider, f"{n}-{pause}")) for n in range(1, 4)]
        await asyncio.sleep(pause)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, BaseException):  # it was quicker
                await outcome.release()
    # A request before the last workspaces are released may get another sandbox. If a place were lost, this loop would
    # not end.
    while len(held) < 4 * len(operator.api.sandboxes):
        held.append(await acquire(provider, f"{len(held)}-x"))
        assert len(operator.api.sandboxes) <= 3


async def test_repeated_request_of_an_attempt_returns_its_own_workspace(opened: Opened) -> None:
    provider = await opened()
    first = await acquire(provider)
    await first.write("mark", b"here", key="1:a")
    again = await acquire(provider)
    assert await again.read("mark") == b"here"


async def test_closing_deletes_every_sandbox_also_those_that_start(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    await acquire(provider)
    late = asyncio.create_task(acquire(provider, "9-0", image="other"))
    await asyncio.sleep(0)
    await provider.close()
    assert operator.api.sandboxes == {}
    with pytest.raises(SandboxFailure):
        await late


async def test_sandbox_released_at_the_last_moment_is_deleted(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened(rollout_job("Plain"))
    await (await acquire(provider)).release()
    await provider.close()
    assert operator.api.sandboxes == {}


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_an_attempt_that_has_to_be_alone_gets_a_sandbox_that_was_opened_for_it(
    opened: Opened, operator: StandInOperator, mode: str
) -> None:
    provider = await opened(rollout_job(mode, places=1))
    first = await acquire(provider)
    await first.release()
    # Now there is a free sandbox: a used one (Overlay), or one that was opened in advance (Plain).
    await until(lambda: provider.sandbox_states() == {"Ready": 1})
    before = set(operator.api.sandboxes)
    alone = await acquire(provider, "1-1", alone=True)
    assert alone.handle["sandbox"] not in before
    await alone.release()
    await until(lambda: alone.handle["sandbox"] not in operator.api.sandboxes)
    again = await acquire(provider, "1-2", alone=True)
    assert again.handle["sandbox"] not in before | {alone.handle["sandbox"]}
    # The earlier sandboxes continue to serve other workspaces.
    other = await acquire(provider, "2-0")
    assert other.handle["sandbox"] in before
