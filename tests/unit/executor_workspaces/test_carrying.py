"""A grading carries the agent's work, and nothing by which the agent could decide its own verdict."""

import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_runtime.executor.init import carrying, tree_rules, trees
from agent_runtime.executor.init.identity import Refused
from agent_runtime.executor.init.tree_rules import OF_TESTS, RUN_FIRST, Rules, kind_of
from agent_runtime.grading.artifacts import carry_rules
from rollout_api.rollout_job import Verifier
from rollout_api.tasks import Task
from tests.support.carrying import carried, carry, packed, piped, rules, unpack, write_all
from tests.support.full import examples

PREPARED = {
    "calc.py": "prepared",
    "data/x": "old",
    "other/x": "good",
    "tests/conftest.py": "prepared conftest",
    "tests/__init__.py": "",
    "tests/helper.py": "h",
    "src/pkg/__init__.py": "",
    "src/pkg/a.py": "a",
    "src/queue.py": "prepared queue",
    "backend/app.py": "app",
    "backend/.venv/pyvenv.cfg": "home = /usr/bin",
    "backend/.venv/bin/python": "real python",
    "backend/.venv/lib/x.py": "x",
    "lib/__pycache__/m.cpython-311.pyc": "compiled",
    "lib/m.py": "m",
    "old-1.0.dist-info/METADATA": "m",
}
HIDDEN = ["hidden/test_calc.py", "hidden/reference.py"]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)


class Grading:
    """A prepared folder, twice: the agent works in one, and the other one is graded."""

    def __init__(self, root: Path, prepared: dict[str, str] | None = None) -> None:
        self.agent, self.graded = root / "agent", root / "graded"
        for folder in (self.agent, self.graded):
            folder.mkdir()
            write(folder, PREPARED if prepared is None else prepared)
        self.dropped: list[str] = []

    def carry(self, *, artifacts: Sequence[str] = (".",), hidden: Sequence[str] = HIDDEN) -> None:
        self.dropped = carry(self.graded, packed(self.agent), rules(artifacts=artifacts, hidden=hidden))

    def has(self, name: str) -> bool:
        return os.path.lexists(self.graded / name)

    def text(self, name: str) -> str:
        """Return the content of a real file that is not reached through a link."""
        place = self.graded / name
        assert place.resolve() == self.graded.resolve() / name, f"{name} is reached through a link"
        return place.read_text()


@pytest.fixture
def grading(tmp_path: Path) -> Grading:
    return Grading(tmp_path)


def test_files_that_the_agent_wrote_are_newer_than_what_the_setup_of_the_grading_built(tmp_path: Path) -> None:
    began = 1_700_000_000.0
    grading = Grading(tmp_path, {"main.c": "wrong", "same.c": "same", "old.txt": "old", "moved": "x"})
    work = {"late/main.o": ("object", 30), "main.c": ("right", 20), "first.c": ("first", 10), "kept": ("dated", -50)}
    write(grading.agent, {name: content for name, (content, _) in work.items()})
    for name, (_, seconds) in work.items():
        os.utime(grading.agent / name, (began + seconds,) * 2)
    os.utime(grading.agent / "same.c", (began - 5,) * 2)
    os.utime(grading.agent / "old.txt", (began + 10**9,) * 2)
    built = tmp_path / "built"
    built.write_text("built by the setup")
    form = [{**rule, "since": began} for rule in rules()]
    carry(grading.graded, packed(grading.agent), form)
    assert grading.text("main.c") == "right"
    modified = {name: (grading.graded / name).stat().st_mtime for name in (*work, "same.c", "old.txt")}
    assert built.stat().st_mtime < modified["first.c"] < modified["main.c"] < modified["late/main.o"] < time.time() + 1
    assert (modified["kept"], modified["same.c"]) == (began - 50, began - 5), "the agent gave it an older time"
    assert modified["old.txt"] == began + 10**9


def test_changes_are_told_as_a_diff_of_the_prepared_files(tmp_path: Path) -> None:
    prepared = {
        "a.py": "one\ntwo\n",
        "same.py": "x\n",
        "gone.py": "old\n",
        "folder/deep.py": "deep\n",
        "data.bin": "\0",
        "large.txt": "x" * 300_000,
        "end.txt": "no newline",
        "link": "a file\n",
    }
    grading = Grading(tmp_path, prepared)
    for path in ("gone.py", "folder/deep.py", "link"):
        (grading.agent / path).unlink()
    (grading.agent / "folder").rmdir()
    os.symlink("/etc/passwd", grading.agent / "link")
    (grading.agent / "a.py").write_text("one\n2\n")
    (grading.agent / "new.py").write_text("new\n")
    (grading.agent / "data.bin").write_bytes(b"\0\1")
    (grading.agent / "large.txt").write_text("y" * 300_000)
    (grading.agent / "end.txt").write_text("no newline\n")
    os.utime(grading.agent / "same.py", (0, 0))
    found = carried(grading.graded, packed(grading.agent), rules())["changes"].split("\n")
    wanted = [
        *("--- a/a.py", "+++ b/a.py", "@@ -1,2 +1,2 @@", " one", "-two", "+2"),
        *("--- a/data.bin", "+++ b/data.bin", "(changed; too large or not text)"),
        *("--- a/end.txt", "+++ b/end.txt", "@@ -1,2 +1 @@", " no newline", "-\\ No newline at end of file"),
        *("--- a/folder/deep.py", "+++ /dev/null", "@@ -1 +0,0 @@", "-deep"),
        *("--- a/gone.py", "+++ /dev/null", "@@ -1 +0,0 @@", "-old"),
        *("--- a/large.txt", "+++ b/large.txt", "(changed; too large or not text)"),
        *("--- a/link", "+++ /dev/null", "@@ -1 +0,0 @@", "-a file"),  # the link leads out, so it is not carried
        *("--- /dev/null", "+++ b/new.py", "@@ -0,0 +1 @@", "+new"),
    ]
    assert found == wanted


def test_diff_of_changes_is_bounded_in_size_and_time(tmp_path: Path) -> None:
    grading = Grading(tmp_path, {f"{number}.txt": f"{number}\n" for number in range(700)})
    for number in range(700):
        lines = "".join(f"{number * line % 7919}\n" for line in range(1000))
        (grading.agent / f"{number}.txt").write_text(lines)
    began = time.monotonic()
    found = carried(grading.graded, packed(grading.agent), rules())["changes"]
    assert len(found) < 200_000
    assert found.endswith("Further files may have changed.")
    assert time.monotonic() - began < 30


def test_prepared_files_that_links_and_folders_replace_are_in_the_diff(tmp_path: Path) -> None:
    prepared = {name: f"{name}\n" for name in ("kept", "symbolic", "hard", "file", "folder/deep")}
    grading = Grading(tmp_path, prepared)
    for path in ("symbolic", "hard", "file", "folder/deep"):
        (grading.agent / path).unlink()
    (grading.agent / "folder").rmdir()
    os.symlink("kept", grading.agent / "symbolic")
    os.link(grading.agent / "kept", grading.agent / "hard")
    (grading.agent / "file").mkdir()
    os.symlink("file", grading.agent / "folder")
    found = carried(grading.graded, packed(grading.agent), rules())["changes"].split("\n")
    for name in ("symbolic", "file"):
        assert found[found.index(f"--- a/{name}") :][1:3] == [f"+++ b/{name}", "(changed; too large or not text)"]
    assert "--- a/folder/deep" in found
    assert found[found.index("--- a/hard") :][1:5] == ["+++ b/hard", "@@ -1 +1 @@", "-hard", "+kept"]
    assert "--- a/kept" not in found


