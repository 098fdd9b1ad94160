"""Schemas from signatures, and arguments checked against schemas."""

from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agent_runtime.tools.base import ArgumentsError, Signature, ToolContext, checked_arguments


class Point(BaseModel):
    x: int
    y: int = 0


async def example(
    path: Annotated[str, "Where."],
    context: ToolContext,
    unit: Literal["words", "lines"] = "words",
    limit: Annotated[int, Field(ge=1, le=10)] = 5,
    points: list[Point] | None = None,
    json: bool = False,
) -> str:
    """Count things.

    More about it.

    Args:
        path: Overruled by the annotation.
        unit: What is counted,
            one of two.
        limit (int): At most.

    Returns:
        A number.
    """
    return ""


def test_types_defaults_and_descriptions_of_a_signature_reach_the_model() -> None:
    signature = Signature(example)
    properties = signature.schema["properties"]
    assert signature.description == "Count things.\n\nMore about it."
    assert signature.schema["required"] == ["path"]
    assert signature.schema["additionalProperties"] is False
    assert properties["path"] == {"description": "Where.", "type": "string"}
    assert properties["unit"] == {
        "default": "words",
        "description": "What is counted, one of two.",
        "enum": ["words", "lines"],
        "type": "string",
    }
    assert properties["limit"] == {
        "default": 5,
        "description": "At most.",
        "maximum": 10,
        "minimum": 1,
        "type": "integer",
    }
    assert properties["json"]["type"] == "boolean", "names that pydantic uses itself are fine"
    assert "context" not in properties
    assert signature.context_parameter == "context"


def test_arguments_are_converted_to_the_types_of_the_function() -> None:
    bound = Signature(example).bind({"path": "a", "limit": "7", "points": [{"x": 1}]})
    assert bound == {"path": "a", "unit": "words", "limit": 7, "points": [Point(x=1)], "json": False}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "path: is required, but missing"),
        ({"path": 3}, "path: input should be a valid string, got 3"),
        ({"path": "a", "unit": "bytes"}, "unit: input should be 'words' or 'lines', got \"bytes\""),
        ({"path": "a", "limit": 11}, "limit: input should be less than or equal to 10, got 11"),
        ({"path": "a", "points": [{"x": 1}, {"y": 2}]}, "points.1.x: is required"),
        ({"path": "a", "pth": "b"}, "pth: unknown argument; the arguments are path, unit, limit, points, json"),
    ],
)
def test_wrong_arguments_are_reported_by_name_with_the_expected_type(arguments: Any, complaint: Any) -> None:
    with pytest.raises(ArgumentsError) as caught:
        Signature(example).bind(arguments)
    assert complaint in str(caught.value)


def test_a_huge_wrong_value_does_not_fill_the_context() -> None:
    with pytest.raises(ArgumentsError) as caught:
        Signature(example).bind({"path": ["x" * 100_000]})
    assert len(str(caught.value)) < 300


def test_signature_that_no_model_can_fill_is_refused_when_it_is_made() -> None:
    async def star(*a: int) -> str:
        return ""

    with pytest.raises(TypeError, match="star: parameter a"):
        Signature(star)


def test_a_type_that_json_cannot_give_is_refused_when_it_is_made() -> None:
    async def takes(handle: Signature) -> str:
        return ""

    with pytest.raises(TypeError, match="cannot come from JSON"):
        Signature(takes)


HAND_WRITTEN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1},
        "mode": {"enum": ["r", "w"], "default": "r"},
        "size": {"type": ["integer", "null"], "minimum": 1},
        "key": {"type": "string", "pattern": "^(?!x)[a-z]+$"},
        "level": {"enum": [1, [2]]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "where": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "string"}]},
        "tree": {"$ref": "#/$defs/tree"},
        "free": {"type": "object"},
    },
    "required": ["path"],
    "additionalProperties": False,
    "$defs": {
        "point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "tree": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
    },
}


@pytest.mark.parametrize(
    ("arguments", "checked"),
    [
        ({"path": "a"}, {"path": "a", "mode": "r"}),
        ({"path": "a", "mode": "w", "size": None}, {"path": "a", "mode": "w", "size": None}),
        ({"path": "a", "size": "5"}, {"path": "a", "mode": "r", "size": 5}),
        ({"path": "a", "where": {"x": 1.5, "y": 2}}, {"path": "a", "mode": "r", "where": {"x": 1.5, "y": 2}}),
        ({"path": "a", "tree": {"children": [{"children": []}]}}, None),
        ({"path": "a", "free": {"any": ["thing"]}}, None),
        ({"path": "a", "key": "ab", "level": [2]}, None),
    ],
)
def test_arguments_of_a_hand_written_schema_are_checked_and_completed(arguments: Any, checked: Any) -> None:
    assert checked_arguments(HAND_WRITTEN, arguments) == (checked or {**arguments, "mode": "r"})


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({}, "path: is required"),
        ({"path": ""}, "path: "),
        ({"path": "a", "mode": "x"}, "mode: "),
        ({"path": "a", "size": "many"}, "size"),
        ({"path": "a", "size": 0}, "size"),
        ({"path": "a", "key": "xa"}, "key: "),
        ({"path": "a", "tags": ["1", "2", "3"]}, "tags: "),
        ({"path": "a", "where": {"y": 1}}, "where"),
        ({"path": "a", "tree": {"children": 5}}, "tree.children: "),
        ({"path": "a", "other": 1}, "other: unknown argument"),
    ],
)
def test_arguments_that_do_not_fit_a_hand_written_schema_are_refused(arguments: Any, where: Any) -> None:
    with pytest.raises(ArgumentsError) as caught:
        checked_arguments(HAND_WRITTEN, arguments)
    assert where in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*HAND_WRITTEN["properties"], "other", "_x", "model_config"]), json_values))
def test_no_arguments_can_break_the_check(arguments: Any) -> None:
    try:
        checked = checked_arguments(HAND_WRITTEN, arguments)
    except ArgumentsError:
        return
    assert set(arguments) <= set(checked)


@given(st.dictionaries(st.text(max_size=5), json_values))
def test_tool_without_declared_parameters_gets_its_arguments_unchanged(arguments: Any) -> None:
    assert checked_arguments({}, arguments) == arguments
