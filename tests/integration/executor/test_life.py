"""How an executor starts, what it reports, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_runtime.executor.attempts import read_key

REPOSITORY = Path(__file__).parents[3]


async def test_health_reports_mode_places_and_guarantees(client: Any, executor: Any) -> None:
    health = (await client.call("GET", "/health")).json
    assert health["mode"] == executor.ready["mode"] == executor.mode
    assert health["bootId"] == executor.ready["bootId"]
    assert health["places"]["free"] == health["places"]["total"] - 1
    assert {"memory", "processes", "fileSize", "disk", "network"} <= health["guarantees"].keys()
    if executor.mode == "Plain":
        assert health["guarantees"]["network"].startswith("None: ")


async def test_executor_uses_less_than_30_mb(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Plain")
    print(f"{executor.memory_kib() / 1024:.1f} MiB resident")
    # The bound is 30 MB. Time is the business of benchmarks/executor_start.py.
    assert executor.memory_kib() < 30_000


ORPHANS = """
import os, time
for number in range(200):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(number % 10 / 20)  # some outlive their command, most do not
        os._exit(0)
    os.wait()
print('orphaned')
"""
AS_PID_1 = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_orphans_are_reaped_where_the_executor_is_pid_1(start_executor: Any, connect: Any, mode: str) -> None:
    executor = start_executor(mode, prefix=AS_PID_1)
    async with connect(executor) as client:
        assert await client.out(["/usr/bin/python3", "-c", ORPHANS]) == "orphaned\n"
        async with asyncio.timeout(60):
            while found := zombies_below(executor.process.pid):
                print(found)
                await asyncio.sleep(0.1)
        assert await client.out("echo fine") == "fine\n"
    executor.process.kill()  # unshare ignores signals that would end it


THREAD_BEFORE_IT_SERVES = """
import signal, sys, threading
from agent_runtime.executor import __main__, daemon

async def open_host(config):
    thread = threading.Thread(target=lambda: print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))))
    thread.start()
    thread.join()
    raise __main__.HostFailure("seen")

