"""What is kept about the folders of a tar until its end."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.init.unpacking import Folders

NAMES = st.sampled_from(["a", "b", "ä", "\udcff", "long-name"])
PATHS = st.lists(st.tuples(st.lists(NAMES, max_size=4), st.integers(0, 0o7777), st.integers(-(2**62), 2**62)))


@given(PATHS)
def test_folders_come_back_last_first(added: list[tuple[list[str], int, int]]) -> None:
    folders = Folders()
    for parts, mode, modified in added:
        folders.add(parts, mode, modified)
    assert list(folders.last_first()) == added[::-1]


def test_a_folder_needs_little_memory_however_deep_it_is() -> None:
    """A workspace may have 64 MiB, and the tree of an agent a hundred thousand folders."""
    above = [f"package-{number}" for number in range(15)]
    folders, count = Folders(), 10_000
    for depth in range(1, len(above) + 1):
        folders.add(above[:depth], 0o755, 0)
    tracemalloc.start()
    try:
        for number in range(count):
            folders.add([*above, f"folder-{number}"], 0o755, number)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 100 * count
