"""API servers parse the body of a server-side apply as YAML."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.server_side_apply import apply_body

REFUSED = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]|\\\\u[dD][89a-fA-F]")
"""What Kubernetes' parser, go.yaml.in/yaml/v2, refuses in a quoted scalar: control characters, and escapes of surrogates."""


def is_accepted(body: bytes) -> bool:
    return REFUSED.search(body.decode().replace(r"\\", "")) is None


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.dictionaries(st.text(), inner)))
def test_apply_body_is_json_and_yaml_for_any_text(document: object) -> None:
    body = apply_body(document)
    assert json.loads(body) == document
    assert is_accepted(body)


@pytest.mark.parametrize("text", ["😀", "\x7f", "\u0085\ufeff\ufffe", "\\ud83d", "\\\\😀", '"\n\t\b\\'])
def test_apply_body_keeps_text_that_yaml_treats_differently(text: str) -> None:
    body = apply_body({"message": text})
    assert json.loads(body) == {"message": text}
    assert is_accepted(body)


def test_apply_body_replaces_unpaired_surrogates() -> None:
    assert json.loads(apply_body({"message": "a\ud800b"})) == {"message": "a\ufffdb"}