def test_file_with_a_few_lines_that_repeat_costs_no_long_comparison(tmp_path: Path) -> None:
    grading = Grading(tmp_path, {"labels.csv": "a\nb\n" * 1390})
    (grading.agent / "labels.csv").write_text("b\nb\na\n" * 66)
    began = time.process_time()
    found = carried(grading.graded, packed(grading.agent), rules())["changes"]
    assert found == "--- a/labels.csv\n+++ b/labels.csv\n(changed; too large or not text)"
    assert time.process_time() - began < 1


def test_changed_file_is_not_mistaken_for_the_prepared_one_that_was_compiled_in_the_same_second(tmp_path: Path) -> None:
    grading = Grading(tmp_path, {"calc.py": "def add(a, b): return a - b"})
    (grading.agent / "calc.py").write_text("def add(a, b): return a + b")
    command = [sys.executable, "-c", "import calc; print(calc.add(2, 3))"]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    os.utime(grading.graded / "calc.py")
    subprocess.run(command, cwd=grading.graded, env=env, check=True, stdout=subprocess.PIPE)
    os.utime(grading.agent / "calc.py", (time.time() - 60,) * 2)
    carry(grading.graded, packed(grading.agent), [{**rule, "since": time.time() - 3600} for rule in rules()])
    assert subprocess.run(command, cwd=grading.graded, env=env, check=True, stdout=subprocess.PIPE).stdout == b"5\n"


@pytest.mark.parametrize(
    "name",
    [
        *("conftest.py", "a/b/conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg"),
        *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "x.pth", ".python-version", ".coveragerc"),
        *(".python-versions", ".coveragerc.toml", "_missing_stdlib_info.py", "_math_integer.so"),
        *("__pycache__/calc.cpython-311.pyc", "calc.pyc", "evil.egg-info/entry_points.txt", "new/pyvenv.cfg"),
        *("evil-1.0.dist-info/entry_points.txt", "evil.egg", "evil.egg-link", "lib/EGG-INFO/entry_points.txt"),
        *("json.py", "pytest.py", "_pytest/__init__.py", "random.cpython-311-x86_64-linux-gnu.so"),
        *("hidden/json.py", "src/subprocess.py", "pytest_evil.py", "pytest_evil/__init__.py", "json/__init__.so"),
        *("hidden/__init__.py", "hidden/reference/__init__.py", "hidden/reference.so", "hidden/reference.abi3.so"),
        *("backend/.venv/bin/new", "backend/.venv/lib/y.py"),
        *("sitecustomize/__init__.py", "a/usercustomize.abi3.so", "conftest/__init__.py"),
        *(
            "_hypothesis_pytestplugin.py",
            "anyio/__init__.py",
            "toml.py",
            "more_itertools/__init__.py",
            "sortedcontainers.py",
        ),
        *("_sha512.py", "_colorize.py", "annotationlib.py", "_sysconfigdata__x86_64-linux-gnu.py", "org/__init__.py"),
        *("nt/_path_normpath.py", "hidden/nt/readlink/__init__.py", "_winapi/X.so", "src/org/python/core.py"),
    ],
)
def test_files_that_python_and_pytest_load_unasked_are_not_carried(grading: Grading, name: str) -> None:
    write(grading.agent, {name: "evil"})
    grading.carry()
    assert not grading.has(name)
    assert grading.dropped or "pyc" in name


@pytest.mark.parametrize(
    ("configuration", "text", "test", "work"),
    [
        ("pytest.ini", "[pytest]\npython_files =\n  check_*.py\n  suite.py\naddopts = a.py", "x/suite.py", "a.py"),
        (
            "pyproject.toml",
            '[tool.pytest.ini_options]\npython_files = ["a_*.py",\n "check_*.py"]',
            "check_b.py",
            "a.py",
        ),
        ("setup.cfg", "[tool:pytest]\npython_files = unit/*.py\n", "lib/unit/b.py", "lib/b.py"),
        ("tox.ini", "[pytest]\npython_files = *.py\n", "tests/unit/b.py", "src/b.py"),
    ],
)
def test_files_that_the_prepared_configuration_calls_tests_are_not_carried(
    tmp_path: Path, configuration: str, text: str, test: str, work: str
) -> None:
    grading = Grading(tmp_path, {configuration: text, "kept/test_a.py": "prepared"})
    write(grading.agent, {test: "evil", work: "work", "kept/test_a.py": "evil"})
    grading.carry()
    assert (grading.has(test), grading.text(work), grading.text("kept/test_a.py")) == (False, "work", "prepared")


def test_the_agents_own_tests_are_carried_where_the_job_names_them(grading: Grading) -> None:
    write(grading.agent, {"tests/test_new.py": "work", "src/test_new.py": "evil"})
    grading.carry(artifacts=[".", "tests/test_*.py"])
    assert (grading.text("tests/test_new.py"), grading.has("src/test_new.py")) == ("work", False)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "calc.py",
            "new.py",
            "src/pkg/json.py",
            "src/pkg/types.py",
            "new/__init__.py",
            "new/random.py",
            "src/queue.py",
        ),
        *("parser.py", "nt/a.c", "org/a.py", "org/a/core.py", "python/core.py", "src/pkg/nt/a.py"),
        *("Makefile", "test/data.txt", "hidden/data.json", "json", "string/notes.txt", "random.txt", "conftest.py/x"),
        *("tests/__init__.py", "backend/app.py", ".wh.calc.py", ".wh..wh..opq", "new\nline", "line/\nevil.txt"),
        os.fsdecode(b"not-utf-8-\xff/\xfe"),
    ],
)
def test_ordinary_work_is_carried(grading: Grading, name: str) -> None:
    write(grading.agent, {name: "work"})
    grading.carry()
    assert grading.text(name) == "work"
    assert grading.dropped == []


def test_agent_without_changes_has_an_empty_report(grading: Grading) -> None:
    before = tree(grading.graded)
    grading.carry()
    assert grading.dropped == []
    assert tree(grading.graded) == before


def replaced_by_link(folder: Path, name: str, moved: str) -> None:
    (folder / name).rename(folder / moved)
    (folder / name).symlink_to(moved)


def fake_python(folder: Path) -> None:
    (folder / ".venv/bin/python").write_text("fake")


def venv_link(agent: Path) -> None:
    replaced_by_link(agent, "backend", "b2")
    fake_python(agent / "b2")


def venv_moved(agent: Path) -> None:
    (agent / "backend/.venv").rename(agent / "v")
    (agent / "v/bin/python").write_text("fake")
    (agent / "backend/.venv").symlink_to("../v")


def venv_file(agent: Path) -> None:
    shutil.rmtree(agent / "backend")
    (agent / "backend").write_text("a file")


