"""`sandbox.storeSetup`: files and setup of a task become a layer once, and later workspaces start from it."""

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.builds.build import Builder, BuildOptions
from agent_runtime.builds.cache import BuildCache
from agent_runtime.builds.provider import BuildingProvider
from agent_runtime.recording.build_steps import BuildEntry, key_of_entry, stored_steps
from agent_runtime.recording.layers import Layers
from agent_runtime.recording.store import Store
from agent_runtime.sandboxes.base import SANDBOX_MEMORY, Fence, SandboxFailure, SetupFailed, Workspace, WorkspaceSpec
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.files import ContextFile, Dockerfile, TaskFile
from rollout_api.sandbox import Resources
from tests.integration.sandboxes.conftest import spec, template
from tests.support.dockerfile_trees import DESCRIBE

THIS_MACHINE = "agent-rollouts-quickstart"
UNIQUE = "cat /proc/sys/kernel/random/uuid > made"
"""A command whose result is different each time."""


@dataclass
class Job:
    """One job's view of an output: its workspaces, and the steps that it made or found."""

    provider: BuildingProvider
    local: LocalProvider
    steps: list[tuple[BuildEntry, bool]] = field(default_factory=list)
    """Each step, and whether it was stored before."""
    count: int = 0

    @property
    def made(self) -> list[str]:
        return [entry.step for entry, was_stored in self.steps if not was_stored]

    async def workspace(self, wanted: WorkspaceSpec) -> Workspace:
        self.count += 1
        fence = Fence(1, "test")
        return await self.provider.acquire(wanted, attempt=f"{self.count}-0", fence=fence, name="agent")

    async def say(self, wanted: WorkspaceSpec, command: str) -> str:
        """Return what a command prints in a new workspace."""
        workspace = await self.workspace(wanted)
        done = await workspace.run(command, key="1:say", deadline_seconds=60)
        assert done.ok, done
        return done.stdout.decode()


class Output:
    """One output with its jobs, each of which has sandboxes of its own, as on another node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store.open(str(folder / "out"), {})
        self.count = 0

    @asynccontextmanager
    async def job(self, mode: str = "Overlay") -> AsyncIterator[Job]:
        self.count += 1
        local = LocalProvider(self.folder / f"run{self.count}", template(mode), places=8)
        job = self.building(local, self.count)
        await job.provider.open()
        try:
            yield job
        finally:
            await job.provider.close()

    def building(self, local: LocalProvider, run: int) -> Job:
        """Return the job of a run in these sandboxes that remembers nothing, as after a restart."""
        steps: list[tuple[BuildEntry, bool]] = []
        options = BuildOptions(
            bases={"base": THIS_MACHINE},
            arguments={},
            secrets={},
            on_step=lambda entry, was_stored: steps.append((entry, was_stored)),
        )
        folder = self.store.below(f"run{run}")
        cache = BuildCache(self.store, folder, Layers(self.store, folder))
        return Job(BuildingProvider(local, Builder(local, cache, options)), local, steps)

    async def entries(self) -> list[BuildEntry]:
        return [step.entry for step in await stored_steps(self.store)]


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path)


def storing(*setup: str, **changes: Any) -> WorkspaceSpec:
    return spec(**{"setup": list(setup), "stores_setup": True, **changes})


async def test_second_job_starts_from_the_layer_without_running_the_setup(output: Output) -> None:
    async with output.job() as first:
        made = await first.say(storing(UNIQUE), "cat made given.txt")
        assert first.made == [f"setup: 1 files; {UNIQUE}"]
    async with output.job() as second:
        assert await second.say(storing(UNIQUE), "cat made given.txt") == made
        assert (second.made, len(second.steps)) == ([], 1)
    assert len(made) > 36


async def test_setup_of_a_task_that_is_tried_again_alone_has_a_sandbox_of_its_own(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the same neighbours could use up the memory of each attempt's setup."""
    async with output.job() as job:
        acquire, hosted = job.local.acquire, []

        async def crowded(wanted: WorkspaceSpec, **how: Any) -> Workspace:
            hosted.append((how["name"], wanted.alone))
            if how["name"] == "setup" and not wanted.alone:
                raise SandboxFailure(SANDBOX_MEMORY, "the neighbours use it up")
            return await acquire(wanted, **how)

        monkeypatch.setattr(job.local, "acquire", crowded)
        with pytest.raises(SandboxFailure, match="the neighbours use it up"):
            await job.say(storing(UNIQUE), "cat made")
        assert len(await job.say(storing(UNIQUE, alone=True), "cat made")) > 36
        assert hosted[-2:] == [("setup", True), ("agent", True)]


