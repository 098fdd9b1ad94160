"""A sandbox that ends: all its attempts get the true reason at once, and other sandboxes are not affected."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agent_runtime.kube import api as kube_api
from agent_runtime.sandboxes.base import Evidence, SandboxFailure
from agent_runtime.sandboxes.cluster import fleet, held_sandbox, lack_of_room, network_probe
from agent_runtime.sandboxes.cluster.sandbox_object import POD_IP
from agent_runtime.sandboxes.executor_client import client as executor_client
from rollout_api.cluster import EXECUTOR_PORT
from tests.integration.cluster_provider.conftest import SECOND, Opened, acquire, rollout_job, say, spec, until
from tests.integration.cluster_provider.stand_in_operator import StandInOperator, condition

OUTSIDE = ["Evicted", "Preempted", "NodeLost", "PodDeleted", "Idle"]
UNEXPLAINED = ["DeadlineExceeded", "OOMKilled", "DiskExhausted", "InodesExhausted", "ProcessesExhausted", "Crashed"]


@pytest.mark.parametrize("reason", [*OUTSIDE, *UNEXPLAINED])
async def test_running_call_ends_with_the_sandboxs_reason_at_a_silent_address(
    opened: Opened, operator: StandInOperator, reason: str
) -> None:
    provider = await opened()
    workspace = await acquire(provider)
    name = workspace.handle["sandbox"]
    under_way = asyncio.create_task(say(workspace, "sleep 60"))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    operator.finish(name, reason, "the words", executor=signal.SIGSTOP)
    with pytest.raises(SandboxFailure, match="the words") as failure:
        await under_way
    assert failure.value.reason == reason
    assert failure.value.evidence is (Evidence.OUTSIDE if reason in OUTSIDE else Evidence.UNEXPLAINED)
    with pytest.raises(SandboxFailure, match="the words"):
        await workspace.read("given.txt")
    with pytest.raises(SandboxFailure, match="the words"):
        _ = [chunk async for chunk in workspace.tar(".")]
    await workspace.release()
    # Nothing waited for the time-out of a connection.
    assert time.monotonic() - started < executor_client.REPLY_SECONDS
    await until(lambda: name not in operator.api.sandboxes)


async def test_other_attempts_continue_and_the_next_one_gets_another_sandbox(
    opened: Opened, operator: StandInOperator
) -> None:
    provider = await opened()
    lost, *_ = await asyncio.gather(*(acquire(provider, f"{n}-0", group="g0") for n in range(4)))
    others = await asyncio.gather(*(acquire(provider, f"{n}-0", group="g1") for n in range(4, 8)))
    assert {other.handle["sandbox"] for other in others} != {lost.handle["sandbox"]}
    operator.finish(lost.handle["sandbox"], "Evicted")
    again = await acquire(provider, "0-1", group="g0")
    assert again.handle["sandbox"] != lost.handle["sandbox"]
    assert await say(again, "cat setup.log") == "prepared"
    assert [await say(other, "echo here") for other in others] == ["here"] * 4


async def test_sandbox_deleted_by_a_person_costs_no_reward(opened: Opened, operator: StandInOperator) -> None:
    provider = await opened()
    workspace = await acquire(provider)
    under_way = asyncio.create_task(say(workspace, "sleep 60"))
    await asyncio.sleep(0.1)
    operator.api.remove(workspace.handle["sandbox"])
    with pytest.raises(SandboxFailure, match="was deleted") as failure:
        await under_way
    assert (failure.value.reason, failure.value.evidence) == ("SandboxDeleted", Evidence.OUTSIDE)


async def test_broken_connection_is_reported_with_the_later_reason(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "RETRY_PAUSES", (0.05, 0.2))
    provider = await opened()
    workspace = await acquire(provider)
    name = workspace.handle["sandbox"]
    under_way = asyncio.create_task(say(workspace, "sleep 60"))
    await asyncio.sleep(0.1)
    operator.executors[name].kill()
    await until(lambda: provider._fleet.held[name].inquiry is not None)
    await asyncio.sleep(0.5)
    assert not under_way.done()
    operator.finish(name, "OOMKilled", "too much memory")
    with pytest.raises(SandboxFailure, match="too much memory") as failure:
        await under_way
    assert (failure.value.reason, failure.value.evidence) == ("OOMKilled", Evidence.UNEXPLAINED)


async def test_unexplained_broken_connection_is_a_lost_sandbox(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "RETRY_PAUSES", (0.05, 0.2))
    monkeypatch.setattr(fleet, "REASON_SECONDS", 0.5)
    provider = await opened()
    workspace = await acquire(provider)
    name = workspace.handle["sandbox"]
    operator.executors[name].kill()
    with pytest.raises(SandboxFailure) as failure:
        await say(workspace, "echo here")
    assert (failure.value.reason, failure.value.evidence) == ("SandboxLost", Evidence.UNEXPLAINED)
    await until(lambda: name not in operator.api.sandboxes)
    assert await say(await acquire(provider, "0-1"), "echo here") == "here"


async def test_lost_sandbox_has_its_own_reason_when_the_watch_is_dead(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "RETRY_PAUSES", (0.05, 0.2))
    monkeypatch.setattr(fleet, "REASON_SECONDS", 1)
    provider = await opened()
    workspace = await acquire(provider)
    name = workspace.handle["sandbox"]
    operator.api.silence_watches()
    operator.finish(name, "Evicted", "node pressure", executor=signal.SIGKILL)
    with pytest.raises(SandboxFailure, match="node pressure") as failure:
        await say(workspace, "echo here")
    assert failure.value.reason == "Evicted"


async def test_sandbox_is_not_lost_when_it_answers_again_after_an_outage_of_the_network(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "RETRY_PAUSES", (0.05,))
    monkeypatch.setattr(fleet, "REASON_SECONDS", 0.5)
    provider = await opened()
    workspace = await acquire(provider)
    name = workspace.handle["sandbox"]
    executor, held = operator.executors[name], provider._fleet.held[name]
    for _ in range(2):
        with monkeypatch.context() as hasty:
            hasty.setattr(executor_client, "REPLY_SECONDS", 0.3)
            hasty.setattr(held_sandbox, "ANSWER_SECONDS", 0.3)
            executor.send_signal(signal.SIGSTOP)
            reading = asyncio.create_task(workspace.read("given.txt"))
            await until(lambda: held.inquiry is not None)
        executor.send_signal(signal.SIGCONT)
        assert await reading == b"given\n"
    assert await say(workspace, "echo here") == "here"


@pytest.mark.parametrize("refuses_first", [False, True])
async def test_a_sandbox_whose_node_died_is_not_blamed_on_the_tool_call_that_ran_there(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch, refuses_first: bool
) -> None:
    """Kubernetes calls a node lost a minute and more after its last packet."""
    monkeypatch.setattr(executor_client, "RETRY_PAUSES", (0.05,))
    monkeypatch.setattr(executor_client, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(fleet, "REASON_SECONDS", 0.75)
    monkeypatch.setattr(held_sandbox, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(held_sandbox, "ANSWER_SECONDS", 0.5)
    provider = await opened()
    workspace = await acquire(provider)
    name = workspace.handle["sandbox"]
    held, cut_off = provider._fleet.held[name], asyncio.Event()
    is_cut_off = held.is_cut_off

    async def watched() -> bool:
        answer = await is_cut_off()
        if answer:
            cut_off.set()
        return answer

    monkeypatch.setattr(held, "is_cut_off", watched)
    under_way = asyncio.create_task(say(workspace, "sleep 60"))
    await asyncio.sleep(0.1)
    operator.executors[name].kill()
    operator.executors[name].wait()
    if refuses_first:
        await until(lambda: held.inquiry is not None)
    with swallowing(operator.api.sandboxes[name]["status"][POD_IP]):
        async with asyncio.timeout(60):
            await cut_off.wait()
        await asyncio.sleep(1)  # longer than all that follows, were the node's failure not waited for
        assert not under_way.done(), "nobody has said yet what happened"
        operator.finish(name, "NodeLost", "node-7 is gone")
        with pytest.raises(SandboxFailure, match="node-7 is gone") as failure:
            await under_way
    assert (failure.value.reason, failure.value.evidence) == ("NodeLost", Evidence.OUTSIDE)


@pytest.mark.parametrize(
    ("mode", "outage"),
    [
        ("Overlay", "network"),
        ("Overlay", "network, with a guest kernel"),
        pytest.param("Overlay", "executor", marks=pytest.mark.full),
        pytest.param("Plain", "network", marks=pytest.mark.full),
        pytest.param("Plain", "network, with a guest kernel", marks=pytest.mark.full),
        ("Plain", "executor"),
    ],
)
async def test_network_outage_differs_from_a_refusing_executor(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch, mode: str, outage: str
) -> None:
    """A policy in Plain can also fill its executor's queue of connections, and then nothing answers either."""
    monkeypatch.setattr(executor_client, "RETRY_PAUSES", (0.05,))
    monkeypatch.setattr(executor_client, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(executor_client, "REPLY_SECONDS", 1)
    monkeypatch.setattr(fleet, "REASON_SECONDS", 2)  # the whole call lasts longer than the probe needs
    monkeypatch.setattr(fleet, "NODE_REASON_SECONDS", 2.5)
    monkeypatch.setattr(held_sandbox, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(held_sandbox, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(network_probe, "IDLE_SECONDS", 1)
    monkeypatch.setattr(network_probe, "PROBE_SECONDS", 1)
    monkeypatch.setattr(network_probe, "PROBES", 1)
    guest: dict[str, Any] = {"runtimeClassName": "gvisor"} if outage == "network, with a guest kernel" else {}
    provider = await opened(rollout_job(mode, **guest))
    workspace = await acquire(provider)
    name = workspace.handle["sandbox"]
    probe = provider._fleet.held[name].probe
    assert probe is not None
    await asyncio.sleep(0.2)
    with contextlib.ExitStack() as stack:
        if outage != "executor":
            stack.enter_context(dropping(operator.api.sandboxes[name]["status"][POD_IP]))
        else:
            operator.executors[name].send_signal(signal.SIGSTOP)
            stack.callback(operator.executors[name].send_signal, signal.SIGCONT)
        with pytest.raises(SandboxFailure) as failure:
            await workspace.read("given.txt")
    assert probe.is_cut_off == (outage != "executor")
    expected = ("NetworkLost", Evidence.OUTSIDE) if outage == "network" else ("SandboxLost", Evidence.UNEXPLAINED)
    assert (failure.value.reason, failure.value.evidence) == expected


@pytest.mark.parametrize(
    ("mode", "outage"),
    [("Overlay", "network"), pytest.param("Plain", "network", marks=pytest.mark.full), ("Plain", "executor")],
)
async def test_idle_ending_is_network_lost_only_when_the_network_was_down(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch, mode: str, outage: str
) -> None:
    """A policy in Plain can also keep the runner's requests away from its executor until it ends as idle."""
    monkeypatch.setattr(network_probe, "IDLE_SECONDS", 1)
    monkeypatch.setattr(network_probe, "PROBE_SECONDS", 1)
    monkeypatch.setattr(network_probe, "PROBES", 1)
    provider = await opened(rollout_job(mode))
    workspace = await acquire(provider)
    assert await say(workspace, "echo here") == "here"
    name = workspace.handle["sandbox"]
    probe = provider._fleet.held[name].probe
    assert probe is not None
    await asyncio.sleep(0.2)
    with contextlib.ExitStack() as stack:
        if outage == "network":
            stack.enter_context(dropping(operator.api.sandboxes[name]["status"][POD_IP]))
            await until(lambda: probe.is_cut_off)
        else:
            operator.executors[name].send_signal(signal.SIGSTOP)
            await asyncio.sleep(3)  # longer than the probe needs
        operator.finish(name, "Idle", "it received no request for spec.idleSeconds", executor=signal.SIGKILL)
        with pytest.raises(SandboxFailure, match="idleSeconds") as failure:
            await say(workspace, "echo here", "2:say")
    assert failure.value.reason == ("NetworkLost" if outage == "network" else "Idle")


async def test_runner_cut_off_from_all_does_not_delete_its_successors_sandbox(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was cut off, so another pod runs its shard. When the network is back, this runner does not learn that at
    once.
    """
    monkeypatch.setattr(executor_client, "RETRY_PAUSES", (0.05,))
    monkeypatch.setattr(executor_client, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(executor_client, "REPLY_SECONDS", 0.5)
    monkeypatch.setattr(kube_api, "LONGEST_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(held_sandbox, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(held_sandbox, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(fleet, "REASON_SECONDS", 0.5)
    monkeypatch.setattr(fleet, "NODE_REASON_SECONDS", 1)
    monkeypatch.setattr(fleet, "REASON_OUTAGE_SECONDS", 1)
    cut_off = await opened()
    workspace = await acquire(cut_off)
    name = workspace.handle["sandbox"]
    with dropping(operator.api.sandboxes[name]["status"][POD_IP]):
        await operator.api.stop()
        with pytest.raises(SandboxFailure):
            await workspace.read("given.txt")
    await operator.api.start()
    successor = await opened()
    taken = await successor.reattach(workspace.handle, spec=spec(), fence=SECOND)
    await asyncio.sleep(1.5)  # longer than the pause between two tries of a call to the API server
    assert name in operator.api.sandboxes
    assert await say(taken, "echo here") == "here"


@contextlib.contextmanager
def dropping(host: str) -> Iterator[None]:
    """Drop all packets to that address of this machine's loopback."""
    table = f"drop-{host.replace('.', '-')}"
    rules = (
        f"add table ip {table}; add chain ip {table} in {{ type filter hook input priority 0; }}; "
        f"add rule ip {table} in ip daddr {host} drop"
    )
    subprocess.run(["nft", rules], check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", f"delete table ip {table}"], check=True)


@contextlib.contextmanager
def swallowing(host: str) -> Iterator[None]:
    """Have connections to that address time out: a listener is there, but its queue is full."""
    address = (host, EXECUTOR_PORT)
    with socket.create_server(address, backlog=0), contextlib.ExitStack() as waiting:
        for _ in range(4):
            caller = waiting.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(address)
        yield


async def test_failed_start_is_reported_with_its_reason(opened: Opened, operator: StandInOperator) -> None:
    words = "StartDeadlineExceeded: ImagePullBackOff: no such image"
    operator.answers = [{"conditions": [condition("Finished", True, "StartDeadlineExceeded", words)]}]
    provider = await opened()
    tries = await asyncio.gather(*(acquire(provider, f"{n}-0") for n in range(4)), return_exceptions=True)
    assert [(type(t), getattr(t, "reason", None)) for t in tries] == [(SandboxFailure, "StartDeadlineExceeded")] * 4
    assert "no such image" in str(tries[0])
    assert await say(await acquire(provider, "0-1"), "echo here") == "here"


async def test_a_start_that_is_evicted_is_made_again_without_a_failed_attempt(
    opened: Opened, operator: StandInOperator
) -> None:
    operator.answers = [{"conditions": [condition("Finished", True, "Preempted", "by another pod")]}] * 2
    provider = await opened()
    assert await say(await acquire(provider), "echo here") == "here"
    await until(lambda: sorted(verb for verb, _ in operator.api.writes) == ["create"] * 3 + ["delete"] * 2)


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        ({"conditions": [condition("Scheduled", False, "Unschedulable", "0/3 nodes")]}, "Unschedulable", "0/3 nodes"),
        ({"conditions": [condition("ImagePulled", False, "ImagePullBackOff", "no tag")]}, "ImagePullBackOff", "no tag"),
        ({}, "StartDeadlineExceeded", "operator"),
    ],
)
async def test_slow_start_reports_what_it_waited_for(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch, status: object, reason: str, words: str
) -> None:
    monkeypatch.setattr(fleet, "OPERATOR_GRACE_SECONDS", 0.2)
    operator.answers = [status] if isinstance(status, dict) and status else []
    operator.hears = bool(status)
    provider = await opened(rollout_job(startSeconds=1))
    with pytest.raises(SandboxFailure, match=words) as failure:
        await acquire(provider, start_seconds=1)
    assert failure.value.reason == reason
    await until(lambda: not operator.api.sandboxes)


@pytest.mark.parametrize("is_ended", [False, True])
async def test_request_waits_for_others_to_end_when_the_cluster_is_full(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    monkeypatch.setattr(fleet, "OPERATOR_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(fleet, "TICK_SECONDS", 0.05)
    provider = await opened(rollout_job(startSeconds=1))
    first, *_ = await asyncio.gather(*(acquire(provider, f"{n}-0") for n in range(4)))
    full = "0/1 nodes are available: 1 Insufficient memory."
    operator.answers = [{"conditions": [condition("Scheduled", False, "Unschedulable", full)]}] * 9
    waiting = asyncio.create_task(acquire(provider, "0-1", start_seconds=1))
    await asyncio.sleep(1.5)
    if is_ended:
        name = next(name for name in operator.api.sandboxes if name != first.handle["sandbox"])
        operator.finish(name, "StartDeadlineExceeded", f"Unschedulable: {full}")
    await asyncio.sleep(1)
    assert not waiting.done()
    await first.release()
    assert await say(await waiting, "echo here") == "here"


async def test_request_waits_while_another_runner_uses_the_quota(
    opened: Opened, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "OPERATOR_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(fleet, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(lack_of_room, "LOOK_SECONDS", 0.1)
    operator.most_pods = 1
    first, second = await opened(rollout_job(startSeconds=1)), await opened(rollout_job(startSeconds=1), runner=1)
    await acquire(first)
    waiting = asyncio.create_task(acquire(second, "1-0", start_seconds=3))
    await until(lambda: "exceeded quota" in second.waits_for())
    await asyncio.sleep(4)
    assert not waiting.done()
    await first.close()
    assert await say(await waiting, "echo here") == "here"


async def test_request_fails_after_start_seconds_when_nobody_uses_the_quota(
    opened: Opened, operator: StandInOperator
) -> None:
    operator.most_pods = 0
    provider = await opened(rollout_job(startSeconds=1))
    with pytest.raises(SandboxFailure, match="exceeded quota"):
        await acquire(provider)


async def test_job_that_waits_for_its_sandboxes_reports_it_early(opened: Opened, operator: StandInOperator) -> None:
    stuck = {"conditions": [condition("ImagePulled", False, "ImagePullBackOff", "no tag")]}
    operator.answers = [stuck]
    provider = await opened()
    assert provider.waits_for() == ""
    waiting = asyncio.create_task(acquire(provider))
    await until(lambda: provider.waits_for() == "1 sandbox does not start: ImagePullBackOff: no tag")
    waiting.cancel()


async def test_while_the_operator_is_down_a_start_only_takes_longer(opened: Opened, operator: StandInOperator) -> None:
    operator.hears = False
    provider = await opened()
    waiting = asyncio.create_task(acquire(provider))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    operator.hear()
    assert await say(await waiting, "echo here") == "here"
