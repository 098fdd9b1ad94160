"""A restored snapshot is what was there: bytes, owners, modes, links, and times to the nanosecond, those of folders too."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agent_runtime.executor.host import Limits
from agent_runtime.executor.overlay.config import HostConfig
from agent_runtime.executor.overlay.workspace import Workspace
from tests.integration.executor_workspaces.conftest import opened
from tests.integration.executor_workspaces.helpers import Inside, get, put, run, write
from tests.support.full import examples

_PYTHON = "/usr/bin/python3"

_APPLY = """
import json, os, shutil, sys
os.chdir(sys.argv[1])
for name, one, two in json.loads(sys.argv[2]):
    try:
        if name == "write":
            if not os.path.lexists(one) or os.path.isfile(one):
                open(one, "w").write(two * 700)
        elif name == "mkdir":
            os.mkdir(one)
        elif name == "remove":
            shutil.rmtree(one) if os.path.isdir(one) and not os.path.islink(one) else os.unlink(one)
        elif name == "link":
            os.link(one, two, follow_symlinks=False)
        elif name == "symlink":
            os.symlink(two, one)
        elif name == "fifo":
            os.mkfifo(one)
        elif name == "mode" and not os.path.islink(one):
            os.chmod(one, 0o700 | int(two))
        elif name == "owner" and os.geteuid() == 0:
            os.chown(one, int(two), int(two), follow_symlinks=False)
        elif name == "time":
            os.utime(one, ns=(0, int(two)), follow_symlinks=False)
    except OSError:
        pass
"""

_DESCRIBE = """
import json, os, stat, sys
found, inodes = {}, {}
for top in sys.argv[1:]:
    names = [top]
    for folder, folders, files in os.walk(top):
        names += [os.path.join(folder, name) for name in folders + files]
    for name in sorted(names):
        info = os.lstat(name)
        kind = stat.S_IFMT(info.st_mode)
        content = os.readlink(name) if kind == stat.S_IFLNK else open(name).read() if kind == stat.S_IFREG else ""
        same = name if kind == stat.S_IFDIR else inodes.setdefault(info.st_ino, name)
        found[name] = [info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, content, same]
