"""The meaning of an error body."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.base import ContentFiltered, ContextExceeded, ModelConfigError, RequestRefused
from agent_runtime.models.refusals import error_text, final_refusal, is_error, refusal, status_of_error

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["error", "message", "code", "x"]), inner)
    ),
    max_leaves=8,
)


@given(st.integers(400, 599), json_values)
def test_any_error_body_is_parsed_without_an_error(status: Any, payload: Any) -> None:
    codes, message = error_text(payload)
    assert isinstance(message, str)
    assert all(isinstance(code, str) for code in codes)
    refusal(status, payload)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"message": "b", "object": "error"}, "b"),
        ({"detail": "c"}, "c"),
        ({"error": "d"}, "d"),
        ("e", "e"),
    ],
)
def test_the_servers_words_are_found_in_every_common_form(payload: Any, message: Any) -> None:
    assert error_text(payload)[1] == message


@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_ambiguous_status_never_counts_against_the_policy(status: Any) -> None:
    assert refusal(status, {"error": {"message": "maximum context length", "code": "context_length_exceeded"}}) is None


def test_body_too_large_for_the_server_means_that_the_conversation_is_too_long() -> None:
    assert isinstance(refusal(413, "Request Entity Too Large"), ContextExceeded)


def test_nested_error_code_of_azure_is_found() -> None:
    body = {"error": {"code": "400", "message": "m", "innererror": {"code": "ResponsibleAIPolicyViolation"}}}
    assert isinstance(refusal(400, body), ContentFiltered)


@pytest.mark.parametrize("status", [400, 422])
def test_refused_field_differs_from_a_failing_server(status: Any) -> None:
    refused = final_refusal("http://s", status, "logit_bias: token 99999 is out of vocabulary")
    assert isinstance(refused, RequestRefused)
    assert refused.reason == "BadRequest"
    assert "logit_bias" in refused.message


def test_refusal_with_another_cause_than_the_request_is_not_a_refused_request() -> None:
    assert not isinstance(final_refusal("http://s", 402, "no credit left"), RequestRefused)
    parser = final_refusal("http://s", 400, '"auto" tool choice requires --enable-auto-tool-choice')
    assert isinstance(parser, ModelConfigError)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 502, "message": "Provider returned error"}, 502),
        ({"code": "429", "message": "slow down"}, 429),
        ({"code": "context_length_exceeded", "message": "too long"}, 400),
        ({"type": "error", "message": "This model's maximum context length is 8 tokens"}, 400),
        ({"code": "content_filter", "message": "no"}, 400),
        ({"code": "invalid_api_key", "message": "no"}, 401),
        ({"type": "overloaded_error", "message": "busy"}, 503),
        ({"code": 7, "message": "?"}, 502),
        ("upstream failed", 502),
    ],
)
def test_an_error_in_a_successful_response_has_the_status_that_it_means(error: Any, status: int) -> None:
    assert is_error({"error": error})
    assert status_of_error({"error": error}, 502) == status