def venv_hard_link(agent: Path) -> None:
    python = agent / "backend/.venv/bin/python"
    python.unlink()
    (agent / "fake").write_text("fake")
    os.link(agent / "fake", python)


def conftest_outside(agent: Path) -> None:
    shutil.rmtree(agent / "tests")
    (agent / "tests").symlink_to("/tmp")


def conftest_as_folder(agent: Path) -> None:
    (agent / "tests/conftest.py").unlink()
    write(agent, {"tests/conftest.py/__init__.py": "evil"})


def conftest_as_link(agent: Path) -> None:
    (agent / "tests/conftest.py").unlink()
    (agent / "tests/evil.py").write_text("evil")
    (agent / "tests/conftest.py").symlink_to("evil.py")


def link_to_the_place(agent: Path) -> None:
    shutil.rmtree(agent / "tests")
    (agent / "elsewhere").mkdir()
    (agent / "tests").symlink_to("elsewhere")
    (agent / "elsewhere/conftest.py").write_text("evil")


def everything_removed(agent: Path) -> None:
    shutil.rmtree(agent)
    agent.mkdir()


ATTACKS: dict[str, Callable[[Path], None]] = {
    "the folder of the environment is a link": venv_link,
    "the environment is a link": venv_moved,
    "the folder of the environment is a file": venv_file,
    "the interpreter is a hard link": venv_hard_link,
    "the interpreter is replaced": lambda agent: fake_python(agent / "backend"),
    "the folder of a conftest is a link": lambda agent: replaced_by_link(agent, "tests", "t2"),
    "the folder of a conftest leads out": conftest_outside,
    "the folder of a conftest is removed": lambda agent: shutil.rmtree(agent / "tests"),
    "the conftest is a folder": conftest_as_folder,
    "the conftest is a link": conftest_as_link,
    "the folder of a conftest is a link to another conftest": link_to_the_place,
    "everything is removed": everything_removed,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_protected_files_stay_as_prepared(grading: Grading, attack: Callable[[Path], None]) -> None:
    attack(grading.agent)
    grading.carry()
    for name in ("tests/conftest.py", "backend/.venv/bin/python", "backend/.venv/pyvenv.cfg", "backend/.venv/lib/x.py"):
        assert grading.text(name) == PREPARED[name]


def test_target_of_a_protected_link_is_protected(tmp_path: Path) -> None:
    grading = Grading(
        tmp_path, {"shared/common.py": "prepared", "envs/main/pyvenv.cfg": "", "envs/main/bin/python": "real"}
    )
    for folder in (grading.agent, grading.graded):
        (folder / "conftest.py").symlink_to("step.py")
        (folder / "step.py").symlink_to("shared/common.py")
        (folder / ".venv").symlink_to("envs/main")
    (grading.agent / "shared/common.py").write_text("evil")
    for name in (".venv", "step.py"):
        (grading.agent / name).unlink()
    write(grading.agent, {".venv/bin/python": "fake", "step.py": "evil"})
    grading.carry()
    assert (grading.graded / "conftest.py").read_text() == "prepared"
    assert (grading.graded / ".venv/bin/python").read_text() == "real"
    assert "step.py is the target of a protected link of the prepared state" in grading.dropped


def test_an_environment_in_the_working_directory_itself_is_protected(tmp_path: Path) -> None:
    grading = Grading(tmp_path, {"pyvenv.cfg": "", "bin/python": "real", "app.py": "0"})
    write(grading.agent, {"bin/python": "fake", "app.py": "1"})
    grading.carry()
    assert (grading.text("bin/python"), grading.text("app.py")) == ("real", "1")


def test_folder_replaced_by_a_link_becomes_a_link_and_its_target_is_kept(grading: Grading) -> None:
    shutil.rmtree(grading.agent / "data")
    (grading.agent / "data").symlink_to("other")
    grading.carry()
    assert os.readlink(grading.graded / "data") == "other"
    assert grading.text("other/x") == "good"


def test_folder_with_only_compiled_code_is_deleted_with_its_source(grading: Grading) -> None:
    shutil.rmtree(grading.agent / "lib")
    grading.carry()
    assert not grading.has("lib")


def test_compiled_code_of_the_prepared_state_is_kept(grading: Grading) -> None:
    write(grading.agent, {"lib/__pycache__/m.cpython-311.pyc": "evil", "lib/m.py": "new"})
    grading.carry()
    assert grading.text("lib/__pycache__/m.cpython-311.pyc") == "compiled"
    assert grading.text("lib/m.py") == "new"


def test_files_can_replace_folders_and_folders_files(grading: Grading) -> None:
    (grading.agent / "calc.py").unlink()
    shutil.rmtree(grading.agent / "data")
    write(grading.agent, {"calc.py/inner": "1", "data": "2"})
    grading.carry()
    assert (grading.text("calc.py/inner"), grading.text("data")) == ("1", "2")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(("a", "/etc/passwd"), ("a", ".."), ("new/b", "../../x"), ("a", "./../x"), ("a", "b/../../x"), ("a", "b/..")),
        *(("conftest.py", "x.py"), ("json.py", "x.py"), ("json", "x"), ("hidden/reference", "x"), ("x.pth", "calc.py")),
        *(("__pycache__", "cache"), ("evil.dist-info", "data"), ("new/pyvenv.cfg", "../calc.py")),
    ],
)
def test_links_that_lead_out_or_are_loaded_unasked_are_not_carried(grading: Grading, name: str, target: str) -> None:
    (grading.agent / name).parent.mkdir(exist_ok=True)
    (grading.agent / name).symlink_to(target)
    grading.carry()
    assert not grading.has(name)


@pytest.mark.parametrize(
    ("links", "hidden"),
    [
        ({"a": "e.txt"}, "e.txt"),
        ({"a": "d/e.txt", "d": "."}, "e.txt"),
        ({"a": "e.txt", "e.txt": "calc.py"}, "e.txt"),
        ({"a": "new"}, "new/e.txt"),
        ({"a": "new"}, "new/in/e.txt"),
        ({"a": "data"}, "data/e.txt"),
        ({"a": "src/pkg/e.txt", "src": "other"}, "src/pkg/e.txt"),
        ({"other/a": "../new/e.txt"}, "new/e.txt"),
        ({"a": "d/" + "x/" * 1500, "d": "x/" * 1500}, "e.txt"),
    ],
)
def test_a_link_to_a_hidden_file_is_not_carried(grading: Grading, links: dict[str, str], hidden: str) -> None:
    shutil.rmtree(grading.agent / "src")
    for name, target in links.items():
        (grading.agent / name).symlink_to(target)
    grading.carry(hidden=[hidden])
    assert not grading.has(next(iter(links)))


def test_links_that_take_too_long_to_follow_are_not_carried(grading: Grading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_rules, "_LINKS_BYTES", len(f"{grading.graded}/link") + len(f"{grading.graded}/calc.py"))
    for name in ("link", "second"):
        (grading.agent / name).symlink_to("calc.py")
    grading.carry(hidden=["e.txt"])
    assert grading.has("link") != grading.has("second")
    assert [entry for entry in grading.dropped if "links through too many links or folders" in str(entry)]