async def test_groups_that_differ_only_in_their_prompt_share_a_setup(output: Output) -> None:
    async with output.job() as job:
        groups = [storing(UNIQUE, group=f"g{number}") for number in range(4)]
        found = await asyncio.gather(*(job.say(group, "cat made") for group in groups))
        assert len(set(found)) == 1
        assert len(job.made) == 1
        await job.say(storing(UNIQUE, group="g9", env={"A": "1"}), "true")
        assert len(job.made) == 2


GNARLED = [
    "mkdir -p tree/deep empty /srv/own && umask 027 && echo x > tree/deep/private && chmod 4711 tree/deep/private",
    "ln -s tree/deep linked && ln tree/deep/private again && ln -s /nowhere broken && mkfifo pipe",
    "printf 'a\\nb' > 'odd name' && echo hidden > .wh.named && touch -d 2001-02-03T04:05:06.789 tree/deep/private tree",
    "rm given.txt && mkdir given.txt && echo f > given.txt/f",
    "echo temporary > /tmp/kept && echo own > /srv/own/file && chmod 700 /srv/own",
]
"""Commands that leave files of all kinds."""
OF_ROOT = ["rm -r /etc/skel && mkdir /etc/skel && echo n > /etc/skel/n", "chown 7:8 tree/deep && chown -h 9 linked"]
"""Commands that change other users' files, and owners."""
LOOK = f"""
for folder in /workspace /srv /etc/skel; do python3 -c '{DESCRIBE}' $folder; done
cat /tmp/kept; find /workspace -printf '%p %T@\\n' | grep -e deep/ -e 'tree ' | sort
"""


async def test_workspace_has_the_same_files_with_and_without_the_layer(output: Output) -> None:
    setup = [*GNARLED, *(OF_ROOT if os.geteuid() == 0 else ())]
    async with output.job() as job:
        plain = await job.say(storing(*setup, stores_setup=False), LOOK)
        assert await output.entries() == []
        assert await job.say(storing(*setup, group="stored"), LOOK) == plain
    async with output.job() as second:
        assert await second.say(storing(*setup), LOOK) == plain
        assert second.made == []
    assert plain.count("deep/private") >= 2


async def test_setup_over_a_dockerfile_is_made_again_when_that_changes(output: Output) -> None:
    def built(text: str) -> WorkspaceSpec:
        dockerfile = Dockerfile(
            text=f"FROM base\nRUN {text}\nCOPY own /own\n", context=[ContextFile(path="own", content="o")]
        )
        return storing(UNIQUE, "cat /below >> made", dockerfile=dockerfile)

    async with output.job() as first:
        made = await first.say(built("echo one > /below"), "cat made /own")
        assert [text.split()[0] for text in first.made] == ["RUN", "COPY", "setup:"]
        assert "one" in made
    async with output.job() as second:
        assert await second.say(built("echo one > /below"), "cat made /own") == made
        assert second.made == []
        assert "two" in await second.say(built("echo two > /below"), "cat made")
        assert [text.split()[0] for text in second.made] == ["RUN", "COPY", "setup:"]


async def test_damaged_layer_is_made_again_for_the_workspace_that_needs_it(output: Output) -> None:
    async with output.job() as first:
        made = await first.say(storing(UNIQUE), "cat made")
    (layer,) = (output.folder / "out/layers").glob("*.zst")
    layer.write_bytes(layer.read_bytes()[:-5])
    async with output.job() as second:
        assert await second.say(storing(UNIQUE), "cat made") != made
        assert len(second.made) == 1


