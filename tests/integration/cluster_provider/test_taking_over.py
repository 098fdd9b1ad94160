"""A runner ends and another one takes over: sandboxes and their processes stay, and nothing is duplicated or left
behind.
"""

import asyncio

import pytest

from agent_runtime.sandboxes.base import Fenced, SandboxFailure, Service
from tests.integration.cluster_provider.conftest import SECOND, Opened, acquire, rollout_job, say, spec, until
from tests.integration.cluster_provider.stand_in_operator import StandInOperator


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_the_next_process_finds_its_workspace_with_the_command_still_running(
    opened: Opened, operator: StandInOperator, mode: str
) -> None:
    job = rollout_job(mode)
    first = await opened(job)
    workspace = await acquire(first)
    under_way = asyncio.create_task(say(workspace, "sleep 1; echo once >> count; cat count", "1:slow"))
    await asyncio.sleep(0.2)
    await first.close(keep=True)
    await asyncio.gather(under_way, return_exceptions=True)
    second = await opened(job)
    taken = await second.reattach(workspace.handle, spec=spec(), fence=SECOND)
    assert await say(taken, "sleep 1; echo once >> count; cat count", "1:slow") == "once"
    with pytest.raises(Fenced):
        await workspace.write("late", b"", key="2:a")
    assert [verb for verb, _ in operator.api.writes].count("create") <= 2
    assert taken.handle == workspace.handle


async def test_leftovers_of_an_earlier_process_are_removed_and_places_reused(
    opened: Opened, operator: StandInOperator
) -> None:
    first = await opened()
    members = await asyncio.gather(*(acquire(first, f"{number}-0") for number in range(4)))
    await first.close(keep=True)
    second = await opened()
    kept = await second.reattach(members[0].handle, spec=spec(), fence=SECOND)
    await second.sweep(lambda attempt, name: attempt != "0-0")
    fresh = await asyncio.gather(*(acquire(second, f"{number}-1") for number in range(1, 4)))
    assert {one.handle["sandbox"] for one in fresh} == {kept.handle["sandbox"]}
    assert await say(fresh[0], "cat setup.log") == "prepared"
    assert [verb for verb, _ in operator.api.writes] == ["create"]


async def test_place_of_a_leftover_workspace_is_used_only_after_the_sweep(
    opened: Opened, operator: StandInOperator
) -> None:
    first = await opened()
    left = await asyncio.gather(*(acquire(first, f"{number}-0") for number in range(4)))
    await first.close(keep=True)
    second = await opened()
    elsewhere = await acquire(second, "5-0")
    assert elsewhere.handle["sandbox"] != left[0].handle["sandbox"]
    taken = await second.reattach(left[0].handle, spec=spec(), fence=SECOND)
    await taken.release()
    more = await asyncio.gather(*(acquire(second, f"{number}-0") for number in range(6, 10)))
    assert [one.handle["sandbox"] for one in more].count(left[0].handle["sandbox"]) == 1
    assert len(operator.api.writes) == 2


async def test_an_agents_leftover_workspace_is_removed_for_the_grading_of_its_attempt(
    opened: Opened, operator: StandInOperator
) -> None:
    job = rollout_job(places=1)
    first = await opened(job)
    agent = await acquire(first)
    await first.close(keep=True)
    second = await opened(job)
    grading = await acquire(second, name="grading")
    assert grading.handle["sandbox"] == agent.handle["sandbox"]


async def test_services_start_again_when_a_process_died_before_it_recorded_their_workspace(
    opened: Opened, operator: StandInOperator
) -> None:
    services = [Service("web", spec(), command=["sleep", "600"])]
    first = await opened()
    await acquire(first, services=services)
    await first.close(keep=True)
    second = await opened()
    workspace = await second.acquire(spec(services=services), attempt="0-0", fence=SECOND, name="agent")
    assert await say(workspace, "cat setup.log") == "prepared"


