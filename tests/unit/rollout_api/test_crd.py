"""The definitions for a cluster: an API server accepts them, and they accept what the models accept."""

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes.client import V1CustomResourceDefinition
from pydantic import ValidationError

from rollout_api.crd import FOLDER, definitions, render
from rollout_api.manifest import validate
from rollout_api.rollout_job import RolloutJob
from tests.support.full import examples
from tests.unit.rollout_api.test_manifest import JSON, PLACES, WHOLE

DEFINITIONS = definitions()
SCHEMAS = {name: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for name, crd in DEFINITIONS.items()}
JOB = SCHEMAS["rolloutjobs.yaml"]
PRESERVE = "x-kubernetes-preserve-unknown-fields"


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            yield from nodes(schema[key], path + mark)


NODES = [(f"{name}{path}", node) for name, schema in SCHEMAS.items() for path, node in nodes(schema)]


def test_explanation_of_an_enumeration_names_every_value() -> None:
    unexplained = [
        (path, value)
        for path, node in NODES
        if not path.endswith("conditions[].status")  # Kubernetes' own True, False and Unknown.
        for value in node.get("enum", ())
        if isinstance(value, str) and len(node["enum"]) > 1 and f"`{value}`" not in node["description"]
    ]
    assert unexplained == []


def test_bounds_fit_into_64_bits_because_api_servers_compare_whole_numbers_as_such() -> None:
    too_large = [path for path, node in NODES for key in ("minimum", "maximum") if abs(node.get(key, 0)) >= 2**63]
    assert too_large == []


@pytest.mark.parametrize("name", DEFINITIONS)
def test_committed_definitions_equal_the_generated_ones(name: str) -> None:
    assert (FOLDER / name).read_text() == render(DEFINITIONS[name]), "run python -m rollout_api.crd"
    assert yaml.safe_load((FOLDER / name).read_text()) == DEFINITIONS[name]


