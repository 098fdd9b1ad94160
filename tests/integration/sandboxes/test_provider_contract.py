"""The contract of all providers, tested with the in-memory one of the engine's tests and the local one in both modes."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_runtime.sandboxes.base import (
    Fence,
    Fenced,
    FileError,
    SandboxFailure,
    SandboxProvider,
    SetupFailed,
    Workspace,
)
from tests.integration.sandboxes.conftest import FIRST, Case, spec


async def acquire(provider: SandboxProvider, attempt: str = "0-1", **changes: Any) -> Workspace:
    return await provider.acquire(spec(**changes), attempt=attempt, fence=FIRST, name="agent")


async def say(workspace: Workspace, command: str, key: str) -> str:
    return (await workspace.run(command, key=key, deadline_seconds=30)).stdout.decode()


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


async def joined(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def test_a_workspace_starts_with_the_tasks_files_and_its_setup_done(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    assert await say(workspace, "cat given.txt; cat setup.log", "1:a") == "given\nprepared\n"


async def test_a_command_tells_its_exit_code_and_output(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    result = await workspace.run("echo hello; exit 3", key="1:a", deadline_seconds=30)
    assert (result.exit_code, result.signal, result.cause, result.ok) == (3, None, None, False)
    assert (result.stdout, result.stdout_bytes, result.stdout_omitted) == (b"hello\n", 6, 0)
    assert (await workspace.run(["echo", "a b"], key="1:b", deadline_seconds=30)).stdout == b"a b\n"


async def test_the_same_key_gives_the_same_result_and_never_a_second_run(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    command = "sleep 0.2; echo once >> count; cat count"
    both = await asyncio.gather(*(say(workspace, command, "1:a") for _ in range(2)))
    assert [*both, await say(workspace, command, "1:a")] == ["once\n"] * 3
    assert await say(workspace, "cat count", "1:b") == "once\n"


async def test_a_key_used_for_something_else_is_refused(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    await say(workspace, "echo one", "1:a")
    with pytest.raises(SandboxFailure) as failure:
        await say(workspace, "echo other", "1:a")
    assert failure.value.reason == "KeyReused"


async def test_read_with_a_key_repeats_the_result_that_the_model_saw(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    await workspace.write("a", b"old", key="1:a")
    assert await workspace.read("a", key="1:b") == b"old"
    await workspace.write("a", b"new", key="1:c")
    assert await workspace.read("a", key="1:b") == b"old"
    assert await workspace.read("a") == b"new"


async def test_an_acknowledged_turn_is_never_run_again(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    await say(workspace, "echo once >> count", "1:a")
    await workspace.acknowledge(2)
    with pytest.raises(SandboxFailure) as failure:
        await say(workspace, "echo once >> count", "1:a")
    assert failure.value.reason == "Forgotten"
    assert await say(workspace, "cat count", "2:a") == "once\n"


async def test_files_are_written_read_listed_and_removed(provider: SandboxProvider) -> None:
    workspace = await acquire(provider, setup=[], files=[])
    data = bytes(range(256)) * 10
    await workspace.write("sub/binary", data, key="1:a", mode="755")
    await workspace.write("text", b"x", key="1:b")
    assert await workspace.read("/workspace/sub/binary") == data
    assert await workspace.read("sub/binary", limit=5) == data[:5]
    assert [(entry.name, entry.type) for entry in await workspace.list(".")] == [("sub", "folder"), ("text", "file")]
    found = await workspace.stat("sub/binary")
    assert found is not None
    assert (found.name, found.type, found.size, found.mode & 0o777) == ("binary", "file", len(data), 0o755)
    await workspace.remove("sub", key="1:c")
    await workspace.remove("sub", key="1:d")
    assert await workspace.stat("sub/binary") is None


async def test_a_wrong_path_is_a_file_error_that_names_it(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    with pytest.raises(FileError, match="missing") as failure:
        await workspace.read("missing")
    assert failure.value.path == "/workspace/missing"
    with pytest.raises(FileError):
        await workspace.list("missing")
    await workspace.write("sub/file", b"", key="1:a")
    with pytest.raises(FileError):
        await workspace.write("sub", b"", key="1:b")
    await workspace.write("sub", b"replaced", key="1:c", replace=True)
    assert await workspace.read("sub") == b"replaced"


async def test_artifacts_move_from_one_workspace_to_another(provider: SandboxProvider) -> None:
    agent = await acquire(provider)
    await agent.write("result/answer", b"42", key="1:a", mode="600")
    await agent.write("skipped/x", b"", key="1:b")
    archive = await joined(agent.tar(".", parts=["result", "missing"]))
    grading = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="grading")
    await grading.untar(".", pieces(archive), key="1:a")
    assert await grading.read("result/answer") == b"42"
    assert await grading.stat("skipped") is None


async def test_an_archive_cannot_leave_its_folder(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    with pytest.raises(FileError):
        await workspace.untar("sub", pieces(buffer.getvalue()), key="1:a")
    assert await workspace.stat("escaped") is None


async def test_snapshot_restores_changed_files(provider: SandboxProvider) -> None:
    one = await acquire(provider, "0-1")
    await one.write("changed", b"by one", key="1:a")
    snapshot = await joined(one.snapshot())
    other = await acquire(provider, "1-1")
    await other.restore(pieces(snapshot), key="1:a")
    assert await other.read("changed") == b"by one"


async def test_members_of_a_group_do_not_see_each_other(provider: SandboxProvider) -> None:
    one, other = await asyncio.gather(acquire(provider, "0-1"), acquire(provider, "1-1"))
    await say(one, "echo mine >> setup.log; echo mine >> only-here", "1:a")
    assert await say(other, "cat setup.log", "1:a") == "prepared\n"
    assert await other.stat("only-here") is None
    later = await acquire(provider, "2-1")
    assert await say(later, "cat setup.log", "1:a") == "prepared\n"


async def test_workspace_of_equal_attempt_and_name_is_the_same(provider: SandboxProvider) -> None:
    first = await acquire(provider)
    await first.write("mark", b"", key="1:a")
    assert await (await acquire(provider)).stat("mark") is not None
    grading = await provider.acquire(spec(), attempt="0-1", fence=FIRST, name="grading")
    assert await grading.stat("mark") is None


async def test_failed_setup_gives_the_reason_frees_its_place_and_is_tried_again(case: Case) -> None:
    provider = case.provider(places=1)
    await provider.open()
    for _ in range(2):
        with pytest.raises(SetupFailed, match=r"exit code 3.*echo no compiler; exit 3(?s:.*)no compiler$"):
            await acquire(provider, setup=["echo no compiler; exit 3"], start_seconds=5)
    assert await say(await acquire(provider), "cat setup.log", "1:a") == "prepared\n"
    await provider.close()


async def test_a_setup_that_never_ends_is_ended(provider: SandboxProvider) -> None:
    with pytest.raises(SetupFailed, match="setupSeconds"):
        await acquire(provider, setup=["sleep 60"], setup_seconds=1)


async def test_a_command_is_ended_at_its_deadline(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    result = await workspace.run("sleep 60", key="1:a", deadline_seconds=0.3)
    assert (result.cause, result.ok) == ("Deadline", False)
    assert await say(workspace, "echo on", "1:b") == "on\n"


async def test_attempt_waits_for_a_place_and_reports_when_none_becomes_free(case: Case) -> None:
    provider = case.provider(places=1)
    await provider.open()
    holder = await acquire(provider, "0-1")
    with pytest.raises(SandboxFailure, match=r"startSeconds") as failure:
        await acquire(provider, "1-1", start_seconds=0.5)
    assert failure.value.reason == "NoPlace"
    waiting = asyncio.create_task(acquire(provider, "2-1"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await holder.release()
    assert await say(await waiting, "cat setup.log", "1:a") == "prepared\n"
    await provider.close()


async def test_places_are_reused_for_more_attempts_than_there_are_places(case: Case) -> None:
    provider = case.provider(places=2)
    await provider.open()

    async def attempt(number: int) -> str:
        workspace = await acquire(provider, f"{number}-1")
        try:
            return await say(workspace, "cat setup.log", "1:a")
        finally:
            await workspace.release()

    assert await asyncio.gather(*map(attempt, range(6))) == ["prepared\n"] * 6
    await provider.close()


async def test_cancelled_acquire_frees_its_place(case: Case) -> None:
    provider = case.provider(places=1)
    await provider.open()
    for delay in (0, 0.005, 0.05):
        task = asyncio.create_task(acquire(provider, f"{delay}-1"))
        await asyncio.sleep(delay)
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(results[0], BaseException):
            await results[0].release()
    await acquire(provider, "last-1", start_seconds=10)
    await provider.close()


async def test_releasing_a_workspace_twice_is_allowed(case: Case, provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    await workspace.release()
    await workspace.release()
    with pytest.raises(SandboxFailure):
        await say(workspace, "echo on", "1:a")
    with pytest.raises(SandboxFailure):
        await provider.reattach(workspace.handle, spec=spec(), fence=Fence(2, "second"))


async def test_newer_runner_takes_over_and_the_older_one_can_change_nothing(
    case: Case, provider: SandboxProvider
) -> None:
    older = await acquire(provider)
    await older.write("kept", b"", key="1:a")
    other = case.provider()
    await other.open()
    newer = await other.reattach(older.handle, spec=spec(), fence=Fence(2, "second"))
    assert await newer.stat("kept") is not None
    with pytest.raises(Fenced):
        await say(older, "echo mine >> kept", "2:a")
    with pytest.raises(Fenced):
        await older.write("kept", b"mine", key="2:b")
    with pytest.raises(Fenced):
        await older.release()
    for fence in (Fence(1, "first"), Fence(2, "third")):
        with pytest.raises(Fenced):
            await other.reattach(older.handle, spec=spec(), fence=fence)
    assert await newer.read("kept") == b""
    await newer.release()
    await other.close(keep=True)


async def test_a_kept_sandbox_serves_the_next_process_with_the_same_keys(case: Case) -> None:
    first = case.provider()
    await first.open()
    workspace = await acquire(first)
    assert await say(workspace, "echo once >> count; cat count", "1:a") == "once\n"
    handle = workspace.handle
    await first.close(keep=True)
    second = case.provider()
    await second.open()
    again = await second.reattach(handle, spec=spec(), fence=Fence(2, "second"))
    assert await say(again, "echo once >> count; cat count", "1:a") == "once\n"
    await again.release()
    assert await say(await acquire(second, "1-1"), "cat setup.log", "1:a") == "prepared\n"
    await second.close()


async def test_closed_provider_has_nothing_to_reattach(case: Case) -> None:
    first = case.provider()
    await first.open()
    handle = (await acquire(first)).handle
    await first.close()
    second = case.provider()
    await second.open()
    with pytest.raises(SandboxFailure):
        await second.reattach(handle, spec=spec(), fence=Fence(2, "second"))
    await second.close()


async def test_members_continue_when_their_group_is_forgotten(provider: SandboxProvider) -> None:
    straggler = await acquire(provider)
    await provider.forget_group("task-1")
    assert await say(straggler, "cat setup.log", "1:a") == "prepared\n"
    await straggler.release()
    assert await say(await acquire(provider, "1-1"), "cat setup.log", "1:a") == "prepared\n"


async def test_each_phase_and_the_end_of_all_processes_can_be_requested_again(provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    for _ in range(2):
        await workspace.enter("agent", key="1:a")
        await workspace.kill_all(key="1:b")
    assert await say(workspace, "echo on", "1:c") == "on\n"


async def test_description_names_the_provider_and_the_actual_mode(case: Case, provider: SandboxProvider) -> None:
    workspace = await acquire(provider)
    assert workspace.description["provider"] == provider.name
    assert workspace.description["mode"] == {"dummy": "Overlay"}.get(case.kind, case.kind)
    assert workspace.description["imageUsed"] is False
    assert provider.warnings


async def test_kept_state_is_continued_when_its_runner_died(case: Case) -> None:
    """Otherwise all turns before a checkpoint would be lost if the kill comes before the agent's new workspace is
    recorded.
    """
    if case.kind == "Plain":
        return  # it freezes nothing: snapshots are what it keeps
    first = case.provider()
    await first.open()
    workspace = await acquire(first)
    assert await say(workspace, "echo once >> count; cat count", "1:a") == "once\n"
    await workspace.freeze()
    await first.close(keep=True)
    second = case.provider()
    await second.open()
    again = await second.reattach(workspace.handle, spec=spec(), fence=Fence(2, "second"))
    assert await say(again, "echo once >> count; cat count", "1:a") == "once\n", "the turn that is replayed"
    await again.freeze()
    following = await again.fork("agent.1")
    assert await say(following, "cat count", "2:a") == "once\n"
    await second.close()


@pytest.mark.parametrize("interrupted", [False, True])
async def test_releasing_a_workspace_destroys_every_state_of_its_attempt(case: Case, interrupted: bool) -> None:
    """A remaining frozen state would use disk of a sandbox that others share."""
    if case.kind == "Plain":
        return  # it freezes nothing
    provider = case.provider()
    await provider.open()
    sister = await acquire(provider, "1-1")
    first = await acquire(provider)
    await first.freeze()
    second = await first.fork("agent.1")
    await second.freeze()
    last = await second.fork("agent.2", of=str(second.handle["workspace"]))
    handle = last.handle
    if interrupted:  # the next process knows only the last one
        await provider.close(keep=True)
        provider = case.provider()
        await provider.open()
        await provider.reattach(sister.handle, spec=spec(), fence=Fence(2, "second"))
        last = await provider.reattach(handle, spec=spec(), fence=Fence(2, "second"))
    await last.release()
    found = list[str]()

    def note(attempt: str, name: str) -> bool:
        found.append(f"{attempt}.{name}")
        return False

    await provider.sweep(note)
    await provider.close()
    assert found == ["1-1.agent"]
