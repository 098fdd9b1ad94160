"""The body of a request as JSON."""

import json

import pytest

from agent_runtime.proxy.chat import decoded


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": ["x\\ud83d", {"\\uDC00": "\\ud83d\\ude00"}]}',
        b'{"a": ["x\xed\xa0\xbd", {"\xed\xb0\x80": "\xf0\x9f\x98\x80"}]}',
        '{"a": ["x\\ud83d", {"\\uDC00": "\U0001f600"}]}'.encode("utf-16"),
    ],
)
def test_what_cannot_be_recorded_is_replaced_before_the_model_gets_it(body: bytes) -> None:
    assert decoded(body) == {"a": ["x?", {"?": "\U0001f600"}]}
    json.dumps(decoded(body), ensure_ascii=False).encode()