@pytest.mark.parametrize("mode", ["Plain", "Auto"])
@pytest.mark.parametrize("attempt", ["0-0", "1-0"], ids=["same attempt", "another attempt"])
async def test_a_plain_sandbox_that_an_earlier_process_used_hosts_no_other_attempt(
    opened: Opened, operator: StandInOperator, mode: str, attempt: str
) -> None:
    """Files that the process wrote to the sandbox's root remain, and could affect the next agent's work or its grading."""
    operator.modes = ["Plain"] * 9
    first = await opened(rollout_job(mode))
    agent = await acquire(first)
    await say(agent, "touch left")
    await first.close(keep=True)
    second = await opened(rollout_job(mode))
    if attempt == "1-0":  # attempt 0-0 was sealed, and its workspace not released
        await second.sweep(lambda attempt, name: attempt == "0-0")
    grading = await acquire(second, attempt, name="grading")
    assert grading.handle["sandbox"] != agent.handle["sandbox"]
    assert await say(grading, "ls") == "given.txt\nsetup.log"
    await until(lambda: agent.handle["sandbox"] not in operator.api.sandboxes)


async def test_a_plain_sandbox_whose_workspace_another_runner_ended_hosts_no_other_attempt(
    opened: Opened, operator: StandInOperator
) -> None:
    first = await opened(rollout_job("Plain"))
    agent = await acquire(first)
    second = await opened(rollout_job("Plain"))
    taken = await second.reattach(agent.handle, spec=spec(), fence=SECOND)
    with pytest.raises(Fenced):
        await agent.release()
    await taken.fence()
    await taken.destroy()
    # Workspaces of others are counted while a rollout waits for a sandbox, so no other one may start before.
    operator.hears = False
    waiting = asyncio.create_task(acquire(first, "1-0"))
    await until(lambda: agent.handle["sandbox"] not in operator.api.sandboxes)
    operator.hear()
    other = await waiting
    assert other.handle["sandbox"] != agent.handle["sandbox"]


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_sandboxes_that_the_next_process_has_no_use_for_are_deleted(
    opened: Opened, operator: StandInOperator, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime.sandboxes.cluster.fleet.KEEP_EMPTY_SECONDS", 0.5)
    first = await opened(rollout_job(mode))
    await acquire(first)
    await first.close(keep=True)
    assert operator.api.sandboxes
    second = await opened(rollout_job(mode))
    await second.sweep(lambda attempt, name: True)
    await until(lambda: not operator.api.sandboxes)


async def test_sandbox_that_ended_without_a_runner_gives_the_reason(opened: Opened, operator: StandInOperator) -> None:
    first = await opened()
    evicted, gone = await acquire(first), await acquire(first, "9-0", image="another")
    await first.close(keep=True)
    operator.finish(evicted.handle["sandbox"], "Evicted", "node pressure")
    operator.api.remove(gone.handle["sandbox"])
    second = await opened()
    for handle, reason in ((evicted.handle, "Evicted"), (gone.handle, "SandboxDeleted")):
        with pytest.raises(SandboxFailure) as failure:
            await second.reattach(handle, spec=spec(), fence=SECOND)
        assert failure.value.reason == reason


async def test_executor_with_another_boot_id_is_a_lost_sandbox(opened: Opened, operator: StandInOperator) -> None:
    first = await opened()
    workspace = await acquire(first)
    await first.close(keep=True)
    second = await opened()
    with pytest.raises(SandboxFailure, match="boot id") as failure:
        await second.reattach({**workspace.handle, "bootId": "another"}, spec=spec(), fence=SECOND)
    assert failure.value.reason == "SandboxLost"


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_a_frozen_runner_that_thaws_does_not_take_its_successors_sandboxes_away(
    opened: Opened, operator: StandInOperator, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_empty = "agent_runtime.sandboxes.cluster.fleet.KEEP_EMPTY_SECONDS"
    monkeypatch.setattr(keep_empty, 600)
    frozen = await opened(rollout_job(mode))
    workspace = await acquire(frozen)
    empty = await acquire(frozen, "9-0", image="another")
    if mode == "Overlay":
        await empty.release()
    successor = await opened(rollout_job(mode))
    taken = await successor.reattach(workspace.handle, spec=spec(), fence=SECOND)
    if mode == "Overlay":
        fresh = await acquire(successor, "8-0", image="another")
        assert fresh.handle["sandbox"] == empty.handle["sandbox"]
    with pytest.raises(Fenced):
        await acquire(frozen)
    with pytest.raises(Fenced):
        await workspace.release()
    monkeypatch.setattr(keep_empty, 1.5)
    await asyncio.sleep(3)
    assert await say(taken, "echo here") == "here"
    if mode == "Overlay":
        assert await say(fresh, "echo here") == "here"