def test_a_prepared_link_to_a_hidden_file_and_links_beside_hidden_files_are_carried(tmp_path: Path) -> None:
    grading = Grading(tmp_path)
    for folder in (grading.agent, grading.graded):
        (folder / "prepared").symlink_to("src/pkg/test_a.py")
    (grading.agent / "src/here").symlink_to("../src")
    (grading.agent / "all").symlink_to(".")
    grading.carry(hidden=["src/pkg/test_a.py", "test_b.py"])
    assert all(grading.has(name) for name in ("prepared", "src/here", "all"))
    assert grading.dropped == []


@pytest.mark.parametrize("name", ["kept/test_a/__init__.py", "kept/test_a.abi3.so", "kept/test_a"])
def test_no_importable_file_replaces_a_prepared_test(tmp_path: Path, name: str) -> None:
    grading = Grading(tmp_path, {"kept/test_a.py": "prepared"})
    write(grading.agent, {name: "evil"})
    if name == "kept/test_a":
        replaced_by_link(grading.agent, name, "evil")
    grading.carry(hidden=[])
    assert not grading.has(name)


@pytest.mark.parametrize(
    "name",
    ["__init__.py", "tests/__init__.py", "tests/unit/__init__.py", "tests/unit/helper.py", "tests/subprocess.py"],
)
@pytest.mark.parametrize("is_prepared", [True, False])
def test_modules_beside_prepared_tests_are_not_carried(tmp_path: Path, name: str, *, is_prepared: bool) -> None:
    grading = Grading(tmp_path, {"tests/unit/test_a.py": "prepared"} | ({name: "prepared"} if is_prepared else {}))
    write(grading.agent, {name: "evil", "tests/unit/data.json": "work", "src/test/client.py": "work"})
    grading.carry(hidden=[])
    assert (grading.text(name) if grading.has(name) else None) == ("prepared" if is_prepared else None)
    assert (grading.text("tests/unit/data.json"), grading.text("src/test/client.py")) == ("work", "work")


def test_a_package_under_a_known_name_is_not_planted_among_installed_packages(grading: Grading) -> None:
    folder = ".local/lib/python3.11/site-packages"
    write(grading.agent, {f"{folder}/pluggy/__init__.py": "evil", f"{folder}/mine/json.py": "work"})
    grading.carry()
    assert (grading.has(f"{folder}/pluggy/__init__.py"), grading.text(f"{folder}/mine/json.py")) == (False, "work")


def test_a_program_is_not_planted_before_one_of_the_system(tmp_path: Path) -> None:
    grading = Grading(tmp_path, {"bin/make": "prepared"})
    system = tmp_path / "system"
    write(system, {"python3": "", "make": ""})
    write(grading.agent, {"bin/python3": "evil", "bin/tool": "work", "bin/make": "work"})
    body = json.dumps(rules()).encode() + b"\n" + packed(grading.agent)
    programs = [str(grading.graded.resolve() / "bin"), str(system)]
    piped(write_all(body), lambda stream: carrying.carry(os.path.realpath(grading.graded), stream, programs=programs))
    assert [grading.has(f"bin/{name}") for name in ("python3", "tool", "make")] == [False, True, True]


