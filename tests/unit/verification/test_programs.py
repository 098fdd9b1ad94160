"""A verifier that cannot start is distinguished from a test that failed."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.grading.programs import first_program, probe_script


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("pytest -q", "pytest"),
        ("cd sub && A=1 B='x y' python3 -m pytest -q", "python3"),
        ("export X=1; cargo test", "cargo"),
        ("/usr/bin/env bash t.sh", "/usr/bin/env"),
        ("set -e\ncargo test", None),
        ("./run.sh", None),
        ("sub/tool", None),
        ("if true; then cargo test; fi", None),
        ("cargo test || true", None),
        ("$TOOL run", None),
        ("run() { cargo test; }; run", None),
        ("run () {\n  cargo test\n}\nrun", None),
        ("PATH=/opt/bin:$PATH tool", None),
        ("export PATH=/opt/bin; tool", None),
        ('"unfinished', None),
        ("[ -f x ]", None),
        ("", None),
    ],
)
def test_first_program_is_found_only_where_it_is_certain(command: str, program: str | None) -> None:
    found = first_program(command)
    assert (found[0] if found else None) == program


def probe(command: str, path: str = "/usr/bin:/bin") -> str:
    script = probe_script(command)
    assert script is not None
    return subprocess.run(
        ["/bin/sh", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True
    ).stdout


def test_missing_program_is_named_and_an_existing_one_is_not() -> None:
    assert probe("no-such-program --version") == "program no-such-program\n"
    assert probe("sh -c true") == ""


def test_python_without_pytest_is_reported_before_it_fails(tmp_path: object) -> None:
    python = shutil.which("python3")
    assert python is not None
    script = probe_script("python3 -m pytest -q")
    assert script is not None
    without = subprocess.run(
        ["/bin/sh", "-c", script.replace("python3 -c", "python3 -S -I -c")],
        env={"PATH": f"{python.rpartition('/')[0]}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert without.stdout == "module pytest\n"


@given(st.text(max_size=60))
def test_any_command_gives_a_script_that_the_shell_accepts(command: str) -> None:
    script = probe_script(command)
    if script is not None:
        assert subprocess.run(["/bin/sh", "-n", "-c", script], check=False).returncode == 0
