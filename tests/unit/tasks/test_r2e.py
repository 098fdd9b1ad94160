"""Instances of R2E-Gym as tasks: which tests decide, and what is wrong with a row."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.tasks.in_sandbox.sealed_tests import crypt
from agent_runtime.tasks.r2e import task_of
from agent_runtime.tasks.table import RowError

INSTANCE = {
    "repo_name": "orange3",
    "commit_hash": "2d9617bd0cb1f0ba61771258410ab8fae8e7e24d",
    "docker_image": "example/orange3:2d9617",
    "problem_statement": "Contexts are wrong.",
    "expected_output_json": '{"\\u001b[1mTestA.test_b[x]\\u001b[0m - x": "PASSED", "test_c": "FAILED", "test_d": "PASSED"}',
    "parsed_commit_content": '{"old_commit_hash": "abcdef1234^", "new_commit_hash": "2d9617bd"}',
}


def test_tests_that_pass_with_the_fix_grade_and_are_not_visible_before() -> None:
    task = task_of(INSTANCE)
    assert task.verifier is not None
    assert task.name == "orange3-2d9617bd0cb1f0ba61771258410ab8fae8e7e24d"
    assert task.verifier.tests == ["TestA.test_b[x]", "test_d"]
    assert "for revision in 'abcdef1234^' HEAD" in task.setup[1]
    assert "test_d" not in "".join(task.setup) + task.prompt
    assert task.sandbox.image == "example/orange3:2d9617"


def test_of_names_that_become_equal_the_last_one_counts() -> None:
    expected = '{"test_e[2 - 1]": "PASSED", "test_e[2": "FAILED", "test_f[a - b]": "PASSED", "test_f[a - c]": "FAILED"}'
    verifier = task_of({**INSTANCE, "expected_output_json": expected[:-1] + ', "test_g": "PASSED"}'}).verifier
    assert verifier is not None
    assert verifier.tests == ["test_e[2", "test_g"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"docker_image": None}, "docker_image: is missing or empty"),
        ({"expected_output_json": "{"}, "expected_output_json: is text that is not JSON"),
        (
            {"expected_output_json": "[]"},
            "expected_output_json: is not a JSON object of test names and PASSED or FAILED",
        ),
        ({"expected_output_json": '{"a": "FAILED"}'}, "expected_output_json: has no test that is PASSED"),
        ({"repo_name": "a b"}, 'name: "a b-2d9617bd0cb1f0ba61771258410ab8fae8e7e24d" does not have the expected form'),
    ],
)
def test_broken_row_is_reported_with_its_column(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=r"\S") as caught:
        task_of({**INSTANCE, **change})
    assert caught.value.messages[0].startswith(message)


@pytest.mark.parametrize("content", ["{}", "no json", '{"old_commit_hash": "$(rm -rf /)"}', None])
def test_row_without_the_earlier_commit_uses_the_commit_of_the_image(content: str | None) -> None:
    assert "for revision in HEAD;" in task_of({**INSTANCE, "parsed_commit_content": content}).setup[1]


@given(st.text(), st.binary(max_size=3000))
def test_encrypted_text_opens_only_with_its_key(key: str, data: bytes) -> None:
    sealed = crypt(key, data)
    assert crypt(key, sealed) == data
    assert len(data) < 16 or crypt(f"{key}x", sealed) != data != sealed


def test_tests_are_hidden_and_restored_unchanged_beside_planted_links(tmp_path: Path) -> None:
    program = Path(crypt.__code__.co_filename)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "test_1.py").write_text("secret")
    (tmp_path / "r2e_tests").symlink_to("elsewhere")
    (tmp_path / "run_tests.sh").write_text("pytest r2e_tests")

    def run(verb: str) -> None:
        subprocess.run([sys.executable, program, verb, "key"], cwd=tmp_path, check=True)

    run("seal")
    assert os.listdir(tmp_path) == [".rollout-sealed"]
    assert b"secret" not in (tmp_path / ".rollout-sealed" / "tests").read_bytes()
    (tmp_path / "r2e_tests").write_text("in the way")
    (tmp_path / "run_tests.sh").mkdir()
    run("open")
    assert (tmp_path / "r2e_tests" / "test_1.py").read_text() == "secret"
    assert (tmp_path / "run_tests.sh").read_text() == "pytest r2e_tests"
