"""Instances of SWE-bench as tasks: errors of a data set are reported before the first model call."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.tasks import LoadedTasks, TaskSourceError, load_tasks
from agent_runtime.tasks.repository import patched_paths, solution
from agent_runtime.tasks.swe_bench import files_of, name_if_valid, runner_of, task_of
from agent_runtime.tasks.table import RowError
from rollout_api.tasks import Tasks

PATCH = "diff --git a/src/m.py b/src/m.py\n--- a/src/m.py\n+++ b/src/m.py\n@@ -1 +1 @@\n-a\n+b\n"
INSTANCE = {
    "instance_id": "django__django-11099",
    "repo": "django/django",
    "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
    "problem_statement": "UsernameValidator allows a trailing newline.",
    "patch": PATCH,
    "test_patch": PATCH.replace("src/m", "tests/test_m"),
    "FAIL_TO_PASS": '["tests/test_m.py::test_a"]',
    "PASS_TO_PASS": '["tests/test_m.py::test_b[x::y]", "tests/other.py::T::test_c"]',
}


def load(folder: Path, rows: list[dict[str, Any]], image_template: str | None = None, **fields: Any) -> LoadedTasks:
    (folder / "i.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = {"from": {"uri": "i.jsonl", "format": "SWEBench", **fields}, "imageTemplate": image_template}
    return load_tasks(Tasks.model_validate(source), folder, {})


def test_an_instance_is_graded_by_all_its_tests_and_carries_its_patch_alone(tmp_path: Path) -> None:
    (task,) = load(tmp_path, [{**INSTANCE, "repo": "psf/requests"}]).tasks
    verifier = task.verifier
    assert verifier is not None
    assert (task.name, task.tags) == ("django__django-11099", ["psf/requests"])
    assert verifier.tests == ["tests/test_m.py::test_a", "tests/test_m.py::test_b[x::y]", "tests/other.py::T::test_c"]
    assert verifier.reward == "AllOrNothing"
    assert verifier.artifacts == [".rollout-patch"]
    assert verifier.commands[0].endswith(" tests/other.py tests/test_m.py")
    assert "tests/test_m.py" not in "".join(task.setup) + task.prompt, "a hidden test is named before the grading"
    assert "+b" not in task.prompt


def test_progress_of_pytest_in_the_list_of_tests_is_no_test() -> None:
    kept = '["[100%]", "tests/test_m.py::test_b[100%]", "[ 50%]"]'
    verifier = task_of({**INSTANCE, "repo": "pytest-dev/pytest", "PASS_TO_PASS": kept}).verifier
    assert verifier is not None
    assert verifier.tests == ["tests/test_m.py::test_a", "tests/test_m.py::test_b[100%]"]
    only_progress = {**INSTANCE, "FAIL_TO_PASS": '["[100%]", "[ 5%]"]', "PASS_TO_PASS": '["tests/test_m.py::test_a"]'}
    assert name_if_valid(only_progress) is None
    with pytest.raises(RowError, match="FAIL_TO_PASS: names no test"):
        task_of(only_progress)


def test_the_image_is_that_of_the_instance(tmp_path: Path) -> None:
    def image(row: dict[str, Any], **fields: Any) -> str | None:
        (task,) = load(tmp_path, [{**INSTANCE, **row}], **fields).tasks
        return task.sandbox.image

    assert image({}) == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert image({}, image_template="mirror/{name}:v1") == "mirror/django__django-11099:v1"
    assert image({"docker_image": "own:1"}, image_template="mirror/{name}:v1") == "own:1"
    assert image({"where": "mapped:1", "image_name": "own:1"}, columns={"image": "where"}) == "mapped:1"


def test_parquet_with_real_lists_is_the_same_task_as_json_in_text(tmp_path: Path) -> None:
    lists = {**INSTANCE, **{name: json.loads(INSTANCE[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}}
    pq.write_table(pa.Table.from_pylist([{**lists, "hints_text": "unused"}]), tmp_path / "i.parquet")
    source = Tasks.model_validate({"from": {"uri": "i.parquet", "format": "SWEBench"}})
    assert list(load_tasks(source, tmp_path, {}).tasks) == list(load(tmp_path, [INSTANCE]).tasks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instance_id": None}, "instance_id: is missing or empty"),
        ({"instance_id": "a b"}, 'name: "a b" does not have the expected form'),
        ({"base_commit": "main"}, "base_commit: 'main' is not a commit id; expected 40 hexadecimal digits"),
        ({"problem_statement": 5}, "problem_statement: is 5, expected text"),
        ({"test_patch": ""}, "test_patch: is missing or empty: it must contain the hidden tests"),
        ({"patch": "see #5"}, "patch: is not a git patch: expected lines that begin with 'diff --git'"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: names no test: doing nothing would pass; expected the tests"),
        ({"FAIL_TO_PASS": "['a']"}, "FAIL_TO_PASS: is \"['a']\"; expected a list of test names, or JSON text of one"),
        ({"FAIL_TO_PASS": '{"a": 1}'}, r'FAIL_TO_PASS: is "{\"a\": 1}"; expected a list of test names'),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS: is [1]; expected a list of test names"),
        ({"PASS_TO_PASS": None}, "PASS_TO_PASS: is missing; expected a list of test names"),
    ],
)
def test_broken_instance_is_reported_with_its_line_among_all_others(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskSourceError) as caught:
        load(tmp_path, [INSTANCE, {**INSTANCE, "instance_id": "x-2", **change}, INSTANCE])
    first, last = str(caught.value).splitlines()
    assert first.startswith(f"i.jsonl:2: {message}")
    assert last.startswith("i.jsonl:3: name: a task named 'django__django-11099' already exists in line 1")


def test_repositories_with_a_runner_of_their_own_are_run_by_it() -> None:
    patched = ["tests/auth_tests/test_forms.py", "tests/auth_tests/test_forms.py", "docs/a.txt"]
    verifier = runner_of("django/django", "", [], patched, "4.2")
    assert verifier["kind"] == "junit"
    assert verifier["commands"][0].endswith(
        " unittest tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 auth_tests.test_forms"
    )
    assert "--parallel" not in runner_of("django/django", "", [], patched, "1.9")["commands"][0]
    assert runner_of("sympy/sympy", "", [], ["sympy/x.py"], "")["commands"][0].endswith(" sympy sympy/x.py")
    own = runner_of("sympy/sympy", "tox -e py --", ["tests/a b.py"], [], "")
    assert (own["kind"], own["commands"][0].partition(" && ")[2]) == ("pytest", "tox -e py -- 'tests/a b.py'")


def test_file_in_another_form_is_reported_once(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "text": ["b"]}), tmp_path / "i.parquet")
    with pytest.raises(TaskSourceError) as caught:
        load_tasks(Tasks.model_validate({"from": {"uri": "i.parquet", "format": "SWEBench"}}), tmp_path, {})
    lines = str(caught.value).splitlines()
    assert len(lines) == 7
    assert lines[0] == (
        "i.parquet: has no column 'instance_id', which format SWEBench needs; name the one that has it in "
        "tasks.from.columns; it has id, text"
    )
    with pytest.raises(TaskSourceError, match="'prompt' is not a field of an instance; expected one of instance_id"):
        load(tmp_path, [INSTANCE], columns={"prompt": "x"})


@given(st.text(min_size=1, max_size=20), st.integers(1, 10_000))
def test_large_solution_is_written_in_parts(line: str, times: int) -> None:
    text = line * times
    commands = solution(text)
    encoded = "".join(re.fullmatch(r"printf %s (\S+) >.*", command)[1] for command in commands[:-1])  # type: ignore[index]
    assert base64.b64decode(encoded).decode() == text
    assert all(len(command) <= 65_536 for command in commands)


@given(st.lists(st.tuples(st.sampled_from(["a.py", "b/c.py", "d"]), st.sampled_from(["::t", "::T::t[a::b]", ""]))))
def test_test_files_are_found_in_any_order(names: list[tuple[str, str]]) -> None:
    assert files_of([file + rest for file, rest in names]) == sorted({file for file, rest in names if rest})


def test_the_paths_of_a_patch_are_found_before_and_after_it() -> None:
    patch = (
        PATCH + 'diff --git a/old name b/new name\nsimilarity index 100%\ndiff --git "a/\\303\\244" "b/\\303\\244"\n'
    )
    assert patched_paths(patch)[:4] == ["src/m.py", "src/m.py", "old name", "new name"]
    assert patched_paths("") == []


@given(
    st.fixed_dictionaries({}, optional={field: st.none() | st.text(max_size=9) | st.integers() for field in INSTANCE})
)
def test_any_instance_is_a_task_or_a_clear_refusal(change: dict[str, Any]) -> None:
    messages: list[str] | None = None
    try:
        task_of({**INSTANCE, **change})
    except RowError as error:
        messages = error.messages
    assert messages != []