def test_a_deeply_nested_tree_costs_a_few_opened_folders_an_entry(
    grading: Grading, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth, opened = 300, 0
    real = trees.open_folder

    def counted(parent: int, name: str) -> int:
        nonlocal opened
        opened += 1
        return real(parent, name)

    deep = "d/" * depth
    write(grading.agent, {f"{deep}{name}": name for name in ("a", "b")})
    monkeypatch.setattr("agent_runtime.executor.init.unpacking.open_folder", counted)
    grading.carry()
    assert (grading.graded / deep / "b").read_text() == "b"
    assert opened < 10 * depth


@pytest.mark.parametrize("seconds", [10**12, 2**63 - 1, 2**70, -(2**70)])
def test_files_of_any_time_are_carried(tmp_path: Path, seconds: int) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("work.py")
        member.pax_headers = {"mtime": f"{seconds}.5"}
        tar.addfile(member)
    carry(tmp_path, data.getvalue(), rules())
    assert (tmp_path / "work.py").exists()


def test_links_within_the_working_directory_are_carried(tmp_path: Path) -> None:
    grading = Grading(tmp_path)
    (grading.agent / "current").symlink_to("src/pkg")
    (grading.agent / "src/pkg/up").symlink_to("../../data/x")
    (grading.agent / "absolute").symlink_to(grading.graded.resolve() / "other")
    os.link(grading.agent / "calc.py", grading.agent / "same.py")
    grading.carry()
    assert grading.dropped == []
    assert (grading.graded / "current/a.py").read_text() == "a"
    assert (grading.graded / "src/pkg/up").read_text() == "old"
    assert (grading.graded / "absolute/x").read_text() == "good"
    assert grading.text("same.py") == "prepared"


def test_unchanged_prepared_link_to_outside_is_kept(grading: Grading) -> None:
    for folder in (grading.agent, grading.graded):
        (folder / "system").symlink_to("/usr/share")
    grading.carry()
    assert os.readlink(grading.graded / "system") == "/usr/share"
    assert grading.dropped == []


def test_a_hard_link_to_a_link_is_not_carried_where_it_would_lead_out(grading: Grading) -> None:
    write(grading.agent, {"deep/er/x": "1"})
    (grading.agent / "deep/er/link").symlink_to("../../calc.py")
    os.link(grading.agent / "deep/er/link", grading.agent / "z", follow_symlinks=False)
    grading.carry()
    assert not grading.has("z")


def test_a_module_under_a_standard_name_is_not_reached_through_a_link(grading: Grading) -> None:
    replaced_by_link(grading.agent, "src", "s2")
    write(grading.agent, {"s2/json.py": "evil", "s2/subprocess/__init__.py": "evil", "s2/queue.py": "work"})
    grading.carry()
    assert not grading.has("s2/json.py")
    assert not grading.has("s2/subprocess/__init__.py")
    assert grading.text("s2/queue.py") == "work"  # the prepared state has it under this name


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_file_of_another_user_moved_over_one_like_it_is_carried(tmp_path: Path, size: int) -> None:
    old, new = "x" * size, "x" * (size - 5) + "moved"
    grading = Grading(tmp_path, {"a": old, "b": new, "c": old})
    for place in (*grading.agent.iterdir(), *grading.graded.iterdir()):
        os.chown(place, 1234, 1234)
        os.utime(place, (1_700_000_000, 1_700_000_000))
    (grading.agent / "b").rename(grading.agent / "a")
    grading.carry()
    assert (grading.text("a") == new, grading.has("b"), grading.dropped) == (True, False, [])
    assert (grading.graded / "c").stat().st_uid == 1234  # what was not changed stays that user's


def test_only_files_changed_by_the_agent_use_space_in_the_grading(tmp_path: Path) -> None:
    grading = Grading(tmp_path, {name: f"content of {name}" for name in ("same", "bytes", "mode", "time", "linked")})
    for place in (*grading.agent.iterdir(), *grading.graded.iterdir()):
        os.utime(place, (1_700_000_000, 1_700_000_000))
    before = {place.name: place.stat().st_ino for place in grading.graded.iterdir()}
    (grading.agent / "bytes").write_text("CONTENT of bytes")
    os.utime(grading.agent / "bytes", (1_700_000_000, 1_700_000_000))
    (grading.agent / "mode").chmod(0o755)
    os.utime(grading.agent / "time", (1_600_000_000, 1_600_000_000))
    (grading.agent / "linked").unlink()
    os.link(grading.agent / "bytes", grading.agent / "linked")
    with contextlib.ExitStack() as stack:
        for place in grading.graded.iterdir():
            stack.enter_context(place.open())  # a new file cannot get the inode of an open one
        grading.carry()
    kept = {place.name for place in grading.graded.iterdir() if place.stat().st_ino == before[place.name]}
    assert kept == {"same"}
    assert (grading.text("bytes"), grading.text("linked")) == ("CONTENT of bytes",) * 2
    assert (grading.graded / "mode").stat().st_mode & 0o777 == 0o755
    assert (grading.graded / "time").stat().st_mtime == 1_600_000_000


def test_a_hard_link_to_an_unchanged_protected_file_is_carried(tmp_path: Path) -> None:
    grading = Grading(tmp_path, {"conftest.py": "same", "z/conftest.py": "same", "pkg/a.py": "same"})
    (grading.agent / "pkg/a.py").unlink()
    os.link(grading.agent / "conftest.py", grading.agent / "pkg/a.py")
    grading.carry()
    assert (grading.text("pkg/a.py"), grading.dropped) == ("same", [])


def test_a_module_of_another_system_is_not_reached_through_a_link(grading: Grading) -> None:
    write(grading.agent, {"org/x": "", "there/core.py": "evil", "hidden/org/x": ""})
    (grading.agent / "org/python").symlink_to("../there")
    (grading.agent / "hidden/org/python").symlink_to("../../hidden")
    grading.carry()
    assert not grading.has("org/python/core.py")


def test_a_module_is_not_planted_in_a_folder_that_pytest_adds_for_hidden_tests(grading: Grading) -> None:
    write(grading.agent, {"checks/json.py": "evil", "checks/unit/types.py": "evil"})
    grading.carry(hidden=["checks/unit/__init__.py", "checks/unit/test_a.py"])
    assert not grading.has("checks/json.py")
    assert not grading.has("checks/unit/types.py")


def test_file_named_by_the_job_is_carried_although_it_is_loaded_automatically(grading: Grading) -> None:
    write(
        grading.agent,
        {"pyproject.toml": "work", "sub/pyproject.toml": "evil", "e.egg-info/a": "work", "e.egg-info/b": "x"},
    )
    grading.carry(artifacts=[".", "./pyproject.toml", "e.egg-info/a"])
    assert (grading.text("pyproject.toml"), grading.text("e.egg-info/a")) == ("work", "work")
    assert not grading.has("sub/pyproject.toml")
    assert not grading.has("e.egg-info/b")


def test_only_declared_artifacts_are_carried(grading: Grading) -> None:
    write(grading.agent, {"src/pkg/new.py": "work", "src/pkgs/a": "no", "calc.py": "no"})
    (grading.agent / "src/pkg/a.py").unlink()
    shutil.rmtree(grading.agent / "data")
    grading.carry(artifacts=["src/pkg"])
    assert (grading.text("src/pkg/new.py"), grading.text("calc.py")) == ("work", "prepared")
    assert not grading.has("src/pkg/a.py")
    assert not grading.has("src/pkgs")
    assert grading.text("data/x") == "old"
    assert grading.dropped == []


@pytest.mark.parametrize(
    "name", ["__init__.py", "tests/__init__.py", "tests/unit/__init__.py", "tests.py", "tests/unit.so"]
)
def test_modules_run_or_imported_for_the_folders_of_hidden_tests_are_not_carried(tmp_path: Path, name: str) -> None:
    grading = Grading(tmp_path, {"calc.py": "c"})
    write(grading.agent, {name: "evil"})
    grading.carry(hidden=["tests/unit/test_calc.py", "tests/unit/helper.py"])
    assert not grading.has(name)
    assert grading.dropped


@pytest.mark.parametrize("name", ["tests.py", "tests.so", "tests/unit.abi3.so"])
def test_a_link_is_not_imported_in_place_of_a_folder_of_hidden_tests(tmp_path: Path, name: str) -> None:
    grading = Grading(tmp_path, {"calc.py": "c", "tests/data": "d"})
    write(grading.agent, {"impl.py": "evil"})
    (grading.agent / name).symlink_to(grading.agent / "impl.py")
    grading.carry(hidden=["tests/unit/test_calc.py", "tests/unit/helper.py"])
    assert not os.path.lexists(grading.graded / name)
    assert grading.dropped


def test_a_module_is_not_reached_through_a_link_to_a_folder_of_packages(grading: Grading) -> None:
    write(grading.agent, {"stuff/pytest.py": "evil", "stuff/app.py": "work"})
    (grading.agent / ".local" / "lib").mkdir(parents=True)
    (grading.agent / ".local" / "lib" / "site-packages").symlink_to("../../stuff")
    grading.carry()
    assert [grading.has(f"stuff/{name}") for name in ("pytest.py", "app.py")] == [False, True]


@pytest.mark.parametrize("name", ["__init__.py", "tests/__init__.py"])
def test_a_prepared_module_that_pytest_runs_before_hidden_tests_stays_as_prepared(tmp_path: Path, name: str) -> None:
    grading = Grading(tmp_path, {name: "prepared"})
    write(grading.agent, {name: "evil"})
    grading.carry(hidden=["tests/unit/test_calc.py", "tests/test_calc.py"])
    reason = RUN_FIRST if name == "__init__.py" else OF_TESTS
    assert (grading.text(name), grading.dropped) == ("prepared", [f"{name} {reason}"])


@pytest.mark.parametrize("name", ["pkg/__init__.py", "pkg.py"])
def test_a_prepared_module_beside_hidden_tests_is_the_agents_to_change(tmp_path: Path, name: str) -> None:
    grading = Grading(tmp_path, {name: "prepared"})
    write(grading.agent, {name: "work"})
    grading.carry(hidden=["tests/unit/test_calc.py", "pkg/tests/test_calc.py"])
    assert grading.text(name) == "work"


def test_a_module_is_not_planted_in_a_new_folder_of_the_verifiers_pythonpath(grading: Grading) -> None:
    write(grading.agent, {"new/src/queue.py": "evil", "new/src/app.py": "work", "new/src/app/types.py": "work"})
    (form,) = rules(artifacts=["."], hidden=HIDDEN)
    grading.dropped = carry(grading.graded, packed(grading.agent), [{**form, "importRoots": ["new/src"]}])
    assert [grading.has(f"new/src/{name}") for name in ("queue.py", "app.py", "app/types.py")] == [False, True, True]


@pytest.mark.parametrize(
    "command",
    [
        "PYTHONPATH=new/src pytest -q",
        "cd . && PYTHONPATH='lib':\"$PWD/new/src\" pytest",
        "export PYTHONPATH=new/src:lib; x",
        "cd new/src && python3 -m check",
        "cd new && cd src && python3 -m check",
        "(cd -- \"$PWD/new/src\"; python3 -c 'import app')",
        "python3 -c 'import os; os.chdir(\"new/src\"); import app'",
        'python3 -c \'import subprocess as s; s.run(["python3", "-m", "app"], cwd="new/src")\'',
    ],
)
def test_the_folders_of_a_pythonpath_in_a_command_are_import_roots(command: str) -> None:
    task = Task.model_validate({"name": "t", "prompt": "p", "verifier": {"commands": [command]}})
    assert "new/src" in carry_rules(task, Verifier(), "/workspace")[1][0]["importRoots"]


@pytest.mark.parametrize(
    ("command", "env", "content"),
    [
        ('PATH="$PWD/tools:$PATH" run', {}, ""),
        ("export PATH=tools/:$PATH; run", {}, ""),
        ("PATH=$(pwd)/tools:$PATH run", {}, ""),
        ("run", {"PATH": "/workspace/tools:/usr/bin"}, ""),
        ("sh run.sh", {}, 'export PATH="$(pwd)/tools:$PATH"\nrun\n'),
        ("cd tools && PATH=.:$PATH run", {}, ""),
        ("cd ./tools; PATH=:$PATH run", {}, ""),
        ("pushd tools; PATH=$PWD/../tools:$PATH run", {}, ""),
    ],
)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_program_is_not_planted_in_a_new_folder_of_the_verifiers_path(
    grading: Grading, command: str, env: dict[str, str], content: str, is_link: bool
) -> None:
    write(grading.agent, {"mine/cat" if is_link else "tools/cat": "evil", "tools2/x": "", "mine/solve": "work"})
    if is_link:
        (grading.agent / "tools").symlink_to("mine")
    variables = [{"name": name, "value": value} for name, value in env.items()]
    script = base64.b64encode(content.encode()).decode()
    verifier = {"commands": [command], "env": variables, "files": [{"path": "run.sh", "contentBase64": script}]}
    _, form = carry_rules(
        Task.model_validate({"name": "t", "prompt": "p", "verifier": verifier}), Verifier(), "/workspace"
    )
    grading.dropped = carry(grading.graded, packed(grading.agent), form)
    assert [grading.has("tools/cat"), grading.has("mine/solve")] == [False, True]
    assert any("would be run in place of cat" in line for line in grading.dropped)


@pytest.mark.parametrize("path", ["/workspace:/usr/bin", ":/usr/bin", "/usr/bin:"])
def test_a_program_is_not_planted_in_the_working_directory_on_the_verifiers_path(grading: Grading, path: str) -> None:
    write(grading.agent, {"cat": "evil", "solve": "work"})
    verifier = {"commands": ["run"], "env": [{"name": "PATH", "value": path}]}
    task = Task.model_validate({"name": "t", "prompt": "p", "verifier": verifier})
    carry(grading.graded, packed(grading.agent), carry_rules(task, Verifier(), "/workspace")[1])
    assert (grading.has("cat"), grading.text("solve")) == (False, "work")


def test_prepared_file_that_the_workspaces_user_cannot_read_is_kept(
    grading: Grading, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("data/x", "calc.py"):
        (grading.agent / name).unlink()
    monkeypatch.setattr(carrying, "_may_read", lambda _parent, name: name != "x")
    grading.carry()
    assert (grading.text("data/x"), grading.has("calc.py")) == ("old", False)


def git(folder: Path, *arguments: str) -> str:
    """Run git as a verifier does, without this machine's own settings."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


EVIL = "[core]\n\tfsmonitor = touch evil; false\n\thooksPath = .\n"
REPOSITORIES = {
    "settings of the prepared repository": {".git/config": EVIL},
    "settings of a worktree": {".git/config.worktree": EVIL, ".git/hooks/pre-commit": "#!/bin/sh\ntouch evil\n"},
    "settings of a home": {".gitconfig": EVIL, ".config/git/config": EVIL},
    "another repository": {".git": "gitdir: other\n", "other/HEAD": "ref: refs/heads/main\n", "other/config": EVIL}
    | {f"other/{folder}/kept": "" for folder in ("objects", "refs")},
    "a repository in two folders": {".git": "gitdir: a\n", "a/HEAD": "ref: refs/heads/main\n", "a/commondir": "../b\n"}
    | {"b/config": EVIL, "b/objects/kept": "", "b/refs/kept": ""},
}


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("planted", REPOSITORIES.values(), ids=REPOSITORIES)
def test_git_runs_no_program_that_the_agent_named(
    tmp_path: Path, planted: dict[str, str], *, is_prepared: bool
) -> None:
    grading = Grading(tmp_path, {"a.txt": "a"})
    for folder in (grading.agent, *([grading.graded] if is_prepared else [])):
        git(folder, "init", "-q")
    if ".git" in planted:
        shutil.rmtree(grading.agent / ".git")
    write(grading.agent, planted)
    for hook in (grading.agent / ".git/hooks").glob("*"):
        hook.chmod(0o755)
    grading.carry()
    with contextlib.suppress(subprocess.CalledProcessError):
        git(grading.graded, "status")
        git(grading.graded, "-c", "user.name=a", "-c", "user.email=a", "commit", "--allow-empty", "-m", "x")
    assert not grading.has("evil")
    assert grading.dropped


@pytest.mark.parametrize("is_prepared", [True, False])
def test_commits_branches_and_tags_of_the_agent_are_carried(tmp_path: Path, *, is_prepared: bool) -> None:
    grading = Grading(tmp_path, {"a.txt": "a"})
    for folder in (grading.agent, *([grading.graded] if is_prepared else [])):
        git(folder, "init", "-q", "-b", "main")
    git(grading.agent, "config", "user.name", "a")
    git(grading.agent, "config", "user.email", "a")
    git(grading.agent, "add", "a.txt")
    git(grading.agent, "commit", "-q", "-m", "the work")
    git(grading.agent, "tag", "v1")
    git(grading.agent, "switch", "-q", "-c", "topic")
    git(grading.agent, "gc", "-q")
    git(grading.agent, "worktree", "add", "-q", "beside", "v1")
    grading.carry()
    assert git(grading.graded, "log", "--format=%s %D").split(", ")[:3] == [
        "the work HEAD -> topic",
        "tag: v1",
        "main\n",
    ]
    assert git(grading.graded, "show", "v1:a.txt") == "a"
    assert git(grading.graded, "fsck") == ""


def test_settings_and_hooks_of_git_are_carried_where_the_job_names_them(tmp_path: Path) -> None:
    grading = Grading(tmp_path, {"a.txt": "a"})
    git(grading.agent, "init", "-q")
    git(grading.agent, "remote", "add", "origin", "https://example.com/x")
    write(grading.agent, {".git/hooks/pre-push": "work", "config": "work", "etc/hooks/a": "work"})
    grading.carry(artifacts=[".", ".git/config", ".git/hooks"])
    assert git(grading.graded, "remote") == "origin\n"
    names = (".git/hooks/pre-push", "config", "etc/hooks/a")
    assert [grading.text(name) for name in names] == ["work", "work", "work"]


class Artifacts(Grading):
    """A grading of files and folders that the task names, anywhere below the root."""

    def carry_all(self, *artifacts: str, env: dict[str, str] | None = None, working_dir: str = "/w") -> None:
        variables = [{"name": name, "value": value} for name, value in (env or {}).items()]
        verifier = {"commands": ["run"], "artifacts": artifacts, "env": variables}
        task = Task.model_validate({"name": "t", "prompt": "p", "verifier": verifier})
        base, form = carry_rules(task, Verifier(), working_dir)
        assert base == "/"
        self.dropped = carry(self.graded, packed(self.agent, [entry["root"] for entry in form]), form)


def test_each_artifact_is_carried_to_its_own_path(tmp_path: Path) -> None:
    prepared = {"data/b": "old", "data/c": "old", "out/x/y": "old", "gone/a": "old", "was/file": "old"}
    grading = Artifacts(tmp_path, prepared)
    write(grading.agent, {"data/b": "new", "data/c": "new", "new/deep/conftest.py": "work", "out/z": "new"})
    for name in ("out/x", "gone", "was"):
        shutil.rmtree(grading.agent / name)
    write(grading.agent, {"was": "now a file"})
    grading.carry_all("/data/b", "/new/deep/conftest.py", "/out", "/gone/a", "/was", "/never", "/out/z")
    texts = {name: grading.text(name) for name in ("data/b", "data/c", "new/deep/conftest.py", "out/z", "was")}
    assert list(texts.values()) == ["new", "old", "work", "new", "now a file"]
    assert not any(grading.has(name) for name in ("gone/a", "out/x", "never"))
    assert grading.dropped == []


def test_path_that_a_task_names_besides_its_folder_is_always_carried(tmp_path: Path) -> None:
    grading = Artifacts(tmp_path, {"w/pyproject.toml": "old", "w/conftest.py": "old"})
    write(grading.agent, {"w/pyproject.toml": "new", "w/conftest.py": "new", "out/x": "new"})
    grading.carry_all(".", "pyproject.toml", "/out")
    assert [grading.text(name) for name in ("w/pyproject.toml", "w/conftest.py", "out/x")] == ["new", "old", "new"]


def test_artifact_behind_a_prepared_link_is_carried_to_the_links_target(tmp_path: Path) -> None:
    grading = Artifacts(tmp_path, {"srv/app/a": "old"})
    for folder in (grading.agent, grading.graded):
        (folder / "app").symlink_to("srv/app")
    write(grading.agent, {"srv/app/a": "new"})
    grading.carry_all("/app")
    assert (grading.text("srv/app/a"), os.readlink(grading.graded / "app")) == ("new", "srv/app")


def test_a_folder_of_artifacts_is_protected_as_a_working_directory_is(tmp_path: Path) -> None:
    grading = Artifacts(tmp_path, {"app/x": "", "env/bin/python": "real", "env/pyvenv.cfg": ""})
    planted = ("app/bin/cat", "app/lib/json.py", "app/conftest.py", "app/types.py", "new/json.py", "env/bin/pip")
    write(grading.agent, dict.fromkeys(planted, "evil") | {"app/bin/tool": "work", "env/bin/python": "evil"})
    (grading.agent / "app/leak").symlink_to("/tests/answer")
    (grading.agent / "app/up").symlink_to("../tests/answer")
    (grading.agent / "new/other").symlink_to("../app/x")
    grading.carry_all("/app", "/new", "/env", env={"PATH": "/app/bin:/usr/bin", "PYTHONPATH": "/app/lib"})
    assert not any(grading.has(name) for name in (*planted, "app/leak", "app/up"))
    assert (grading.text("app/bin/tool"), grading.text("env/bin/python")) == ("work", "real")
    assert os.readlink(grading.graded / "new/other") == "../app/x"
    assert "app/bin/cat would be run in place of cat" in grading.dropped


def test_a_link_of_one_artifact_into_another_hides_nothing_that_was_planted_there(tmp_path: Path) -> None:
    grading = Artifacts(tmp_path, {"app/lib/x": "", "out/x": ""})
    write(
        grading.agent, {"out/lib/json.py": "evil", "out/lib/work.py": "work", "out/bin/cat": "evil", "out/bin/tool": ""}
    )
    shutil.rmtree(grading.agent / "app/lib")
    for name in ("lib", "bin"):
        (grading.agent / f"app/{name}").symlink_to(f"../out/{name}")
    grading.carry_all("/app", "/out", env={"PATH": "/app/bin:/usr/bin", "PYTHONPATH": "/app/lib"})
    assert (os.readlink(grading.graded / "app/lib"), grading.text("out/lib/work.py")) == ("../out/lib", "work")
    assert not any(grading.has(name) for name in ("out/lib/json.py", "out/bin/cat"))
    assert grading.has("out/bin/tool")


def test_an_artifact_named_as_a_module_of_python_becomes_no_package(tmp_path: Path) -> None:
    grading = Artifacts(tmp_path, {"app/code/x.py": "", "app/email/__init__.py": "prepared"})
    write(grading.agent, {f"{name}/__init__.py": "agent" for name in ("app/code", "app/email", "out/code")})
    grading.carry_all("/app/code", "/app/email", "/out/code", env={"PYTHONPATH": "/app"})
    assert not grading.has("app/code/__init__.py")
    assert grading.text("app/email/__init__.py") == grading.text("out/code/__init__.py") == "agent"


@pytest.mark.parametrize("artifact", ["/app/tests", "/app/tests/unit", "/tests"])
def test_tests_are_protected_in_an_artifact_that_is_a_folder_of_tests(tmp_path: Path, artifact: str) -> None:
    folder = artifact.removeprefix("/")
    prepared = {f"{folder}/{name}": "prepared" for name in ("test_a.py", "helper.py", "check.py", "data")}
    grading = Artifacts(tmp_path, prepared)
    write(grading.agent, dict.fromkeys([*prepared, f"{folder}/new.py"], "agent"))
    grading.carry_all(artifact, "/elsewhere", working_dir="/app")
    texts = {name: grading.text(name) for name in prepared}
    assert texts == {name: "agent" if name.endswith("data") else "prepared" for name in prepared}
    assert not grading.has(f"{folder}/new.py")


def test_an_artifact_below_a_folder_of_tests_above_the_working_directory_is_work(tmp_path: Path) -> None:
    grading = Artifacts(tmp_path, {"test/app/src/a.py": "old", "test/app/src/test_a.py": "prepared"})
    write(grading.agent, {"test/app/src/a.py": "work"})
    grading.carry_all("/test/app/src", "/elsewhere", working_dir="/test/app")
    assert grading.text("test/app/src/a.py") == "work"


def test_link_to_kernel_files_in_place_of_an_artifact_can_be_packed(tmp_path: Path) -> None:
    """Most of them yield fewer bytes than their size, others an error. The policy must not be able to imitate a broken
    disk.
    """
    (tmp_path / "out").symlink_to("/sys/devices/virtual/mem/null")
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path, ["out"]))) as archive:
        sizes = {member.name: member.size for member in archive}
    assert {"out/dev", "out/power/autosuspend_delay_ms"} <= sizes.keys()


def test_a_tar_that_returns_to_an_earlier_artifact_is_refused(tmp_path: Path) -> None:
    grading = Artifacts(tmp_path, {})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("a/x", "b/x", "a/json.py"):
            archive.addfile(tarfile.TarInfo(name))
    (form,) = rules()
    with pytest.raises(Refused, match="do not follow one another"):
        carry(grading.graded, buffer.getvalue(), [{**form, "root": "a"}, {**form, "root": "b"}])


def test_a_new_package_that_hidden_tests_lie_in_is_carried(tmp_path: Path) -> None:
    grading = Grading(tmp_path, {"calc.py": "c"})
    write(grading.agent, {"src/pkg/__init__.py": "work"})
    grading.carry(hidden=["src/pkg/tests/test_calc.py"])
    assert grading.text("src/pkg/__init__.py") == "work"


def test_the_verdict_tells_at_most_a_hundred_names_in_plain_text(grading: Grading) -> None:
    write(grading.agent, {f"{number}.pth": "" for number in range(150)} | {os.fsdecode(b"\xff\n/conftest.py"): ""})
    grading.carry()
    assert len(grading.dropped) == 101
    assert "\n".join(grading.dropped).isprintable() or all(line.isprintable() for line in grading.dropped)
    "".join(grading.dropped).encode()


def test_read_only_folders_are_carried_with_their_modes(grading: Grading) -> None:
    write(grading.agent, {"ro/a": "1"})
    (grading.agent / "ro").chmod(0o555)
    (grading.graded / "data").chmod(0o555)
    (grading.agent / "data/x").write_text("new")
    grading.carry()
    assert (grading.graded / "ro").stat().st_mode & 0o777 == 0o555
    assert grading.text("data/x") == "new"


def test_a_name_that_leads_out_of_the_folder_is_refused(grading: Grading) -> None:
    for name in ("../evil", "/evil", "a/../../evil"):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.addfile(tarfile.TarInfo(name))
        with pytest.raises(Refused):
            carry(grading.graded, buffer.getvalue(), rules())


@given(st.binary(max_size=2000))
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_bytes_other_than_a_tar_are_refused_or_empty(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Refused):
        carry(Path(folder), data, rules())


def test_hidden_files_replace_links_and_files_where_their_folders_belong(grading: Grading, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (grading.graded / "hidden").symlink_to(outside)
    (grading.graded / "checks").write_text("a file")
    source = tmp_path / "source"
    write(source, {"hidden/test_calc.py": "1", "checks/deep/b": "2", "data": "3"})
    unpack(grading.graded, packed(source), "replace")
    assert [grading.text(name) for name in ("hidden/test_calc.py", "checks/deep/b", "data")] == ["1", "2", "3"]
    assert list(outside.iterdir()) == []


# Random trees, and an agent that does anything with them

NAMES = st.sampled_from(
    [
        "a",
        "b",
        "tests",
        "src",
        "conftest.py",
        "test_a.py",
        "x.py",
        "json.py",
        "v.pth",
        "e.egg-info",
        "pyvenv.cfg",
        "lib",
    ]
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), PATHS, st.sampled_from(["1", "2"])),
        st.tuples(st.just("remove"), PATHS, st.just("")),
        st.tuples(st.just("move"), PATHS, PATHS),
        st.tuples(st.just("hard link"), PATHS, PATHS),
        st.tuples(st.just("link"), PATHS, st.one_of(PATHS, st.sampled_from(["..", "../a", "/tmp", ".", "../../x"]))),
    ),
    max_size=12,
)


def act(folder: Path, step: tuple[str, str, str]) -> None:
    """Do one thing that an agent may do; ignore what is impossible."""
    what, name, other = step
    place = folder / name
    with contextlib.suppress(OSError, shutil.Error, RuntimeError):
        if not place.parent.resolve().is_relative_to(folder.resolve()):
            return
        if what == "write":
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.is_symlink():
                place.write_text(other)
        elif what == "remove":
            shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        elif what == "move":
            place.rename(folder / other)
        elif what == "hard link":
            os.link(place, folder / other, follow_symlinks=False)
        else:
            place.symlink_to(other)


def tree(folder: Path) -> dict[str, tuple[str, str]]:
    """Return kind and content of everything in a folder; links are not followed."""
    found: dict[str, tuple[str, str]] = {}
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            place = Path(parent) / name
            kind = kind_of(place.lstat().st_mode)
            content = os.readlink(place) if kind == "link" else place.read_text() if kind == "file" else ""
            found[str(place.relative_to(folder))] = (kind, content)
    return found


def within(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


@given(STEPS, STEPS)
@example(
    [("write", "a", ""), ("link", "conftest.py", "b/a/e.egg-info/a")], [("write", "b/a/e.egg-info/a", "import os")]
)
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_carried_folder_has_prepared_protected_files_and_the_agents_others(
    preparation: list[tuple[str, str, str]], work: list[tuple[str, str, str]]
) -> None:
    decides = Rules(*rules())
    with tempfile.TemporaryDirectory() as root:
        agent, graded = Path(root) / "agent", Path(root) / "graded"
        graded.mkdir()
        for step in preparation:
            act(graded, step)
        shutil.copytree(graded, agent, symlinks=True)
        for step in work:
            act(agent, step)
        prepared, made = tree(graded), tree(agent)
        carry(graded, packed(agent), rules())
        after = tree(graded)

    environments = [os.path.dirname(path) for path in prepared if path.endswith("/pyvenv.cfg")]
    protected = [
        path
        for path, (kind, _) in prepared.items()
        if decides.loaded(path, kind) is not None or within(path, environments)  # type: ignore[arg-type]
    ]
    if "pyvenv.cfg" in prepared:
        protected += [path for path in prepared if within(path, ["lib", "pyvenv.cfg"])]
    for path in protected:
        assert after.get(path) == prepared[path], "a protected path is not as it was prepared"
    for path, (kind, _) in after.items():
        # An empty folder, as on the way to the target of a prepared link, has nothing that could be loaded.
        is_empty = kind == "folder" and not any(within(other, [path]) for other in after if other != path)
        if decides.loaded(path, kind) is not None and not is_empty:  # type: ignore[arg-type]
            assert prepared.get(path) == after[path], "something is loaded unasked that was not prepared"
    links = [path for path, (kind, _) in prepared.items() if kind == "link"]
    if links:
        return  # what protected links lead to is protected as well
    ways = {os.path.dirname(path) for path in protected}
    for path, (kind, content) in made.items():
        module = decides.imported_as(path, kind)  # type: ignore[arg-type]
        is_ordinary = decides.loaded(path, kind) is None and not within(path, protected)  # type: ignore[arg-type]
        if (
            kind == "file"
            and is_ordinary
            and not within(path, environments)
            and not (module and decides.is_shadowed(module))
        ):
            if "pyvenv.cfg" in prepared and within(path, ["lib"]):
                continue
            is_hard_linked = list(made.values()).count((kind, content)) > 1
            assert after.get(path) == (kind, content) or path in ways or is_hard_linked, "work of the agent is lost"
    for path in after:
        assert path in made or within(path, protected) or any(within(kept, [path]) for kept in protected), "not deleted"
