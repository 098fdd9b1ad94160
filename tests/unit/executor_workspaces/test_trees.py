"""Paths in an untrusted tree resolve as they would for a process whose root it is, and never lead outside."""

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.executor.init.trees import removal, remove_entry, resolve_below
from tests.support.full import examples


@pytest.mark.parametrize(
    ("path", "leads_to"),
    [
        ("/etc/passwd", "/etc/passwd"),
        ("/var/run/x", "/run/x"),
        ("/lib/ld.so", "/usr/lib/ld.so"),
        ("/out/x", "/x"),
        ("/var/run/../y", "/y"),
        ("/", "/"),
        ("/missing/../../z", "/z"),
    ],
)
def test_links_of_an_image_stay_in_the_image(tmp_path: Path, path: str, leads_to: str) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "out").symlink_to("../../../..")
    assert resolve_below(str(tmp_path), path) == leads_to


def test_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("/a")
    with pytest.raises(OSError, match="levels of symbolic links"):
        resolve_below(str(tmp_path), "/a/x")


NAMES = st.sampled_from(["a", "b", "c", ".", ".."])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@settings(max_examples=examples(60))
@given(st.dictionaries(st.sampled_from(["a", "b", "a/c"]), st.tuples(st.booleans(), PATHS), max_size=3), PATHS)
def test_resolved_paths_stay_below_the_root(links: dict[str, tuple[bool, str]], path: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        for name, (absolute, target) in links.items():
            place = Path(root, name)
            if place.parent.is_dir() and not place.parent.is_symlink():
                place.symlink_to("/" * absolute + target)
        try:
            found = resolve_below(root, f"/{path}")
        except OSError:
            return
        assert os.path.isabs(found)
        assert ".." not in found.split("/")


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot is root's")
def test_resolved_paths_equal_those_of_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/file").touch()
    (tmp_path / "one").symlink_to("/deep/../deep/er")
    (tmp_path / "deep/two").symlink_to("../../../one/../er/file")
    code = "import os, sys; os.chroot(sys.argv[1]); print(os.path.realpath('/deep/two'), os.path.exists('/deep/two'))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [resolve_below(str(tmp_path), "/deep/two"), "True"]


@settings(max_examples=examples(60))
@given(
    st.sets(st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map("/".join), max_size=12),
    st.integers(min_value=1, max_value=60),
)
def test_interrupted_removal_is_finished_by_the_next(folders: set[str], steps: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        Path(root, "kept").touch()
        for folder in folders:
            Path(root, "tree", folder).mkdir(parents=True, exist_ok=True)
            Path(root, "tree", folder, "file").touch()
        parent = os.open(root, os.O_RDONLY)
        begun = removal(parent, "tree", missing_ok=True)
        has_ended = sum(1 for _ in itertools.islice(begun, steps)) < steps
        begun.close()
        assert has_ended <= (not Path(root, "tree").exists())
        remove_entry(parent, "tree", missing_ok=True)
        os.close(parent)
        assert os.listdir(root) == ["kept"]