info = os.lstat("/")
found["/"] = [info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns]
print(json.dumps(found))
"""

_paths = st.sampled_from(
    ["d", "d/.wh.e", "d/e", "d/e/f", "d/f", "g", "new", "d/new", "new/x", "lower/a", "lower/sub", "lower/sub/b"]
)
# Before 1970, whole seconds, what a float cannot hold, and beyond the 33 bits of a tar header.
_times = st.one_of(
    st.sampled_from([0, -1, -1_500_000_000, 1_700_000_000 * 10**9, 1_700_000_000_123_456_789, 2**34 * 10**9 + 1]),
    st.integers(-(2**31) * 10**9, 2**33 * 10**9),
)
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), _paths, st.sampled_from(["one", "two", ""])),
        st.tuples(st.sampled_from(["mkdir", "remove", "fifo"]), _paths, st.just("")),
        st.tuples(st.sampled_from(["link", "symlink"]), _paths, _paths),
        st.tuples(st.just("mode"), _paths, st.sampled_from(["0", "45", "2048", "1024", "512"])),
        st.tuples(st.just("owner"), _paths, st.sampled_from(["0", "7", "1000"])),
        st.tuples(st.just("time"), _paths, _times.map(str)),
    ),
    min_size=1,
    max_size=14,
)
# Each example starts a host: shrinking would take minutes, and the operations of a failure are few as they are.
_settings = settings(
    max_examples=examples(12),
    suppress_health_check=list(HealthCheck),
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
)
_LOWER = "mkdir -p {0}/lower/sub; echo a > {0}/lower/a; echo b > {0}/lower/sub/b; echo c > {0}/lower/sub/c"


async def _apply(workspace: Workspace, folder: str, operations: object) -> None:
    done = await run(workspace, [_PYTHON, "-c", _APPLY, folder, json.dumps(operations)])
    assert done.ok, done.output


async def _described(workspace: Workspace, *folders: str) -> dict[str, object]:
    done = await run(workspace, [_PYTHON, "-c", _DESCRIBE, *folders])
    assert done.ok, done.output
    found: dict[str, object] = json.loads(done.output)
    return found


@_settings
@given(first=_operations, second=_operations)
async def test_chain_of_layers_is_restored_in_a_new_overlay(first: object, second: object) -> None:
    with tempfile.TemporaryDirectory() as state:
        async with opened(HostConfig(state, mode="Overlay", places=10)) as host:
            inside = Inside(host)
            prepared = await inside.make()
            assert (await run(prepared, "mkdir /tree; " + _LOWER.format("/tree"))).ok
            await _apply(prepared, "/tree", first)
            await prepared.freeze()
            agent = await inside.make(parent=prepared.spec.id)
            await _apply(agent, "/tree", second)
            fresh = await inside.make()
            for layer in (prepared, agent):
                await put(fresh, "restore", await get(layer, "snapshot"))
            assert await _described(fresh, "/tree") == await _described(agent, "/tree")


@_settings
@given(before=_operations, after=_operations)
async def test_plain_snapshot_replaces_existing_files(before: object, after: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        described = []
        for number, operations in enumerate((after, before)):
            root = Path(folder) / str(number)
            (root / "state").mkdir(parents=True)
            root.chmod(0o777)
            config = HostConfig(str(root / "state"), mode="Plain", root=str(root))
            async with opened(config) as host:
                workspace = await Inside(host).make(working_dir="/work")
                assert (await run(workspace, "mkdir more; " + _LOWER.format("."), cwd="/work")).ok
                await run(workspace, f"mkdir {root}/home; " + _LOWER.format(f"{root}/home"))
                for place in ("work", "home"):
                    await _apply(workspace, str(root / place), operations)
                if number == 0:
                    packed = await get(workspace, "snapshot", paths=["/home", "/home/lower", "/missing"])
                else:
                    await put(workspace, "restore", packed)
                found = await _described(workspace, str(root / "work"), str(root / "home"))
                described.append({name.removeprefix(str(root)): value for name, value in found.items() if name != "/"})
        # Targets of links also contain the root folder.
        assert json.dumps(described[1]).replace(f"{folder}/1", "") == json.dumps(described[0]).replace(
            f"{folder}/0", ""
        )


async def test_file_named_like_a_deletion_mark_is_kept_and_deletes_nothing(overlay: Inside) -> None:
    one, other = await overlay.make(), await overlay.make()
    for name in (".wh.kept", ".wh..wh..opq"):
        await write(one, f"/tree/{name}", b"x")
    await write(other, "/tree/kept", b"y")
    await put(other, "restore", await get(one, "snapshot"))
    assert (await run(other, "ls -A /tree; cat /tree/.wh*")).output == ".wh..wh..opq\n.wh.kept\nkept\nxx"


async def test_restored_file_needs_no_more_disk_than_it_did(overlay: Inside) -> None:
    one, other = await overlay.make(), await overlay.make(limits=Limits(disk_bytes=16 << 20))
    written = "truncate -s 12M $f && for n in 0 1000 3071; do echo $n | dd of=$f bs=4096 seek=$n conv=notrunc; done"
    done = await run(one, f"mkdir /tree && cd /tree && for f in 1 2 3 4; do {written}; done")
    assert done.ok, done.output
    await put(other, "restore", await get(one, "snapshot"))
    sums = [(await run(each, "sha256sum /tree/*; du -k /tree/*")).output for each in (one, other)]
    assert sums[0] == sums[1]


async def test_attribute_whose_name_fits_no_tar_is_left_out(overlay: Inside) -> None:
    one, other = await overlay.make(), await overlay.make()
    named = r"import os; [os.setxattr('/f', name, b'v') for name in (b'user.\xff', b'user.a=b', b'user.fine')]"
    done = await run(one, ["/bin/sh", "-c", f'echo x > /f && python3 -c "{named}"'])
    assert done.ok, done.output
    await put(other, "restore", await get(one, "snapshot"))
    assert (await run(other, "python3 -c \"import os; print(os.listxattr('/f'))\"")).output == "['user.fine']\n"


async def test_a_plain_restore_follows_no_link_that_tools_planted(plain: Inside, tmp_path: Path) -> None:
    workspace = await plain.make(working_dir="/work")
    await write(workspace, "/work/sub/file", b"x")
    packed = await get(workspace, "snapshot")
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    await workspace.file("remove", {"path": "/work"})
    await run(workspace, ["/bin/ln", "-s", str(outside), f"{plain.host.config.root}/work"], cwd="/")
    await put(workspace, "restore", packed)
    assert list(outside.iterdir()) == []
    assert await get(workspace, "read", path="/work/sub/file") == b"x"
