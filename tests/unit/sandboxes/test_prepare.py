"""Preparing a group: once for all members; a failure is reported to all and not remembered."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.sandboxes.base import CommandResult, SandboxFailure, SetupFailed, WorkspaceSpec
from agent_runtime.sandboxes.prepare import LAST_CHARACTERS, PreparedGroups, prepared_id
from rollout_api.files import TaskFile
from rollout_api.sandbox import Resources
from tests.support.dummy_sandboxes import DummyProvider, Files, ended

pytestmark = pytest.mark.usefixtures("virtual_clock")

SPEC = WorkspaceSpec(
    group="task-1",
    working_dir="/workspace",
    files=[TaskFile(path="a.txt", content="a")],
    setup=["make"],
    setup_seconds=5,
    start_seconds=5,
    network={"setup": "Public"},
)


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, group="task-2"),
        replace(SPEC, working_dir="/elsewhere"),
        replace(SPEC, image="other"),
        replace(SPEC, user="someone"),
        replace(SPEC, env={"A": "1"}),
        replace(SPEC, resources=Resources(memory="1Gi")),
        replace(SPEC, files=[TaskFile(path="a.txt", content="b")]),
        replace(SPEC, files=[TaskFile(path="a.txt", content="a", mode="755")]),
        replace(SPEC, setup=["make", "make test"]),
        replace(SPEC, network={"setup": "None"}),
    ],
)
def test_no_attempt_gets_the_prepared_state_of_another_task(other: WorkspaceSpec) -> None:
    assert prepared_id(other) != prepared_id(SPEC)


def test_network_settings_do_not_change_the_prepared_state() -> None:
    assert prepared_id(replace(SPEC, network={"setup": "Public", "agent": "Public"})) == prepared_id(SPEC)


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_commands_that_are_equal_only_when_joined_are_distinguished(one: list[str], other: list[str]) -> None:
    same = prepared_id(replace(SPEC, setup=one)) == prepared_id(replace(SPEC, setup=other))
    assert same == (one == other)


class Preparations:
    """Counts what PreparedGroups creates and drops. `release` ends a preparation, with `failure` if it is set."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.dropped: list[str] = []
        self.release = asyncio.Event()
        self.failure: Exception | None = None
        self.groups = PreparedGroups(self._make, self._drop)

    async def _make(self, name: str, _spec: WorkspaceSpec) -> None:
        self.made.append(name)
        await self.release.wait()
        if self.failure is not None:
            raise self.failure

    async def _drop(self, name: str) -> None:
        self.dropped.append(name)


async def test_members_that_start_together_share_one_setup() -> None:
    work = Preparations()
    members = [asyncio.create_task(work.groups.fork_of(SPEC)) for _ in range(50)]
    await asyncio.sleep(0)
    work.release.set()
    assert set(await asyncio.gather(*members)) == {prepared_id(SPEC)}
    assert len(work.made) == 1


async def test_failed_setup_is_reported_to_all_and_retried_for_the_next() -> None:
    work = Preparations()
    work.failure = SetupFailed("no compiler")
    members = [asyncio.create_task(work.groups.fork_of(SPEC)) for _ in range(3)]
    await asyncio.sleep(0)
    work.release.set()
    results = await asyncio.gather(*members, return_exceptions=True)
    assert [str(result) for result in results] == ["SetupFailed: no compiler"] * 3
    work.failure = None
    await work.groups.fork_of(SPEC)
    assert len(work.made) == 2


async def test_cancelled_member_does_not_cancel_the_setup_of_the_others() -> None:
    work = Preparations()
    impatient = asyncio.create_task(work.groups.fork_of(SPEC))
    patient = asyncio.create_task(work.groups.fork_of(SPEC))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    work.release.set()
    assert await patient == prepared_id(SPEC)
    assert impatient.cancelled()
    assert len(work.made) == 1


async def test_unused_state_is_deleted_with_its_last_fork() -> None:
    work = Preparations()
    work.release.set()
    name = await work.groups.fork_of(SPEC)
    await work.groups.fork_of(SPEC)
    await work.groups.forget(SPEC.group)
    await work.groups.fork_ended(name)
    assert work.dropped == []
    await work.groups.fork_ended(name)
    assert work.dropped == [name]


async def test_a_state_that_is_not_forgotten_waits_for_later_attempts() -> None:
    work = Preparations()
    work.release.set()
    name = await work.groups.fork_of(SPEC)
    await work.groups.fork_ended(name)
    await work.groups.fork_of(SPEC)
    assert work.dropped == []
    assert len(work.made) == 1


async def prepared_by(result: CommandResult, spec: WorkspaceSpec = SPEC) -> None:
    async def command(_command: str | Sequence[str], _files: Files) -> CommandResult:
        return result

    provider = DummyProvider(f"prepare-{id(result)}", command)
    groups = PreparedGroups(provider._prepare, provider._drop)
    await groups.fork_of(spec)


async def test_failed_setup_is_reported_with_its_command_code_and_last_lines() -> None:
    output = "\n".join(f"line {number}" for number in range(100)).encode()
    with pytest.raises(SetupFailed) as failure:
        await prepared_by(ended(7, stdout=output, stderr=b"\nfatal: no rule"))
    message = failure.value.message
    assert "setup command 1 of 1 ended with exit code 7, expected 0: 'make'" in message
    assert message.endswith("line 99\nfatal: no rule")
    assert "line 10\n" not in message


async def test_a_setup_that_prints_one_endless_line_still_gives_a_readable_message() -> None:
    with pytest.raises(SetupFailed) as failure:
        await prepared_by(ended(1, stdout=b"x" * 1_000_000))
    assert len(failure.value.message) < LAST_CHARACTERS + 200


async def test_a_setup_over_its_time_names_the_field_to_raise() -> None:
    with pytest.raises(SetupFailed, match=r"still running after 5 s.*timeouts\.setupSeconds"):
        await prepared_by(CommandResult(None, 9, "Deadline", 5.0, b"", b"", 0, 0))


async def test_setup_commands_have_the_time_together_without_pauses() -> None:
    given: list[float] = []

    async def command(_command: str | Sequence[str], _files: Files) -> CommandResult:
        await asyncio.sleep(0.3)  # a pause: other workspaces have the sandbox's memory
        given.append(0)
        return replace(ended(), seconds=0.1)

    provider = DummyProvider("paused-setup", command)
    groups = PreparedGroups(provider._prepare, provider._drop)
    await groups.fork_of(replace(SPEC, setup=["one", "two"], setup_seconds=0.5))
    assert len(given) == 2
    with pytest.raises(SetupFailed, match=r"the 9 setup commands took more than 0.5 s in all.*timeouts\.setupSeconds"):
        await groups.fork_of(replace(SPEC, setup=["one"] * 9, setup_seconds=0.5))


async def test_sandbox_lost_in_the_setup_is_no_failure_of_the_task() -> None:
    async def on_call(operation: str, _attempt: str, _key: str | None) -> None:
        if operation == "run":
            raise SandboxFailure("SandboxLost", "gone")

    provider = DummyProvider("lost-in-setup", on_call=on_call)
    groups = PreparedGroups(provider._prepare, provider._drop)
    with pytest.raises(SandboxFailure) as failure:
        await groups.fork_of(SPEC)
    assert failure.value.reason == "SandboxLost"