async def test_missing_layer_is_made_again(output: Output) -> None:
    async with output.job() as first:
        await first.say(storing(UNIQUE), "cat made")
        (layer,) = (output.folder / "out/layers").glob("*.zst")
        layer.unlink()
        # The workspaces of a group share what it found, and the layer is not restored again.
        assert await first.say(storing(UNIQUE, group="other"), "cat made")
        assert len(first.made) == 2


async def test_builders_that_race_all_succeed(output: Output) -> None:
    wanted = storing("sleep 0.5", UNIQUE, "cat made >> twice; cat made >> twice")
    async with output.job() as one, output.job() as other:
        found = await asyncio.gather(*(job.say(wanted, "sort -u made twice | wc -l") for job in (one, other)))
        assert [text.strip() for text in found] == ["1", "1"]
        assert len(one.made) == len(other.made) == 1
    assert len(await output.entries()) == 1
    async with output.job() as third:
        assert (await third.say(wanted, "sort -u made twice | wc -l")).strip() == "1"
        assert third.made == []


RANDOM = "cat /proc/sys/kernel/random/uuid > /key"
CHAINS: dict[str, WorkspaceSpec] = {
    "steps": spec(dockerfile=Dockerfile(text=f"FROM base\nRUN sleep 0.5; {RANDOM}\nRUN true\nRUN cp /key /seen\n")),
    "stages": spec(
        dockerfile=Dockerfile(
            text=f"FROM base AS one\nRUN sleep 0.5; {RANDOM}\n"
            "FROM base\nCOPY --from=one /key /key\nCOPY --from=one /key /seen\n"
        )
    ),
    "bind mounts": spec(
        dockerfile=Dockerfile(
            text=f"FROM base AS one\nRUN sleep 0.5; {RANDOM}\nFROM base\n"
            "COPY --from=one /key /key\nRUN --mount=type=bind,from=one,source=/key,target=/of-one cp /of-one /seen\n"
        )
    ),
    "a setup": storing("cp /key /seen", dockerfile=Dockerfile(text=f"FROM base\nRUN sleep 0.5; {RANDOM}\n")),
}
"""Each makes the same two files, if what it makes last was made over what it makes first."""
SAME_KEYS = "cmp /key /seen && cat /key"


@pytest.mark.parametrize("chain", CHAINS)
async def test_layer_is_used_only_over_those_over_which_it_was_made(output: Output, chain: str) -> None:
    wanted = CHAINS[chain]
    async with output.job() as one, output.job() as other:
        # Two runners of one run build at the same time, each in its own sandbox.
        other = output.building(other.local, 1)
        await asyncio.gather(one.say(wanted, SAME_KEYS), other.say(wanted, SAME_KEYS))
    for _ in range(2):
        async with output.job() as later:
            await later.say(wanted, SAME_KEYS)
        # The lowest step alone is forgotten, as by `rolloutctl layers gc`.
        (lowest,) = [step.key for step in await stored_steps(output.store) if RANDOM in step.entry.step]
        await output.store.delete([key_of_entry(lowest)])
    async with output.job() as last:
        made = await last.say(wanted, SAME_KEYS)
    async with output.job() as again:
        assert await again.say(wanted, SAME_KEYS) == made
        assert again.made == []


async def test_run_keeps_the_layer_with_which_it_began(output: Output) -> None:
    """Otherwise a resumed run would grade in other files than those in which the agent worked."""
    async with output.job() as job:
        made = await job.say(storing(UNIQUE), "cat made")
        for entry in (output.folder / "out/builds").iterdir():
            entry.unlink()
        async with output.job() as other:
            assert await other.say(storing(UNIQUE), "cat made") != made
        restarted = output.building(job.local, 1)
        assert await restarted.say(storing(UNIQUE, group="later"), "cat made") == made
        assert restarted.made == []


async def test_tasks_that_differ_in_limits_share_a_setup_but_not_its_failure(output: Output) -> None:
    async with output.job() as job:
        slow = [storing("sleep 2", UNIQUE, group=f"{seconds}", setup_seconds=seconds) for seconds in (1, 30, 31)]
        failed, *found = await asyncio.gather(*(job.say(wanted, "cat made") for wanted in slow), return_exceptions=True)
        assert isinstance(failed, SetupFailed)
        assert found[0] == found[1]
        assert len(job.made) == 1


