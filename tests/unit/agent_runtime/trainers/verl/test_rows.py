"""A row of verl's dataset is a task, or an error that names the row and the field."""

import gc
import json
from typing import Any

import numpy as np
import pytest

from agent_runtime.integrations.verl.rows import ActiveRows, RowError, read_row


def row(**fields: Any) -> dict[str, Any]:
    return {
        "uid": "5c1f",
        "raw_prompt": [{"role": "user", "content": "Write a file."}],
        "data_source": "files",
        "index": 3,
        "extra_info": {},
    } | fields


def test_task_of_a_row_has_its_verifier_as_text_and_as_parquet_objects() -> None:
    task = {"name": "one", "verifier": {"commands": ["true"]}, "setup": ["make"]}
    as_parquet_gives_it = {
        "name": "one",
        "verifier": {"commands": np.array(["true"], dtype=object), "report": None},
        "setup": np.array(["make"], dtype=object),
        "timeouts": None,
    }

    texts = [
        read_row(row(extra_info={"task": json.dumps(task)})),
        read_row(row(extra_info={"task": as_parquet_gives_it})),
    ]

    assert [found.task for found in texts] == [texts[0].task] * 2
    assert texts[0].task.verifier is not None
    assert texts[0].task.verifier.commands == ["true"]
    assert texts[0].task.prompt == "Write a file."


def test_row_without_a_task_is_named_after_its_source_and_index() -> None:
    found = read_row(row(data_source="openai/gsm8k"))

    assert found.task.name == "openai-gsm8k-3"
    assert found.task.tags == ["5c1f"]


def test_the_system_message_is_kept_apart_for_the_agent() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write."}]

    assert read_row(row(raw_prompt=np.array(messages, dtype=object))).system_prompt == "Be brief."


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"uid": "a_b"}, ["row 3 of files", "'a_b'", "'_'"]),
        (
            {"raw_prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            ["user, assistant"],
        ),
        ({"raw_prompt": [{"role": "user", "content": [{"type": "image"}]}]}, ["row 3 of files", "not text"]),
        ({"extra_info": {"task": "{"}}, ["row 3 of files", "extra_info.task", "not JSON"]),
        ({"extra_info": {"task": {"tags": "math"}}}, ["row 3 of files", 'tags: is the text "math", expected a list']),
        ({"extra_info": {"task": {"verifer": {}}}}, ["row 3 of files", "extra_info.task", "verifer", "verifier"]),
    ],
)
def test_invalid_task_is_reported_with_the_row_and_the_field(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RowError) as caught:
        read_row(row(**fields))

    for word in words:
        assert word in str(caught.value)


def test_tools_find_their_arguments_until_the_last_group_of_a_row_ends() -> None:
    """REMAX runs a greedy baseline beside the sampled rollouts of a row, which often ends first."""
    rows, given = ActiveRows(), {"lookup": {"create_kwargs": {"word": "apple"}}}
    sampled = rows.begin(read_row(row(tools_kwargs=given)))
    greedy = rows.begin(read_row(row(tools_kwargs=given)))
    task = sampled.task

    del greedy
    gc.collect()
    assert rows.tools_kwargs(task) == given

    del sampled
    gc.collect()
    assert rows.tools_kwargs(task) == {}
