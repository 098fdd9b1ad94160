"""Decisions about data that was read: process trees, users, limits, configuration."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.host import Limits
from agent_runtime.executor.init.identity import Refused, resolve
from agent_runtime.executor.init.processes import Process, descendants, parse_stat
from agent_runtime.executor.init.trees import disk_use, open_folder, remove_entry
from agent_runtime.executor.overlay.base_layers import identity_map
from agent_runtime.executor.overlay.config import Bind, HostConfig
from agent_runtime.executor.overlay.usage import (
    MAX_DESCRIPTORS,
    MAX_PROCESSES,
    Usage,
    excess,
    fair_nice,
    sandbox_disk_excess,
)

PASSWD = b"root:x:0:0:root:/root:/bin/sh\nada:x:1000:1001:Ada:/home/ada:/bin/bash\nbroken\n:x:5:5:::\nodd:x:abc:1::/:\n"
GROUP = b"root:x:0:\nwheel:x:10:ada,bob\nada:x:1001:\ndocker:x:999:bob,ada\nbad:x:abc:ada\n"


@given(st.integers(1, 2**22), st.integers(0, 2**22), st.binary(max_size=15).filter(lambda name: b"\n" not in name))
def test_a_commands_name_cannot_forge_its_parent(pid: int, parent: int, name: bytes) -> None:
    line = b"%d (%s) S %d 1 1 0 -1 4194560 9 0 0 0 5 6 7 8 39 19 3 0 12345 67" % (pid, name, parent)
    assert parse_stat(line) == Process(pid, parent, "S", nice=19, threads=3, group=1)


# kernel/sched/core.c: sched_prio_to_weight, from nice 0 on.
_WEIGHTS = (1024, 820, 655, 526, 423, 335, 272, 215, 172, 137, 110, 87, 70, 56, 45, 36, 29, 23, 18, 15)


@given(st.integers(0, 10_000), st.integers(1, 256), st.integers(0, 19))
def test_threads_of_a_workspace_have_the_weight_of_at_most_two_per_processor(
    runnable: int, processors: int, ordinary: int
) -> None:
    nice = fair_nice(runnable, processors, ordinary)
    share = 2 * processors * _WEIGHTS[ordinary]
    assert ordinary <= nice <= 19
    # The kernel rounds weights to whole numbers, by up to 5 %.
    assert nice == 19 or runnable * _WEIGHTS[nice] <= share * 1.05
    assert nice == ordinary or runnable * _WEIGHTS[nice - 1] >= share * 0.95


@given(st.integers(1, 256), st.integers(0, 19))
def test_a_build_with_two_jobs_a_processor_keeps_its_priority(processors: int, ordinary: int) -> None:
    assert fair_nice(2 * processors, processors, ordinary) == ordinary


@given(st.lists(st.integers(0, 30), min_size=30, max_size=30), st.integers(1, 30))
def test_process_tree_contains_all_descendants(parents: list[int], ancestor: int) -> None:
    processes = [Process(pid, parent, "S") for pid, parent in enumerate(parents, start=1) if parent != pid]
    parent_of = {process.pid: process.parent for process in processes}

    def leads_there(pid: int) -> bool:
        for _ in range(31):
            pid = parent_of.get(pid, 0)
            if pid == ancestor:
                return True
        return False

    found = [process.pid for process in descendants(processes, ancestor)]
    assert set(found) - {ancestor} == {pid for pid in parent_of if leads_there(pid)} - {ancestor}
    assert len(found) == len(set(found))


def test_users_are_found_by_name_uid_and_pair() -> None:
    ada = resolve("ada", PASSWD, GROUP)
    assert (ada.uid, ada.gid, ada.groups, ada.name, ada.home) == (1000, 1001, (1001, 10, 999), "ada", "/home/ada")
    assert resolve("1000", PASSWD, GROUP) == ada
    assert resolve("ada:wheel", PASSWD, GROUP).gid == 10
    stranger = resolve("4242", PASSWD, GROUP)
    assert (stranger.uid, stranger.gid, stranger.groups, stranger.home) == (4242, 4242, (4242,), "/")
    assert resolve("0", b"", b"").gid == 0


def test_a_pod_that_runs_as_a_bare_number_may_run_commands_as_that_number() -> None:
    # Its container runtime gave it group 0, and no right to leave it.
    assert resolve("4242", PASSWD, GROUP, own=(4242, 0)).gid == 0
    assert resolve("4242", PASSWD, GROUP, own=(1000, 0)).gid == 4242
    assert resolve("4242", PASSWD, GROUP, own=(0, 0)).gid == 4242
    assert resolve("4242:5", PASSWD, GROUP, own=(4242, 0)).gid == 5


@pytest.mark.parametrize("user", ["nobody-here", "odd", "ada:nothing", "4294967295", "-1", "ada:", "٣"])
def test_unknown_users_are_refused_by_name(user: str) -> None:
    if user == "ada:":
        assert resolve(user, PASSWD, GROUP).gid == 1001
        return
    with pytest.raises(Refused, match="give a name in it"):
        resolve(user, PASSWD, GROUP)


@given(st.text(max_size=12), st.binary(max_size=200), st.binary(max_size=200))
def test_any_user_list_gives_an_identity_or_a_refusal(user: str, passwd: bytes, group: bytes) -> None:
    try:
        identity = resolve(user, passwd, group)
    except Refused:
        return
    assert 0 <= identity.uid < 2**32 - 1
    assert 0 <= identity.gid < 2**32 - 1
    assert identity.groups[0] == identity.gid


def test_each_limit_has_its_own_cause() -> None:
    limits = Limits(memory_bytes=100, processes=10, disk_bytes=1000)
    assert excess(Usage(100, 10, 1000), limits, 0) is None
    assert excess(Usage(101, 11, 1001), limits, 0) == "Memory"
    assert excess(Usage(100, 11, 1001), limits, 0) == "Processes"
    assert excess(Usage(0, 0, 1001), limits, 0) == "Disk"
    assert excess(Usage(10**12, MAX_PROCESSES, 10**12, MAX_DESCRIPTORS), Limits(), 0) is None


@pytest.mark.parametrize(("used", "most", "free"), [(1001, None, 1000), (1001, 5000, 1000), (1001, 1000, 5000)])
def test_workspace_that_leaves_free_may_use_no_more_disk_than_is_left(used: int, most: int | None, free: int) -> None:
    limits = Limits(disk_bytes=most, leaves_free=True)
    assert excess(Usage(disk_bytes=used), limits, free) == "Disk"
    assert excess(Usage(disk_bytes=1000), limits, free) is None


def test_default_limits_apply_to_processes_threads_and_descriptors() -> None:
    assert excess(Usage(processes=MAX_PROCESSES + 1), Limits(), 0) == "Processes"
    assert excess(Usage(descriptors=MAX_DESCRIPTORS + 1), Limits(), 0) == "Processes"


usages = st.dictionaries(
    st.sampled_from("abcdef"), st.builds(Usage, st.integers(0, 100), st.just(1), st.integers(0, 100))
)


@given(usages, st.sets(st.sampled_from("abcdef")), st.integers(1, 400))
def test_largest_running_workspace_is_stopped_for_the_sandboxs_disk(
    known: dict[str, Usage], active: set[str], disk: int
) -> None:
    chosen = sandbox_disk_excess(known, active, disk)
    running = active & set(known)
    is_over = sum(usage.disk_bytes for usage in known.values()) > 0.9 * disk
    assert (chosen is None) == (not running or not is_over)
    if chosen is not None:
        assert known[chosen].disk_bytes == max(known[other].disk_bytes for other in running)


def test_nested_namespace_gets_all_available_ids() -> None:
    assert identity_map("         0     100000      65536\n") == "0 0 65536\n"
    assert identity_map("0 1000 1\n1 100000 65536\n") == "0 0 1\n1 1 65536\n"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "overlay"}, "mode is 'overlay'"),
        ({"places": 0}, "places is 0"),
        ({"masks": ("root",)}, "masks is 'root'"),
        ({"binds": (Bind("/a", "/b/../c"),)}, "binds.target is '/b/../c'"),
        ({"root": "relative"}, "root is 'relative'"),
        ({"root_layers": ("relative",), "mode": "Overlay"}, "rootLayers is 'relative'"),
        ({"root_layers": ("/l",)}, "rootLayers are only supported in Overlay"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HostConfig("/state", **options)  # type: ignore[arg-type]


def test_removing_a_tree_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").touch()
    (tmp_path / "tree/inner/deeper").mkdir(parents=True)
    (tmp_path / "tree/inner/link").symlink_to(tmp_path / "outside")
    (tmp_path / "tree/inner").chmod(0o000)
    parent = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="link"):
        open_folder(parent, "tree/inner/link")
    remove_entry(parent, "tree", missing_ok=False)
    os.close(parent)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "outside"]


def test_disk_use_over_the_limit_is_reported_before_the_count_is_complete(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"x" * 100_000)
    assert disk_use(str(tmp_path)).bytes >= 2_000_000
    assert 500_000 < disk_use(str(tmp_path), enough=500_000).bytes < 700_000, "a policy could make its count slow"


def test_disk_use_counts_the_rest_of_a_tree_when_a_folder_is_moved_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for top in ("a", "b", "c"):
        (tmp_path / "tree" / top / "inner").mkdir(parents=True)
        (tmp_path / "tree" / top / "inner" / "hog").write_bytes(b"x" * 1_000_000)
    scandir, moved = os.scandir, list[Path]()

    def scandir_after_move(folder: int) -> Any:
        name = os.readlink(f"/proc/self/fd/{folder}")
        if name.endswith("/inner"):
            outside = tmp_path / f"outside-{len(moved)}"
            os.rename(name, outside)
            moved.append(outside)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scandir_after_move)
    assert disk_use(str(tmp_path / "tree")).bytes >= 3_000_000, "a policy could use more than its limit"
    assert len(moved) == 3


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_disk_use_is_evaded_only_by_names_that_never_stay(tmp_path: Path, kind: str) -> None:
    content = tmp_path / "tree" / "0"
    if kind == "folder":
        content.mkdir(parents=True)
        content = content / "hog"
    content.parent.mkdir(exist_ok=True)
    content.write_bytes(b"x" * 1_000_000)
    renames = "import itertools, os\nfor n in itertools.count(): os.rename(str(n), str(n + 1))"
    with subprocess.Popen([sys.executable, "-S", "-c", renames], cwd=tmp_path / "tree") as renamer:
        try:
            for _ in range(200):
                counted = disk_use(str(tmp_path / "tree"))
                assert counted.bytes >= 1_000_000 or counted.is_evaded, "a policy could use more than its limit"
        finally:
            renamer.kill()


def test_disk_use_is_evaded_by_more_unfinished_levels_than_descriptors(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(100):
        (deep / "a/end").mkdir(parents=True)
        (deep / "b/end").mkdir(parents=True)
        deep = deep / os.listdir(deep)[-1]  # it is visited first
    assert not disk_use(str(tmp_path)).is_evaded
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 3, hard))
    try:
        counted = disk_use(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert counted.is_evaded


def test_disk_use_counts_hard_links_once_and_files_as_the_least_they_take(tmp_path: Path) -> None:
    for folder in ("a/b/c", "a/d"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a/b/c/file").write_bytes(b"x" * 1_000_000)
    os.link(tmp_path / "a/b/c/file", tmp_path / "a/d/same")
    (tmp_path / "a/loop").symlink_to(tmp_path)
    assert 1_000_000 <= disk_use(str(tmp_path)).bytes < 1_200_000
    assert 2_400_000 <= disk_use(str(tmp_path), least=400_000).bytes <= 3_400_000, "five folders or links, and the file"