def test_folder_has_no_other_files_than_the_definitions() -> None:
    assert {path.name for path in FOLDER.glob("*")} == set(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_kubernetes_client_knows_every_field(name: str) -> None:
    V1CustomResourceDefinition.model_validate(DEFINITIONS[name])


# The rules for structural schemas, as the Kubernetes documentation of custom resources lists them.
ALLOWED = {
    *("type", "description", "properties", "required", "items", "additionalProperties", "nullable", "default", "enum"),
    *("pattern", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "maxProperties", "oneOf"),
    *("exclusiveMinimum", "exclusiveMaximum", PRESERVE, "x-kubernetes-validations", "x-kubernetes-list-type"),
    "x-kubernetes-list-map-keys",
}


def test_every_node_is_structural() -> None:
    for path, node in NODES:
        assert node.keys() <= ALLOWED, f"{path}: an API server refuses or ignores this keyword"
        kind = node.get("type")
        assert kind in ("object", "array", "string", "integer", "number", "boolean") or (
            kind is None and node[PRESERVE]
        )
        assert ("items" in node) == (kind == "array")
        assert not ("properties" in node and "additionalProperties" in node)
        assert set(node.get("required", [])) <= node.get("properties", {}).keys()
        assert isinstance(node.get("exclusiveMinimum", True), bool)
        assert kind != "object" or "properties" in node or "additionalProperties" in node or PRESERVE in node
        for branch in node.get("oneOf", []):
            assert branch.keys() <= {"required"}, "types and defaults may not stand below oneOf"
        if "default" in node:
            assert node["default"] is not None, "null as a default is pruned, or refused"
            jsonschema_rs.validator_for(as_json_schema(node)).validate(defaulted(node, node["default"]))
        for rule in node.get("x-kubernetes-validations", []):
            assert rule["message"]
            assert "\n" not in rule["message"] + rule["rule"]


def test_every_field_has_a_bound() -> None:
    for path, node in NODES:
        if node.get("type") == "string" and not path.endswith((".apiVersion", ".kind")):
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") == "integer" and ".status" not in path:
            assert "minimum" in node or "enum" in node, path


def test_lists_by_key_have_keys_that_every_entry_has() -> None:
    for _, node in NODES:
        if node.get("type") != "array":
            continue
        assert node["x-kubernetes-list-type"] in ("atomic", "map")
        for key in node.get("x-kubernetes-list-map-keys", []):
            item = node["items"]
            assert key in item["required"] or "default" in item["properties"][key]
            assert item["properties"][key]["type"] in ("string", "integer")


def test_rules_name_existing_fields_and_check_optional_ones_first() -> None:
    for _, node in NODES:
        for rule in node.get("x-kubernetes-validations", []):
            for reference in re.findall(r"(?:self|oldSelf)((?:\.[a-zA-Z]+\b(?!\())+)", rule["rule"]):
                inner = node
                *parents, last = [part for part in reference.split(".") if part]
                for depth, name in enumerate(parents, start=1):
                    is_sure = (
                        name in inner.get("required", []) or f"has(self.{'.'.join(parents[:depth])})" in rule["rule"]
                    )
                    inner = inner["properties"][name]
                    assert is_sure or "default" in inner, f"{name} may be absent, and the rule would fail with an error"
                field = inner["properties"][last]
                required = last in inner.get("required", []) or "default" in field
                assert required or f"has(self{reference})" in rule["rule"]


def patterns(schema: dict[str, Any]) -> Iterator[str]:
    yield from (node["pattern"] for _, node in nodes(schema) if "pattern" in node)


def test_patterns_use_no_syntax_that_the_api_server_lacks() -> None:
    for schema in SCHEMAS.values():
        for pattern in patterns(schema):
            assert not re.search(r"\(\?[=!<]|\\[1-9]", pattern), f"{pattern}: no look-around, no back-references in RE2"


def test_definitions_follow_kubernetes_conventions() -> None:
    for definition in DEFINITIONS.values():
        spec = definition["spec"]
        version = spec["versions"][0]
        assert "all" not in spec["names"]["categories"]
        assert version["subresources"]["status"] == {}
        assert [column["name"] for column in version["additionalPrinterColumns"]][-1] == "Age"
        status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
        if "conditions" in status:
            assert status["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
        assert "status" not in version["schema"]["openAPIV3Schema"]["required"]


def test_only_fields_without_effect_on_results_can_be_changed_in_a_job() -> None:
    fixed = {rule["fieldPath"] for rule in JOB["properties"]["spec"]["x-kubernetes-validations"] if "fieldPath" in rule}
    fields = {f".{field}" for field in JOB["properties"]["spec"]["properties"]}
    assert fields - fixed == {".suspend", ".ttlSecondsAfterFinished"}


# The same value must get the same result from the definition, as an API server uses it, and from the models.


def as_json_schema(node: dict[str, Any]) -> dict[str, Any]:
    """Return the API server's validation as a standard JSON schema: nullable, and boolean exclusive bounds."""
    schema = {
        key: value for key, value in node.items() if not key.startswith("x-") and key not in ("default", "nullable")
    }
    for limit, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if schema.pop(limit, False):
            schema[limit] = schema.pop(bound)
    if "properties" in schema:
        schema["properties"] = {name: as_json_schema(inner) for name, inner in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in schema:
            schema[key] = as_json_schema(schema[key])
    return {"anyOf": [schema, {"type": "null"}]} if node.get("nullable") else schema


def defaulted(node: dict[str, Any], value: Any) -> Any:
    """Return a value with nulls pruned and defaults filled in, as an API server does before it validates."""
    if isinstance(value, list):
        return [defaulted(node.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = node.get("properties", {})
    kept = {
        key: inner
        for key, inner in value.items()
        if inner is not None or fields.get(key, {}).get("nullable") or "default" not in fields.get(key, {})
    }
    for name, field in fields.items():
        if name not in kept and "default" in field:
            kept[name] = copy.deepcopy(field["default"])
    below = node.get("additionalProperties", {})
    return {key: defaulted(fields.get(key, below), inner) for key, inner in kept.items()}


VALIDATOR = jsonschema_rs.validator_for(as_json_schema(JOB))


def unknown(node: dict[str, Any], value: Any) -> bool:
    """Whether a value has fields that the API server would prune; kubectl refuses them."""
    if isinstance(value, list):
        return any(unknown(node.get("items", {PRESERVE: True}), item) for item in value)
    if not isinstance(value, dict) or node.get(PRESERVE) or "additionalProperties" in node:
        return False
    fields = node.get("properties", {})
    return any(key not in fields or unknown(fields[key], inner) for key, inner in value.items())


@given(st.sampled_from([place for place in PLACES if place[:1] == ("spec",)]), JSON)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(200))
def test_manifest_that_the_models_accept_is_accepted_by_a_cluster(place: tuple[str | int, ...], value: Any) -> None:
    def changed(node: Any, rest: tuple[str | int, ...]) -> Any:
        if not rest:
            return value
        items = node.items() if isinstance(node, dict) else enumerate(node)
        copied = {name: changed(inner, rest[1:]) if name == rest[0] else inner for name, inner in items}
        return copied if isinstance(node, dict) else list(copied.values())

    manifest = changed(WHOLE, place)
    try:
        validate(RolloutJob, manifest)
    except ValidationError:
        return
    assert VALIDATOR.is_valid(defaulted(JOB, manifest))
    assert not unknown(JOB, manifest)


def test_the_quickstart_is_accepted_and_its_wrong_forms_are_not() -> None:
    assert VALIDATOR.is_valid(defaulted(JOB, WHOLE))
    for path, value in (
        (("spec", "groupSize"), 0),
        (("spec", "groupSize"), "4"),
        (("spec", "mode"), "train"),
        (("spec", "output"), {}),
        (("spec", "sandbox", "workingDir"), "relative"),
        (("spec", "sandbox", "network"), {"agent": "Everything"}),
        (("spec", "sandbox", "network"), {"agent": []}),
        (("spec", "sampling"), {"topP": 0}),
        (("spec", "tasks", "inline", 0, "files", 0), {"path": "a"}),
        (("spec", "tasks", "inline", 0, "files", 0), {"path": "a", "content": "", "contentBase64": ""}),
        (("metadata", "name"), "Upper"),
    ):
        manifest = copy.deepcopy(WHOLE)
        inner = manifest
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value
        assert not VALIDATOR.is_valid(defaulted(JOB, manifest)), path


@pytest.mark.parametrize("field", ["user", "image", "runtimeClassName", "podTemplate"])
def test_null_is_accepted_where_a_field_can_be_left_out(field: str) -> None:
    manifest = copy.deepcopy(WHOLE)
    manifest["spec"]["sandbox"][field] = None
    assert VALIDATOR.is_valid(defaulted(JOB, manifest))
    validate(RolloutJob, manifest)


def test_the_command_writes_the_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "rollout_api.crd", str(tmp_path)], check=True, cwd=FOLDER.parent)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: render(definition) for name, definition in DEFINITIONS.items()
    }
