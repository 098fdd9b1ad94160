"""Layers: fork, freeze, snapshot and restore keep a tree exactly, and masks and binds are visible in it."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_runtime.executor.host import FileFailure, WorkspaceFailure
from agent_runtime.executor.overlay.config import Bind, HostConfig
from agent_runtime.executor.overlay.workspace import Workspace
from tests.integration.executor_workspaces.conftest import opened
from tests.integration.executor_workspaces.helpers import Inside, assert_no_layer_is_left_over, get, put, run, write
from tests.support.full import examples

_PYTHON = "/usr/bin/python3"


async def test_a_fork_has_all_of_its_parent_and_changes_neither_parent_nor_sister(overlay: Inside) -> None:
    parent = await overlay.make()
    await run(
        parent, "echo setup > /tmp/setup; mkdir /new; echo 1 > /new/one; rm -rf /usr/share/doc; chown 12:34 /new/one"
    )
    await parent.freeze()
    first, second = await overlay.make(parent=parent.spec.id), await overlay.make(parent=parent.spec.id)
    await run(first, "echo changed > /new/one; rm /tmp/setup")
    done = await run(
        second, "cat /new/one /tmp/setup; stat -c %u:%g /new/one; ls /usr/share/doc 2>&1 | grep -c 'No such'"
    )
    assert done.output == "1\nsetup\n12:34\n1\n"
    assert await get(parent, "read", path="/new/one") == b"1\n"
    assert first.layers() == [parent.spec.id]


@pytest.mark.skipif(os.geteuid() != 0, reason="without root, the root folder is the machine's own")
async def test_a_workspace_whose_root_folder_only_root_may_enter_can_be_forked(overlay: Inside) -> None:
    parent = await overlay.make()
    assert (await run(parent, "chmod 700 /; echo kept > /tmp/kept")).ok
    await parent.freeze()
    fork = await overlay.make(parent=parent.spec.id)
    assert (await run(fork, "cat /tmp/kept; stat -c %a /")).output == "kept\n700\n"
    assert await get(parent, "read", path="/tmp/kept") == b"kept\n"


async def test_a_frozen_workspace_can_be_read_but_not_changed(overlay: Inside) -> None:
    frozen = await overlay.make()
    await write(frozen, "/data/file", b"kept")
    await frozen.freeze()
    assert await get(frozen, "read", path="/data/file") == b"kept"
    assert (await frozen.file("list", {"path": "/data"}))["entries"][0]["name"] == "file"
    with tarfile.open(fileobj=io.BytesIO(await get(frozen, "snapshot"))) as tar:
        assert {"data", "data/file"} <= set(tar.getnames())
    for attempt in (run(frozen, "true"), write(frozen, "/data/file", b"no"), put(frozen, "restore", b"")):
        with pytest.raises(WorkspaceFailure, match="frozen"):
            await attempt


async def test_forks_of_forks_stack_more_than_a_hundred_deep(overlay: Inside) -> None:
    workspace = await overlay.make()
    for depth in range(120):
        await write(workspace, f"/depth/{depth}", b"x")
        if depth % 10 == 9:
            await workspace.file("remove", {"path": f"/depth/{depth - 5}"})
        await workspace.freeze()
        workspace = await overlay.make(parent=workspace.spec.id)
    assert len(workspace.layers()) == 120
    assert len((await workspace.file("list", {"path": "/depth"}))["entries"]) == 120 - 12
    assert (await run(workspace, "cat /depth/0")).output == "x"


async def test_a_frozen_parent_can_be_deleted_before_its_forks(overlay: Inside, tmp_path: Path) -> None:
    parent = await overlay.make()
    await write(parent, "/kept", b"yes")
    await parent.freeze()
    fork = await overlay.make(parent=parent.spec.id)
    await parent.destroy()
    assert await get(fork, "read", path="/kept") == b"yes"
    await fork.destroy()
    await assert_no_layer_is_left_over(overlay.host)


async def test_a_parent_that_runs_cannot_be_forked(overlay: Inside) -> None:
    parent = await overlay.make()
    with pytest.raises(WorkspaceFailure, match="is not frozen; freeze it first"):
        await overlay.make(parent=parent.spec.id)


async def test_a_snapshot_brings_deletions_and_replaced_folders_elsewhere(overlay: Inside) -> None:
    base = await overlay.make()
    await run(base, "mkdir -p /d/sub /gone; echo a > /d/sub/a; echo b > /d/b; echo c > /gone/c")
    await base.freeze()
    first, second = await overlay.make(parent=base.spec.id), await overlay.make(parent=base.spec.id)
    await run(
        first, "rm -rf /d /gone; mkdir -p /d/sub; echo new > /d/sub/new; ln /d/sub/new /d/hard; ln -s sub /d/soft"
    )
    await put(second, "restore", await get(first, "snapshot"))
    done = await run(second, "find /d /gone 2>/dev/null | sort; stat -c %h /d/hard; readlink /d/soft; cat /d/soft/new")
    assert done.output == "/d\n/d/hard\n/d/soft\n/d/sub\n/d/sub/new\n2\nsub\nnew\n"


async def test_plain_keeps_its_working_folder_by_snapshot(plain: Inside) -> None:
    workspace = await plain.make(working_dir="/work")
    await run(workspace, "true", cwd="/")
    await write(workspace, "/work/file", b"x")
    packed = await get(workspace, "snapshot")
    await workspace.file("remove", {"path": "/work/file"})
    await put(workspace, "restore", packed)
    assert await get(workspace, "read", path="/work/file") == b"x"


async def test_plain_reports_that_it_cannot_fork(plain: Inside) -> None:
    workspace = await plain.make()
    with pytest.raises(WorkspaceFailure, match="Plain mode cannot freeze"):
        await workspace.freeze()
    with pytest.raises(WorkspaceFailure, match="supports one workspace"):
        await plain.make()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that workspaces can see, unlike those below /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
async def furnished(place: Path) -> AsyncIterator[Inside]:
    """A secret folder with a read-only bind below it, and a shared folder that is writable."""
    for name in ("secret/tool", "shared", "state"):
        (place / name).mkdir(parents=True)
    (place / "secret/key").write_text("key")
    (place / "secret/tool/run").write_text("tool")
    (place / "shared").chmod(0o777)
    secret, shared = place / "secret", place / "shared"
    config = HostConfig(
        str(place / "state"),
        mode="Overlay",
        masks=(str(secret), "/etc/shadow"),
        binds=(Bind(f"{secret}/tool", f"{secret}/tool"), Bind(str(shared), "/data/shared", False)),
    )
    async with opened(config) as host:
        yield Inside(host)


async def test_masked_paths_are_hidden_and_bound_paths_below_them_are_present(furnished: Inside, place: Path) -> None:
    workspace = await furnished.make()
    done = await run(
        workspace, f"find {place}/secret; cat {place}/secret/tool/run; test ! -e /etc/shadow; ls {place}/state"
    )
    assert done.output == f"{place}/secret\n{place}/secret/tool\n{place}/secret/tool/run\ntool"
    assert done.ok
    assert not (await run(workspace, f"echo x > {place}/secret/tool/run")).ok
    assert (
        await run(workspace, "echo hello > /data/shared/file; echo x > /etc/shadow; cat /etc/shadow")
    ).output == "x\n"
    assert (place / "shared/file").read_text() == "hello\n"
    assert (place / "shared/file").stat().st_uid != 0  # the tools' root is nobody on the machine
    await workspace.freeze()
    fork = await furnished.make(parent=workspace.spec.id)
    assert not (await run(fork, f"test -e {place}/secret/key")).ok


async def test_file_names_that_are_not_utf8_are_kept_in_every_transfer(overlay: Inside) -> None:
    name = os.fsdecode(b"/n/caf\xe9")
    first = await overlay.make()
    await write(first, name, b"x")
    assert [entry["name"] for entry in (await first.file("list", {"path": "/n"}))["entries"]] == [name[3:]]
    packed, layer = await get(first, "tar", path="/n"), await get(first, "snapshot")
    await first.freeze()
    fork = await overlay.make(parent=first.spec.id)
    assert await get(fork, "read", path=name) == b"x"
    unpacked, restored = await overlay.make(), await overlay.make()
    await put(unpacked, "untar", packed, path="/n")
    await put(restored, "restore", layer)
    assert await get(unpacked, "read", path=name) == await get(restored, "read", path=name) == b"x"


async def test_tar_contains_only_the_requested_parts_and_long_listings_are_truncated(overlay: Inside) -> None:
    workspace = await overlay.make()
    await run(workspace, "mkdir -p /t/other /t/real /t/src; touch /t/other/a /t/real/a.py /t/b; ln -s real /t/link")
    await run(workspace, "cd /t/src && seq 6000 | xargs touch")
    packed = await get(workspace, "tar", path="/t", parts=["b", "link", "missing", "b/below"])
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert [(entry.name, entry.isdir()) for entry in tar] == [("b", False), ("link", True), ("link/a.py", False)]
    listed = await workspace.file("list", {"path": "/t/src"})
    assert listed["truncated"] is True
    assert len(listed["entries"]) == 5000


async def test_files_put_in_belong_to_the_workspaces_user(overlay: Inside) -> None:
    workspace = await overlay.make(user="1234:1235", working_dir="/tmp")
    await write(workspace, "made", b"x")
    await put(workspace, "untar", await get(workspace, "tar", path="/etc/passwd"), path="/tmp/in")
    assert (await run(workspace, "stat -c %u:%g made in/passwd", cwd="/tmp")).output == "1234:1235\n1234:1235\n"
    with pytest.raises(FileFailure, match="Permission denied"):
        await write(workspace, "/etc/passwd", b"x")


async def test_a_large_file_is_written_and_read_back_unchanged(overlay: Inside) -> None:
    workspace = await overlay.make()
    content = os.urandom(5_000_000)
    await write(workspace, "/big", content)
    assert await get(workspace, "read", path="/big") == content


async def test_programs_are_installed_removed_and_moved_below_usr_as_anywhere(overlay: Inside) -> None:
    """Where /usr is a separate part, files move between it and other folders as between file systems."""
    workspace = await overlay.make()
    moves = "mkdir /kept && cp /bin/echo /usr/bin/said && mv /usr/bin/said /kept && mv /kept/said /usr/local/bin"
    assert (await run(workspace, f"{moves} && rm /usr/bin/yes && mkdir -p /usr/share/new/deep")).ok
    layer = await get(workspace, "snapshot")
    await workspace.freeze()
    fork, restored = await overlay.make(parent=workspace.spec.id), await overlay.make()
    await put(restored, "restore", layer)
    for found in (fork, restored):
        assert (
            await run(found, "said hello; ls -A /kept; ls /usr/share/new; test -e /usr/bin/yes || echo gone")
        ).output == ("hello\ndeep\ngone\n")
    await fork.freeze()
    assert (await run(await overlay.make(parent=fork.spec.id), "said again")).output == "again\n"


# Property: any sequence of operations on a layered tree gives what the same operations give on a plain folder.

_SETUP = """
import os
for folder in ("a", "a/b", "c"):
    os.mkdir(folder)