async def test_failed_setup_names_the_command_and_stores_nothing(output: Output) -> None:
    async with output.job() as job:
        with pytest.raises(SetupFailed) as failed:
            await job.workspace(storing("true", "echo why >&2; exit 7"))
        assert "setup command 2 of 2 ended with exit code 7, expected 0: 'echo why >&2; exit 7'\nwhy" in str(
            failed.value
        )
        with pytest.raises(
            SetupFailed, match="setup command 1 of 1 was still running after 1 s; make it faster, or raise"
        ):
            await job.workspace(storing("sleep 60", setup_seconds=1))
        assert await output.entries() == []
        # A failure is not remembered.
        assert await job.say(storing("sleep 1.5", setup_seconds=30), "true") == ""


async def test_setup_is_made_under_the_limits_of_the_task(output: Output) -> None:
    async with output.job() as job:
        filling = storing("head -c 64M /dev/zero > big", resources=Resources(disk="8Mi"))
        with pytest.raises(SetupFailed):
            await job.workspace(filling)
        # What setup wrote does not count for the workspaces that start from it, as without the layer.
        large = storing("head -c 64M /dev/zero > big", resources=Resources(disk="128Mi"))
        assert "67108864" in await job.say(large, "head -c 96M /dev/zero > own; cat big | wc -c")


async def test_programs_that_setup_left_running_are_in_no_workspace(output: Output) -> None:
    command = "(setsid sleep 4321 >/dev/null 2>&1 &) ; echo done > made"
    look = "cat made; cat /proc/[0-9]*/comm | grep -c '^sleep$' || true"
    async with output.job() as job:
        for stores in (True, False):
            assert await job.say(storing(command, group=f"{stores}", stores_setup=stores), look) == "done\n0\n"


async def test_plain_workspaces_refuse_to_store_a_setup(output: Output) -> None:
    async with output.job("Plain") as job:
        with pytest.raises(
            SandboxFailure, match=r"sandbox\.storeSetup .* Plain.*leave out sandbox\.storeSetup"
        ) as refused:
            await job.workspace(storing(UNIQUE))
        assert refused.value.reason == "StoreSetupUnsupported"


async def test_tasks_without_files_and_setup_store_nothing(output: Output) -> None:
    async with output.job() as job:
        assert await job.say(storing(files=[]), "pwd") == "/workspace\n"
        assert job.steps == []


async def test_grading_and_agent_workspaces_use_one_layer(output: Output) -> None:
    async with output.job() as job:
        wanted = storing(UNIQUE, files=[TaskFile(path="secret", content="s", mode="600")])
        agent = await job.workspace(wanted)
        await agent.run("echo changed > made", key="1:a", deadline_seconds=30)
        grading = await job.provider.acquire(wanted, attempt="1-0", fence=Fence(1, "test"), name="grading")
        shown = await grading.run("cat made; stat -c %a secret", key="1:a", deadline_seconds=30)
        assert shown.stdout.decode().endswith("600\n")
        assert b"changed" not in shown.stdout
        assert len(job.made) == 1


async def test_reattached_workspace_makes_no_setup(output: Output) -> None:
    async with output.job() as job:
        workspace = await job.workspace(storing(UNIQUE))
        made = await workspace.read("made")
        for entry in (output.folder / "out/builds").iterdir():
            entry.unlink()
        restarted = output.building(job.local, 1)
        again = await restarted.provider.reattach(workspace.handle, spec=storing(UNIQUE), fence=Fence(2, "next"))
        assert await again.read("made") == made
        assert restarted.steps == []


async def test_setup_goes_on_for_others_when_a_rollout_is_cancelled(output: Output) -> None:
    wanted = storing("echo run >> runs; sleep 1; " + UNIQUE)
    async with output.job() as job:
        cancelled = asyncio.create_task(job.workspace(wanted))
        await asyncio.sleep(0.5)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert await job.say(dataclasses.replace(wanted, group="other"), "cat runs") == "run\n"
        assert len(job.made) == 1
