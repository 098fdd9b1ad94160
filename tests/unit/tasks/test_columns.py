"""Data sets in their own format: columns mapped to fields, Parquet, filter, shuffle and limit."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.tasks import LoadedTasks, TaskSourceError, load_tasks
from agent_runtime.tasks.table import RowFilter, ordered
from rollout_api.tasks import Task, Tasks, TaskSource
from tests.support.full import examples

ROWS = [
    {
        "id": n,
        "question": f"What is {n}?",
        "check": f"grep -qx {n} answer",
        "level": ["easy", "hard"][n % 2],
        "set": "a",
    }
    for n in range(10)
]
COLUMNS = {"name": "id", "prompt": "question", "verifier.commands": "check"}


def write(folder: Path, rows: list[dict[str, Any]], form: str) -> str:
    if form == "parquet":
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
        pq.write_table(table, folder / "rows.parquet")
    else:
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"rows.{form}"


def load(folder: Path, uri: str, **fields: Any) -> LoadedTasks:
    return load_tasks(Tasks.model_validate({"from": {"uri": uri, **fields}}), folder, {})


def told(folder: Path, uri: str, **fields: Any) -> str:
    with pytest.raises(TaskSourceError) as caught:
        load(folder, uri, **fields)
    return str(caught.value)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_data_set_is_used_by_naming_its_columns(form: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, write(tmp_path, ROWS, form), columns=COLUMNS)
    expected = [
        Task.model_validate(
            {"name": str(row["id"]), "prompt": row["question"], "verifier": {"commands": [row["check"]]}}
        )
        for row in ROWS
    ]
    assert list(loaded.tasks) == expected
    assert [loaded.tasks[n] for n in (9, 0, -1)] == [expected[9], expected[0], expected[9]]
    assert list(loaded.tasks[2:4]) == expected[2:4]


def test_unused_columns_are_reported(tmp_path: Path) -> None:
    (warning,) = load(tmp_path, write(tmp_path, ROWS, "parquet"), columns=COLUMNS).warnings
    assert str(warning) == "rows.parquet: columns level, set are not used; tasks.from.columns names none of them"


def test_tasks_are_equal_from_parquet_and_from_json_lines(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "prompt": "p", "files": [{"path": "f", "content": "c"}], "tags": ["x"]},
        {"name": "b", "prompt": "p", "verifier": {"commands": ["true"]}, "timeouts": {"agentSeconds": 5}},
    ]
    assert list(load(tmp_path, write(tmp_path, rows, "parquet")).tasks) == [Task.model_validate(row) for row in rows]


@pytest.mark.parametrize(
    ("cell", "tags"),
    [('["a", "b"]', ["a", "b"]), ("a", ["a"]), ('"a"', ['"a"']), ("[ a ]", ["[ a ]"])],
    ids=["JSON list", "text", "JSON text", "not JSON"],
)
def test_list_of_texts_is_read_from_one_text_or_from_json(cell: str, tags: list[str], tmp_path: Path) -> None:
    uri = write(tmp_path, [{"name": "a", "prompt": "p", "labels": cell}], "jsonl")
    (task,) = load(tmp_path, uri, columns={"tags": "labels"}).tasks
    assert task.tags == tags


def test_structured_fields_are_read_from_text_that_is_json(tmp_path: Path) -> None:
    rows = [{"name": "a", "prompt": "p", "v": '{"commands": ["true"]}'}, {"name": "b", "prompt": "p", "v": "{"}]
    assert told(tmp_path, write(tmp_path, rows, "jsonl"), columns={"verifier": "v"}) == (
        "rows.jsonl:2: verifier: column 'v' is text that is not JSON: "
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"columns": {"promt": "question"}},
            "rows.parquet: tasks.from.columns: 'promt' is not a field of a task; did you mean prompt?",
        ),
        (
            {"columns": {"prompt": "quest"}},
            "rows.parquet: has no column 'quest', named in tasks.from.columns.prompt; "
            "it has id, question, check, level, set",
        ),
        (
            {"columns": COLUMNS, "filter": {"split": ["test"]}},
            "rows.parquet: has no column 'split', named in tasks.from.filter; it has id, question, check, level, set",
        ),
        (
            {"columns": COLUMNS, "filter": {"level": ["medium"]}},
            "rows.parquet: none of its 10 rows matches tasks.from.filter: no level is 'medium'",
        ),
        (
            {"columns": {"name": "set", "prompt": "question"}, "limit": 2},
            "rows.parquet, row 2: name: a task named 'a' already exists in row 1; names must be unique",
        ),
    ],
)
def test_invalid_value_is_reported_with_file_and_row(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert told(tmp_path, write(tmp_path, ROWS, "parquet"), **fields) == message


def test_filter_of_json_lines_names_the_existing_columns(tmp_path: Path) -> None:
    assert told(tmp_path, write(tmp_path, ROWS, "jsonl"), columns=COLUMNS, filter={"split": ["x"]}) == (
        "rows.jsonl: has no column 'split', named in tasks.from.filter; it has check, id, level, question, set"
    )


def test_every_broken_row_is_reported_with_any_filter_and_order(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"name": "a", "prompt": "p"}, {"name": "b"}, {"name": "c"}]
    uri = write(tmp_path, rows, "jsonl")
    (tmp_path / uri).write_text((tmp_path / uri).read_text() + "{\n")
    assert told(tmp_path, uri, filter={"name": ["?"]}, shuffleSeed=3).splitlines() == [
        "rows.jsonl:2: prompt: is missing. The agent's instructions.",
        "rows.jsonl:3: prompt: is missing. The agent's instructions.",
        "rows.jsonl:4: is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]


def test_a_broken_parquet_file_and_an_empty_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 not really PAR1")
    assert told(tmp_path, "rows.parquet").startswith(
        "rows.parquet: cannot be read: it is not a readable Parquet file ("
    )
    empty = pa.table({"name": pa.array([], pa.string()), "prompt": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "rows.parquet")
    assert told(tmp_path, "rows.parquet") == "rows.parquet: has no tasks; expected one task per row"
    pq.write_table(pa.table({"name": [b"\xff"], "prompt": [1]}), tmp_path / "rows.parquet")
    assert told(tmp_path, "rows.parquet").startswith("rows.parquet, row 1: has a value of an unsupported type")


def test_column_can_be_used_only_by_the_filter(tmp_path: Path) -> None:
    rows = [{"name": name, "prompt": "p", "split": split} for name, split in (("a", "train"), ("b", "test"))]
    uri = write(tmp_path, rows, "jsonl")
    assert [task.name for task in load(tmp_path, uri, filter={"split": ["test"]}).tasks] == ["b"]
    assert "split: is not a known field" in told(tmp_path, uri)


def test_filter_shuffle_and_limit_work_in_that_order(tmp_path: Path) -> None:
    uri = write(tmp_path, ROWS, "parquet")
    chosen = {"columns": COLUMNS, "filter": {"level": ["ha*"]}, "shuffleSeed": 1}
    everything = [task.name for task in load(tmp_path, uri, **chosen).tasks]
    assert sorted(everything) == ["1", "3", "5", "7", "9"]
    assert [task.name for task in load(tmp_path, uri, **chosen, limit=2).tasks] == everything[:2]
    other = [task.name for task in load(tmp_path, uri, **{**chosen, "shuffleSeed": 2}).tasks]
    assert sorted(other) == sorted(everything) != other != everything


def test_the_order_of_a_seed_is_the_same_on_every_machine() -> None:
    # Fixed, because a laptop and a cluster, or two versions of Python, must work on the same tasks.
    assert ordered(range(8), TaskSource(uri="x", shuffle_seed=7, limit=5)) == [4, 7, 3, 2, 1]


@given(st.permutations(range(20)), st.integers(0, 2**53), st.one_of(st.none(), st.integers(1, 30)))
def test_an_order_has_every_row_once(positions: list[int], seed: int, limit: int | None) -> None:
    found = ordered(positions, TaskSource(uri="x", shuffle_seed=seed, limit=limit))
    assert len(found) == min(20, limit or 20)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("value", "patterns", "passes"),
    [
        ("django/django", ["django/*"], True),
        ("django/django", ["django"], False),
        ("a.b", ["a?b"], True),
        ("axb", ["a.b"], False),
        (3, ["3"], True),
        (True, ["true"], True),
        (None, ["null"], True),
        (["x", "y"], ["y"], True),
        ([], ["*"], False),
        ("a\nb", ["a*"], True),
    ],
)
def test_a_filter_compares_the_text_of_a_value(value: Any, patterns: list[str], passes: bool) -> None:
    assert RowFilter({"c": patterns}).passes({"c": value}) is passes


def test_a_filter_knows_which_of_its_values_matched_nothing() -> None:
    rows = RowFilter({"name": ["fix-1", "fix-paht", "other-*"], "level": ["hard", "easy"]})
    assert rows.passes({"name": "fix-1", "level": "hard"})
    assert not rows.passes({"name": "fix-path", "level": "medium"})
    assert rows.unmatched() == [
        "no name is 'fix-paht' (did you mean 'fix-path'?)",
        "no name is 'other-*'",
        "no level is 'easy'",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(60))
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["name", "prompt", "verifier", "setup", "x"]), JSON), max_size=4),
    columns=st.dictionaries(
        st.sampled_from(["prompt", "verifier", "setup", "sandbox.image"]), st.sampled_from(["x", "prompt"])
    ),
)
def test_any_rows_are_tasks_or_a_clear_refusal(
    rows: list[dict[str, Any]], columns: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    try:
        loaded = load(folder, write(folder, rows, "jsonl"), columns=columns)
    except TaskSourceError:
        return
    assert [task.name for task in loaded.tasks] == [row["name"] for row in rows]