for name in ("a/f", "a/b/g", "c/h", "i"):
    open(name, "w").write(name)
os.symlink("a/f", "l")
"""

_APPLY = """
import json, os, shutil, stat, subprocess, sys
os.chdir(sys.argv[1])
for name, one, two in json.loads(sys.argv[2]):
    try:
        if name == "write":
            if not os.path.exists(one) or os.path.isfile(one):  # not a FIFO: that would wait for a reader
                open(one, "w").write(two)
        elif name == "mkdir":
            os.mkdir(one)
        elif name == "remove":
            shutil.rmtree(one) if os.path.isdir(one) and not os.path.islink(one) else os.unlink(one)
        elif name == "move":
            # Not shutil.move: where a folder cannot be renamed it leaves owners and FIFOs behind.
            if not os.path.lexists(two):
                subprocess.run(["mv", "-T", one, two], stderr=subprocess.DEVNULL)
        elif name == "link":
            # overlayfs copies a file of a lower layer when it gets a second name, according to its documentation.
            if os.path.isfile(one) and os.stat(one).st_nlink == 1:
                shutil.copy2(one, one + "~"); os.replace(one + "~", one); os.link(one, two)
        elif name == "symlink":
            os.symlink(two, one)
        elif name == "mode":
            os.chmod(one, 0o700 | int(two))
        elif name == "owner":
            os.chown(one, int(two), int(two), follow_symlinks=False)
        elif name == "fifo":
            os.mkfifo(one)
        elif name == "part":
            # Likewise for a file with two names that is in a lower layer by now.
            for folder, _, files in os.walk("."):
                for path in (os.path.join(folder, file) for file in files):
                    info = os.lstat(path)
                    if stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
                        shutil.copy2(path, path + "~"); os.replace(path + "~", path)
                        os.chown(path, info.st_uid, info.st_gid); os.chmod(path, info.st_mode)
    except (OSError, shutil.Error):
        pass
