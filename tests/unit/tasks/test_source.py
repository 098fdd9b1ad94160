"""Reading task files: every broken line among thousands is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.tasks import LoadedTasks, TaskSourceError, load_tasks, read_rows
from rollout_api.tasks import Task, Tasks


def row(name: str, **fields: Any) -> str:
    return json.dumps({"name": name, "prompt": "p", **fields})


def read(*lines: str, limit: int | None = None) -> list[Task]:
    return read_rows(iter(["\n".join(lines).encode()]), "tasks.jsonl", limit)


def told(*lines: str, limit: int | None = None) -> list[str]:
    with pytest.raises(TaskSourceError) as caught:
        read(*lines, limit=limit)
    return str(caught.value).splitlines()


@given(st.lists(st.text(max_size=20), max_size=5), st.integers(1, 50))
def test_tasks_are_read_in_order_from_any_chunks(prompts: list[str], piece: int) -> None:
    rows = [row(f"t{number}", prompt=f"x{prompt}") for number, prompt in enumerate(prompts)]
    data = "\n".join(["", *rows, "  ", row("last"), ""]).encode()
    pieces = [data[start : start + piece] for start in range(0, len(data), piece)]
    tasks = read_rows(iter(pieces), "tasks.jsonl")
    assert [task.prompt for task in tasks] == [*(f"x{prompt}" for prompt in prompts), "p"]


def test_every_broken_line_is_reported_with_its_field() -> None:
    assert told(
        row("a"),
        '{"name": "b"',
        row("c", files=[{"path": "../x", "content": ""}], timeouts={"agentSecond": 5}),
        row("a"),
        "[]",
        '{"name": "d", "name": "e", "prompt": "p"}',
        '{"name": "f", "prompt": NaN}',
        row("g", prompt=5),
        '{"name": "h", "prompt": "half \\ud83d of it"}',
        '{"name": "i", "prompt": "all \\ud83d\\ude00 of it, and a backslash: \\\\ud83d"}',
    ) == [
        "tasks.jsonl:2: is not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)",
        "tasks.jsonl:3: files[0].path: '../x' leaves the working directory; '..' is not allowed",
        "tasks.jsonl:3: timeouts.agentSecond: is not a known field; did you mean agentSeconds?",
        "tasks.jsonl:4: name: a task named 'a' already exists in line 1; names must be unique",
        "tasks.jsonl:5: expected a JSON object with at least name and prompt; write one object per line, without a list "
        "around them",
        "tasks.jsonl:6: name: is given twice; keep one of them",
        "tasks.jsonl:7: is not JSON: NaN is not a JSON number",
        "tasks.jsonl:8: prompt: is the number 5, expected text; put it into quotes",
        "tasks.jsonl:9: has \\ud83d, an unpaired surrogate, which text cannot contain",
    ]


def test_rows_after_the_limit_are_not_checked() -> None:
    assert [task.name for task in read(row("a"), "", row("b"), "broken", limit=2)] == ["a", "b"]
    assert told(row("a"), "broken", row("c"), limit=2) != []


def test_rows_that_cannot_be_tasks_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join([row("a"), "broken", row("a"), row("b", prompt=5), row("c"), row("d")]))

    def load(**source: object) -> LoadedTasks:
        given = {"uri": "t.jsonl", "skipUnusable": True, **source}
        return load_tasks(Tasks.model_validate({"from": given}), tmp_path, {})

    found = load()
    assert [task.name for task in found.tasks] == ["a", "c", "d"]
    left_out, ungraded = map(str, found.warnings)
    assert "3 of 6 tasks cannot be used and are left out (tasks.from.skipUnusable): t.jsonl:2: is not JSON" in left_out
    assert "3 of 3 tasks have no verifier" in ungraded
    assert [task.name for task in load(limit=2).tasks] == ["a", "c"]
    assert [task.name for task in load(filter={"name": ["c", "d"]}).tasks] == ["c", "d"]
    (tmp_path / "t.jsonl").write_text("broken")
    with pytest.raises(TaskSourceError, match=r"t\.jsonl:1: is not JSON"):
        load()


def test_a_source_without_tasks_is_an_error() -> None:
    assert told("", "  ") == ["tasks.jsonl: has no tasks; expected one JSON object per line"]


@given(st.binary(max_size=200))
def test_any_bytes_are_tasks_or_a_clear_refusal(data: bytes) -> None:
    with pytest.raises(TaskSourceError):
        read_rows(iter([b"{}\n", data]), "tasks.jsonl")


def test_error_for_a_file_with_many_broken_lines_is_short() -> None:
    assert len(told(*["x"] * 5000)) == 101


def source(uri: str, **fields: Any) -> Tasks:
    return Tasks.model_validate({"from": {"uri": uri, **fields}})


def test_a_relative_path_starts_at_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "t.jsonl").write_text(f"{row('a')}\n{row('b')}\n")
    for uri in ("data/t.jsonl", f"{tmp_path}/data/t.jsonl", f"file://{tmp_path}/data/t.jsonl"):
        assert [task.name for task in load_tasks(source(uri, limit=1), tmp_path, {}).tasks] == ["a"]


@pytest.mark.parametrize("uri", ["missing.jsonl", ".", "ftp://host/t.jsonl", "s3://bucket/t.jsonl"])
def test_a_source_that_cannot_be_read_is_named(uri: str, tmp_path: Path) -> None:
    # A closed port of this machine: no object storage answers.
    environ = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "x",
    }
    with pytest.raises(TaskSourceError, match="cannot be read") as caught:
        load_tasks(source(uri), tmp_path, environ)
    assert str(caught.value).startswith(uri)


def test_inline_tasks_are_not_changed(tmp_path: Path) -> None:
    tasks = Tasks.model_validate({"inline": [{"name": "a", "prompt": "p"}]})
    assert load_tasks(tasks, tmp_path, {}).tasks == tasks.inline


def test_stream_has_no_tasks_to_load(tmp_path: Path) -> None:
    with pytest.raises(TaskSourceError, match="submitted"):
        load_tasks(Tasks.model_validate({"stream": {}}), tmp_path, {})


@pytest.mark.parametrize("form", ["inline", "rows"])
def test_tasks_without_a_verifier_are_named_in_a_warning(form: str, tmp_path: Path) -> None:
    graded = {"name": "graded", "prompt": "p", "verifier": {"commands": ["true"]}}
    tasks = [graded, *({"name": f"bare-{number}", "prompt": "p"} for number in range(7))]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    source = {"inline": tasks} if form == "inline" else {"from": {"uri": "tasks.jsonl"}}
    (warning,) = load_tasks(Tasks.model_validate(source), tmp_path, {}).warnings
    assert "7 of 8 tasks have no verifier, so rollouts get no reward: bare-0, bare-1," in str(warning)
    assert str(warning).endswith("bare-4, …")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tasks.csv", "name,prompt\n", "tasks.csv: cannot be read: expected JSONL or Parquet; convert the file"),
        ("tasks.json", '[{"name": "a", "prompt": "p"}]', "tasks.json:1: expected a JSON object with at least name and "
         "prompt; write one object per line, without a list around them"),
        ("tasks.jsonl", '{"name": "a", "question": "p"}', "question: is not a known field; did you mean prompt?"),
    ],
)  # fmt: skip
def test_common_mistakes_in_task_files_are_reported_with_the_remedy(
    name: str, content: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TaskSourceError) as caught:
        load_tasks(Tasks.model_validate({"from": {"uri": name}}), tmp_path, {})
    assert expected in str(caught.value)


def test_home_of_the_user_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tasks.jsonl").write_text(row("a"))
    (task,) = load_tasks(Tasks.model_validate({"from": {"uri": "~/tasks.jsonl"}}), Path("/"), {}).tasks
    assert task.name == "a"