daemon.open_host = open_host
sys.exit(__main__.main(["--config", "-"]))
"""


def test_no_thread_of_pid_1_takes_stop_signals_from_its_container() -> None:
    """Python has a handler for SIGINT, so one thread that does not block it would let any process in there end it."""
    config = {"listen": "tcp:127.0.0.1:0", "tokenSha256": "0" * 64, "stateDir": "/nowhere"}
    command = [*AS_PID_1, sys.executable, "-c", THREAD_BEFORE_IT_SERVES]
    ended = subprocess.run(command, input=json.dumps(config), capture_output=True, text=True, check=False)
    assert (ended.stdout.split(), ended.stderr) == (["2", "15"], "seen\n")


def zombies_below(ancestor: int) -> list[int]:
    """Return processes that have ended and were not reaped."""
    parents, zombies = {}, []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        parents[int(path.parent.name)] = int(parent)
        zombies += [int(path.parent.name)] if state == "Z" else []

    def is_below(pid: int) -> bool:
        return pid in parents and (parents[pid] == ancestor or is_below(parents[pid]))

    return [pid for pid in zombies if is_below(pid)]


@pytest.mark.parametrize("lost", ["keeper", "remover"])
async def test_executor_ends_when_it_can_create_no_more_workspaces(
    start_executor: Any, connect: Any, lost: str
) -> None:
    executor = start_executor("Overlay")
    (zygote,) = children_of(executor.process.pid)
    (keeper,) = children_of(zygote)
    async with connect(executor) as client:
        assert await client.out("echo made") == "made\n"
        # The keeper starts the remover as its first child.
        os.kill({"keeper": keeper, "remover": min(children_of(keeper))}[lost], signal.SIGKILL)
        assert await asyncio.to_thread(executor.process.wait, 20) == 1
    assert '"broken"' in executor.log.read_text()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("mode", ["Overlay", "Plain"])
async def test_suspension_of_all_processes_ends_no_command(mode: str, start_executor: Any, connect: Any) -> None:
    """As batch systems suspend jobs: every process gets SIGTSTP, SIGSTOP and SIGCONT, and each may be the first."""
    executor = start_executor(mode)
    async with connect(executor) as client:
        running = [asyncio.create_task(client.out(f"sleep 2; echo {number}")) for number in range(4)]
        await asyncio.sleep(1)
        found = [executor.process.pid]
        for pid in found:
            found += children_of(pid)
        for number in (signal.SIGTSTP, signal.SIGSTOP, signal.SIGCONT):
            for pid in found if number == signal.SIGCONT else reversed(found):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            await asyncio.sleep(0.3)
        assert await asyncio.gather(*running) == [f"{number}\n" for number in range(4)]


async def test_workspaces_report_how_long_the_executor_stood_still(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Plain")

    async def stood_still(client: Any) -> float:
        return float((await client.call("GET", "~")).json["stoodStill"])

    async with connect(executor) as client:
        assert await stood_still(client) == 0
        executor.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(10.5)
        executor.process.send_signal(signal.SIGCONT)
        assert await stood_still(client) > 10
    async with connect(executor) as client:
        assert await stood_still(client) == 0, "this workspace was created afterwards"


async def until_made(client: Any, name: str) -> None:
    """Wait until a command has made this file."""
    async with asyncio.timeout(60):
        while (await client.call("GET", f"~/stat?path=@/{name}")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def limit_idle_time(session_of: Any, executor: Any, seconds: float) -> None:
    headers = {"Authorization": f"Bearer {executor.token}"}
    async with (
        session_of(executor) as (session, base),
        session.put(f"{base}/v1/idle", json={"seconds": seconds}, headers=headers) as answer,
    ):
        assert answer.status == 200


async def test_executor_becomes_still_only_if_it_was_idle_for_long_enough(start_executor: Any, connect: Any) -> None:
    """The time counts from the last request, or the end of the last command."""
    executor = start_executor("Plain")
    async with connect(executor) as client:

        async def idle_for(seconds: float) -> Any:
            body = {"still": True, "parking": 1, "ifIdleSeconds": seconds}
            return await client.call("PUT", "/still", json=body, keyed=False)

        async def idle_seconds() -> float:
            refused = await idle_for(1000)
            assert refused.code == "Conflict"
            return float(refused.json["error"]["idleSeconds"])

        await client.ask("touch begun; sleep 2", key := client.new_key(), waitSeconds=0)
        await until_made(client, "begun")
        await asyncio.sleep(0.5)
        assert await idle_seconds() == 0
        before = 0.0
        async with asyncio.timeout(60):
            while (now := await idle_seconds()) < 0.5:
                assert now >= before, "the question itself does not count"
                before = now
                await asyncio.sleep(0.1)
        assert now < 2, "it counts from the end of the command"
        process = (await client.call("GET", f"~/processes/{read_key(key).process_id()}")).json
        assert (process["exitCode"], process["cause"]) == (0, None), "a refused question ends nothing"
        assert await idle_seconds() < now
        assert (await client.start("true")).status == 200, "nothing is refused"
        while (answer := await idle_for(0.5)).status == 409:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert answer.json == {"still": True}
        assert (await client.start("true")).code == "Conflict"
        assert (await idle_for(1000)).json == {"still": True}, "it is already"
        assert (await client.call("PUT", "/still", json={"still": False, "parking": 1}, keyed=False)).status == 200


async def test_unused_executor_ends_itself_and_a_waiting_request_keeps_it(
    start_executor: Any, connect: Any, session_of: Any
) -> None:
    executor = start_executor("Plain")
    async with connect(executor) as client:
        begun = time.monotonic()
        waiting = asyncio.create_task(client.ask("touch begun; sleep 2.5", client.new_key(), waitSeconds=60))
        await until_made(client, "begun")
        await limit_idle_time(session_of, executor, 1)
        assert (await waiting).exit_code == 0
        assert await asyncio.to_thread(executor.process.wait, 60) == 0
        assert time.monotonic() - begun > 2.5 + 1


async def test_executor_that_is_still_does_not_end_itself(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Plain", idleSeconds=2)
    async with connect(executor) as client:
        still = {"still": True, "parking": 1}
        assert (await client.call("PUT", "/still", json=still, keyed=False)).status == 200
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(executor.process.wait, 4)
        assert (await client.call("PUT", "/still", json=still | {"still": False}, keyed=False)).status == 200
        assert await client.out("echo used again") == "used again\n"
        assert await asyncio.to_thread(executor.process.wait, 60) == 0


async def test_executor_of_a_stopped_run_ends_early_unless_another_request_comes(
    start_executor: Any, connect: Any, session_of: Any
) -> None:
    returned, left = start_executor("Plain", idleSeconds=900), start_executor("Plain", idleSeconds=900)
    await limit_idle_time(session_of, left, 1)
    async with connect(returned) as client:
        # Keeps the executor until the other request, however late that comes.
        hold = "touch begun; until [ -e over ]; do sleep 0.1; done"
        waiting = asyncio.create_task(client.ask(hold, client.new_key(), waitSeconds=60))
        await until_made(client, "begun")
        await limit_idle_time(session_of, returned, 1)
        assert (await client.run("touch over"))["exitCode"] == 0
        assert (await waiting).exit_code == 0
        assert await asyncio.to_thread(left.process.wait, 60) == 0
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(returned.process.wait, 3)


async def test_probes_and_requests_without_a_token_do_not_keep_the_executor_alive(
    start_executor: Any, session_of: Any
) -> None:
    executor = start_executor("Plain", idleSeconds=1)
    async with session_of(executor) as (session, base):
        while executor.process.poll() is None:
            assert time.monotonic() < executor.started_at + 120
            try:
                async with session.get(f"{base}/healthz") as probe:
                    assert probe.status == 200
                async with session.get(f"{base}/v1/health") as stranger:
                    assert stranger.status == 401
            except (OSError, aiohttp.ClientError):
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.05)
    assert executor.process.returncode == 0


async def test_stopped_executor_leaves_no_process_and_no_file(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Overlay")
    async with connect(executor) as client:
        await client.start(["sleep", "8765"])
        executor.process.terminate()
        # Not 0: then the kubelet would forget why it evicted the pod.
        assert await asyncio.to_thread(executor.process.wait, 20) == 143
        pgrep = await asyncio.create_subprocess_exec("pgrep", "-xf", "sleep 8765")
        assert await pgrep.wait() == 1
        assert list((executor.folder / "state" / "daemon").iterdir()) == []


async def test_changed_boot_id_means_lost_state(start_executor: Any) -> None:
    assert start_executor("Plain").ready["bootId"] != start_executor("Plain").ready["bootId"]


async def test_free_tcp_port_is_chosen_and_reported(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Plain", listen="tcp:127.0.0.1:0")
    assert int(executor.address.rsplit(":", 1)[1]) > 0
    async with connect(executor) as client:
        assert (await client.run(["true"]))["exitCode"] == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"listen": "8080"}, "config.listen"),
        ({"tokenSha256": "abc"}, "config.tokenSha256"),
        ({"mode": "Docker"}, "config.mode"),
        ({"places": 0}, "config.places"),
        ({"stateDir": "relative"}, "config.stateDir"),
        ({"binds": [{"source": "/a"}]}, "config.binds[0].target"),
        ({"idle": 5}, "config.idle"),
    ],
)
def test_a_wrong_configuration_is_refused_by_the_name_of_its_key(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    config = {"listen": f"unix:{tmp_path}/s", "tokenSha256": "0" * 64, "stateDir": str(tmp_path), **change}
    ended = subprocess.run(
        [sys.executable, "-m", "agent_runtime.executor", "--config", "-"],
        input=json.dumps(config),
        text=True,
        capture_output=True,
        cwd=REPOSITORY,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


# Root of a user namespace that may make no further ones: there is no way to overlay the machine's root from in there.
CONFINED = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"', "sh"]


def test_executor_ends_with_the_reason_when_overlay_is_unavailable(start_executor: Any) -> None:
    with pytest.raises(AssertionError, match=r"ended with 3: mode Overlay is unavailable here: .*mount"):
        start_executor("Overlay", prefix=CONFINED)


async def test_auto_falls_back_to_plain_and_gives_the_reason(start_executor: Any, connect: Any) -> None:
    executor = start_executor("Auto", prefix=CONFINED, user="0")
    assert executor.ready["mode"] == "Plain"
    assert "mount" in executor.ready["modeReason"]
    async with connect(executor) as client:
        assert (await client.call("GET", "/health")).json["modeReason"] == executor.ready["modeReason"]
        assert (await client.run(["true"]))["exitCode"] == 0


async def test_second_executor_on_one_state_folder_is_refused(start_executor: Any, connect: Any) -> None:
    first = start_executor("Overlay")
    async with connect(first) as client:
        process = (await client.run("seq 1 100000"))["id"]
        with pytest.raises(AssertionError, match="another executor"):
            start_executor("Overlay", stateDir=str(first.folder / "state"), listen=f"unix:{first.socket}")
        output = await client.call("GET", f"~/processes/{process}/output?cursor=40000&limit=10")
        assert len(output.body) == 10
