"""Values that are nested too deeply are refused, and all others can be recorded and read back."""

from typing import Any

import pytest

from agent_runtime.proxy.chat import BadRequest, decoded
from rollout_api.nesting import DEEPEST, as_recorded, read_json, too_deep
from rollout_api.records import IntentRecord, Observation, ObservationsRecord


def nested(levels: int, kind: type = dict) -> Any:
    value: Any = kind()
    for _ in range(levels - 1):
        value = {"a": value, "b": [1]} if kind is dict else [value, 1]
    return value


@pytest.mark.parametrize("kind", [dict, list])
def test_deepest_accepted_value_can_be_read_back(kind: type) -> None:
    deep = nested(DEEPEST, kind)
    assert (too_deep(deep), too_deep([deep]), too_deep(nested(100_000, kind))) == (False, True, True)
    intent = IntentRecord(
        turn=0, time=0.0, keep=0, messages=[{"role": "user", "content": deep}], tools=[{"parameters": deep}]
    )
    assert IntentRecord.model_validate_json(intent.model_dump_json()) == intent
    results = [Observation(call_id="a", tool="b", content="c", seconds=0.0, data={"x": deep})]
    ran = ObservationsRecord(turn=0, time=0.0, seconds=0.0, results=results)
    assert ObservationsRecord.model_validate_json(ran.model_dump_json()) == ran


def test_too_deeply_nested_request_is_refused() -> None:
    body = b'{"tools": ' + b"[" * 200 + b"]" * 200 + b"}"
    with pytest.raises(BadRequest, match="nested more than 128 levels deep"):
        decoded(body)


def test_request_with_too_many_values_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadRequest, match="more than 1048576 values"):
        decoded(b'{"tools": [' + b"[]," * (1 << 20) + b"[]]}")


def test_json_of_any_depth_is_read_and_too_deep_values_stay_recognizable() -> None:
    deep = b'{"a": [' * 50_000 + b"1" + b"]}" * 50_000
    found = read_json(b'{"metadata": {"name": "}\\"{"}, "spec": ' + deep + b', "status": {"x": [1, null]}}')
    assert (found["metadata"], found["status"]) == ({"name": '}"{'}, {"x": [1, None]})
    assert too_deep(found["spec"])


def test_a_number_longer_than_python_converts_is_read_as_text() -> None:
    assert read_json(b'{"n": 12, "long": ' + b"7" * 5000 + b"}") == {"n": 12, "long": "7" * 5000}
    with pytest.raises(ValueError, match="Expecting"):
        read_json(b'{"n": ')


@pytest.mark.parametrize("depth", [100, 600, 900, 2000])
def test_what_was_read_can_be_read_by_code_that_recurses(depth: int) -> None:
    found = read_json(b"[" * depth + b'"\\ud83d"' + b"]" * depth)
    assert as_recorded(found) is not None
    assert too_deep(found) is (depth > DEEPEST)
