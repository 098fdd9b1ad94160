"""Instances that are accepted as valid without creating their tasks: none of them may fail when its rollout begins."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent_runtime.tasks.swe_bench import CHARACTERS, OPTIONAL, name_if_valid, task_of

HEADER = "diff --git a/{path} b/{path}\n"
INSTANCE: dict[str, Any] = {
    **dict.fromkeys(OPTIONAL),
    "instance_id": "owner__name-1",
    "repo": "owner/name",
    "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
    "problem_statement": "It fails.",
    "patch": HEADER.format(path="src/m.py"),
    "test_patch": HEADER.format(path="tests/test_m.py"),
    "FAIL_TO_PASS": '["tests/test_m.py::test_a"]',
    "PASS_TO_PASS": "[]",
}

LENGTHS = st.sampled_from([0, 1, 5, 300, 1023, 1025, CHARACTERS // 12, CHARACTERS // 5, CHARACTERS // 2, CHARACTERS])
CHARACTER = st.sampled_from(["a", "'", '"', "\\", "\x01", " ", "/", ":", "\n", "é", "\U0001f600", "\ud800", "\x00"])
TEXT = st.builds(str.__mul__, CHARACTER, LENGTHS)
PATH = st.builds("{}{}.py".format, TEXT, st.integers(0, 9))
NAMES = st.lists(st.builds("{}::{}".format, PATH, TEXT) | TEXT, max_size=4).flatmap(
    lambda names: st.sampled_from([names, names * 3000, json.dumps(names), json.dumps(names).encode()])
)
PATCH = st.lists(PATH, max_size=4).map(lambda paths: "".join(HEADER.format(path=path) for path in paths))
ODD = st.none() | TEXT | st.just(5) | st.just(b"bytes")
CHANGE = st.fixed_dictionaries(
    {},
    optional={
        "patch": PATCH | ODD,
        "test_patch": PATCH | ODD,
        "FAIL_TO_PASS": NAMES | ODD,
        "PASS_TO_PASS": NAMES | ODD,
        "repo": st.sampled_from(["django/django", "sympy/sympy"]) | ODD,
        **{field: ODD for field in INSTANCE if field not in ("patch", "test_patch", "repo") and "PASS" not in field},
    },
)


@given(CHANGE, st.none() | st.sampled_from(["{name}:v1", "{name}" * 100, "i" * 1024]))
@example({"PASS_TO_PASS": json.dumps(["a"] * 10_000)}, None)
@example({"FAIL_TO_PASS": json.dumps([f"{chr(1) * 1000}{number}::t" for number in range(40)])}, None)
@example({"FAIL_TO_PASS": json.dumps([f"{chr(39) * 1000}{number}::t" for number in range(15)])}, None)
@example({"problem_statement": "a" * 204_800}, None)
@example({"FAIL_TO_PASS": [f"{chr(0x1F600) * 1000}{number}::t" for number in range(25)]}, None)
@example({"FAIL_TO_PASS": b'["t"]'}, None)
@example({"FAIL_TO_PASS": [b"t"]}, None)
@example({"FAIL_TO_PASS": "[]"}, None)
@example({"base_commit": "d26b2424 or main"}, None)
@example({"patch": "see diff --git "}, None)
@example({}, "{name}" * 100)
def test_instance_accepted_as_valid_gives_a_task(change: dict[str, Any], image_template: str | None) -> None:
    instance = {**INSTANCE, **change}
    name = name_if_valid(instance, image_template)
    if name is not None:
        assert task_of(instance, image_template).name == name


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"patch": None, "version": "1.0", "docker_image": "own:1", "test_cmd": "pytest -q"},
        {"FAIL_TO_PASS": ["tests/test_m.py::test_a"], "PASS_TO_PASS": ["tests/test_m.py::test_b"] * 900},
        {"problem_statement": "é" * 50_000, "repo": "django/django"},
    ],
)
def test_usual_instances_are_recognized_without_creating_tasks(change: dict[str, Any]) -> None:
    assert name_if_valid({**INSTANCE, **change}, "mirror/{name}") == "owner__name-1"