"""

_DESCRIBE = """
import os, stat, sys
os.chdir(sys.argv[1])
names, inodes = [], {}
for folder, folders, files in os.walk("."):
    names += [os.path.join(folder, name) for name in folders + files]
for name in sorted(names):
    info = os.lstat(name)
    kind = stat.S_IFMT(info.st_mode)
    content = os.readlink(name) if kind == stat.S_IFLNK else open(name).read() if kind == stat.S_IFREG else ""
    same = inodes.setdefault(info.st_ino, name) if kind == stat.S_IFREG else name
    mode = 0 if kind == stat.S_IFLNK else info.st_mode
    print(name, oct(kind), oct(mode), info.st_uid, info.st_gid, repr(content), same)
"""

Operation = tuple[str, str, str]
_PART: Operation = ("part", "", "")

_paths = st.sampled_from(
    ["a", "a/b", "a/f", "a/b/g", "c", "c/h", "i", "l", "new", "a/new", "c/new", "new/x", "a/b/new"]
)
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), _paths, st.sampled_from(["one", "two", ""])),
        st.tuples(st.sampled_from(["mkdir", "remove", "fifo"]), _paths, st.just("")),
        st.tuples(st.sampled_from(["move", "link", "symlink"]), _paths, _paths),
        st.tuples(st.just("mode"), _paths, st.sampled_from(["0", "45", "64", "2048", "1024"])),
        st.tuples(st.just("owner"), _paths, st.sampled_from(["0", "7", "1000"])),
    ),
    max_size=12,
)


async def _tree(workspace: Workspace, folder: str) -> str:
    done = await run(workspace, [_PYTHON, "-c", _DESCRIBE, folder])
    assert done.ok, done.output
    return done.output


async def _apply(workspace: Workspace, folder: str, operations: object) -> None:
    done = await run(workspace, [_PYTHON, "-c", _APPLY, folder, json.dumps(operations)])
    assert done.ok, done.output


@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck), database=None)
# On a bare machine /usr is a part of its own.
@given(layered=st.sampled_from(["/layered", "/usr/layered"]), first=_operations, second=_operations)
@example(layered="/usr/layered", first=[], second=[("remove", "c", ""), ("fifo", "a/b/new", ""), ("move", "a", "c")])
@example(layered="/layered", first=[("link", "a/f", "new")], second=[("write", "l", "one")])
async def test_layers_have_the_same_contents_as_a_plain_folder(
    layered: str, first: list[Operation], second: list[Operation]
) -> None:
    with tempfile.TemporaryDirectory() as state:
        async with opened(HostConfig(state, mode="Overlay", places=10)) as host:
            inside = Inside(host)
            base = await inside.make()
            # /plain is on the tmpfs of /dev/shm: no layers there. It is made anew in each workspace.
            assert (await run(base, f"mkdir {layered} && cd {layered} && {_PYTHON} -c '{_SETUP}'")).ok
            await base.freeze()
            fork = await inside.make(parent=base.spec.id)
            twin = "mkdir /dev/shm/plain && cd /dev/shm/plain && "
            assert (await run(fork, f"{twin} {_PYTHON} -c '{_SETUP}'")).ok
            for folder in (layered, "/dev/shm/plain"):
                await _apply(fork, folder, first)
            expected = await _tree(fork, "/dev/shm/plain")
            assert await _tree(fork, layered) == expected
            layer = await get(fork, "snapshot")
            restored = await inside.make(parent=base.spec.id)
            await put(restored, "restore", layer)
            assert await _tree(restored, layered) == expected
            plain = await get(fork, "tar", path="/dev/shm/plain")
            await fork.freeze()
            grandchild = await inside.make(parent=fork.spec.id)
            assert await _tree(grandchild, layered) == expected
            assert len(plain) > 0
            # A second round on top of frozen layers: removed, made again, moved over what lies below.
            for folder in (layered, "/dev/shm/plain"):
                if folder == "/dev/shm/plain":
                    assert (await run(grandchild, f"{twin} {_PYTHON} -c '{_SETUP}'")).ok
                    await _apply(grandchild, folder, first)
                await _apply(grandchild, folder, [_PART, *second])
            assert await _tree(grandchild, layered) == await _tree(grandchild, "/dev/shm/plain")
