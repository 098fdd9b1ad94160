"""What a workspace sees of this machine: masks, the Python environment, PATH."""

import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.sandboxes.local.environment import (
    SYSTEM_FOLDERS,
    PythonEnvironment,
    binds,
    choose_search_path,
    environment_prefixes,
    has_pytest,
    lies_below,
    masked_paths,
    readable_by,
    running_environment,
    search_path,
)


def make_python(folder: Path, modules: tuple[str, ...] = ()) -> Path:
    """Create a `python3` that finds some modules: this one, with only their folder on its path."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for module in modules:
        (packages / f"{module}.py").touch()
    python = folder / "bin" / "python3"
    python.parent.mkdir()
    real = f"{sys.base_prefix}/bin/python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {real} -S "$@"\n')
    python.chmod(0o755)
    return python


def test_every_link_from_the_interpreter_to_the_real_one_is_bound(tmp_path: Path) -> None:
    real = tmp_path / "store" / "cpython-3.11.9"
    (real / "bin").mkdir(parents=True)
    (real / "bin" / "python3.11").touch()
    (tmp_path / "store" / "cpython-3.11").symlink_to("cpython-3.11.9")
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(tmp_path / "store" / "cpython-3.11" / "bin" / "python3.11")
    prefixes = environment_prefixes(str(venv / "python"), str(venv.parent), str(real))
    assert set(prefixes) == {str(venv.parent), str(real), str(tmp_path / "store" / "cpython-3.11")}
    sources = {bind["target"]: bind["source"] for bind in binds(PythonEnvironment(str(venv), prefixes))}
    assert sources[str(tmp_path / "store" / "cpython-3.11")] == str(real)


def test_the_machines_own_python_is_not_bound_read_only_over_usr() -> None:
    assert environment_prefixes("/usr/bin/python3", "/usr", "/usr") == ()


def test_the_running_environment_has_its_interpreter() -> None:
    environment = running_environment()
    assert (Path(environment.bin) / "python3").exists()


def test_links_that_go_round_do_not_hang_the_start(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "a").symlink_to("b")
    (tmp_path / "bin" / "b").symlink_to("a")
    assert environment_prefixes(str(tmp_path / "bin" / "a"), str(tmp_path), str(tmp_path)) == (str(tmp_path),)


def test_the_runs_own_folder_homes_and_secrets_are_masked_and_no_system_folder_is(tmp_path: Path) -> None:
    home = tmp_path / "home-of-someone"
    home.mkdir()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    masks = masked_paths([run_dir], [str(home), "/bin", "/", "/nonexistent", "/var/lib"])
    assert {str(home), str(run_dir), "/etc/shadow", "/run"} <= set(masks)
    assert not SYSTEM_FOLDERS & set(masks)


def test_a_folder_behind_a_link_is_masked_where_it_really_is(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert str(tmp_path / "real") in masked_paths([tmp_path / "link"], [])


def test_path_inside_a_masked_folder_is_not_masked_again(tmp_path: Path) -> None:
    (tmp_path / "home" / "out").mkdir(parents=True)
    masks = masked_paths([tmp_path / "home" / "out"], [str(tmp_path / "home")])
    assert str(tmp_path / "home") in masks
    assert str(tmp_path / "home" / "out") not in masks


FOLDERS = st.lists(st.sampled_from(["/usr/bin", "/bin", "/opt/tool/bin", "/root/bin", "/root", "/env/bin", "", "rel"]))


@given(FOLDERS, st.booleans())
def test_path_has_each_visible_folder_once_and_the_environment_at_its_place(
    folders: list[str], environment_first: bool
) -> None:
    path = search_path(":".join(folders), "/env/bin", ["/root"], environment_first=environment_first).split(":")
    assert path.index("/env/bin") == (0 if environment_first else len(path) - 1)
    assert len(path) == len(set(path))
    assert all(folder.startswith("/") and not lies_below(folder, "/root") for folder in path)
    assert {folder for folder in folders if folder.startswith("/") and not lies_below(folder, "/root")} <= set(path)


async def chosen(tmp_path: Path, machine: tuple[str, ...], own: tuple[str, ...]) -> tuple[list[str], str]:
    theirs = make_python(tmp_path / "machine", machine).parent
    ours = make_python(tmp_path / "own", own).parent
    path, why = await choose_search_path(PythonEnvironment(str(ours), ()), [], {"PATH": str(theirs)})
    return [{str(theirs): "machine", str(ours): "own"}.get(folder, "") for folder in path.split(":")], why


async def test_a_machine_with_pytest_keeps_its_own_python_first(tmp_path: Path) -> None:
    path, _ = await chosen(tmp_path, machine=("pytest",), own=("pytest",))
    assert (path[0], path[-1]) == ("machine", "own")


async def test_machine_without_pytest_runs_the_tests_of_a_task(tmp_path: Path) -> None:
    path, why = await chosen(tmp_path, machine=(), own=("pytest",))
    assert path[:2] == ["own", "machine"]
    assert "has no pytest" in why


async def test_without_pytest_anywhere_the_order_is_unchanged_and_reported(tmp_path: Path) -> None:
    path, why = await chosen(tmp_path, machine=(), own=())
    assert (path[0], path[-1]) == ("machine", "own")
    assert "neither has pytest" in why


async def test_stub_instead_of_python_does_not_have_pytest(tmp_path: Path) -> None:
    stub = tmp_path / "python3"
    stub.write_text("#!/bin/sh\nexit 0\n")
    stub.chmod(0o755)
    assert not await has_pytest(str(stub))
    assert not await has_pytest(None)


def test_environment_in_a_closed_home_is_hidden_from_other_users(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "venv").mkdir(parents=True)
    closed.chmod(0o700)
    environment = PythonEnvironment(str(closed / "venv" / "bin"), (str(closed / "venv"),))
    assert not readable_by(environment, 65534)
    assert readable_by(environment, closed.stat().st_uid)
