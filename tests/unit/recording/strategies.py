"""Hypothesis strategies for the content of a journal."""

from typing import Any, TypeVar

from hypothesis import strategies as st

from rollout_api.records import (
    ArtifactsRecord,
    AttemptRecord,
    FailedRecord,
    IntentRecord,
    Observation,
    ObservationsRecord,
    PolicySpan,
    Record,
    ResponseRecord,
    StopReason,
    StopRecord,
    Usage,
)

T = TypeVar("T")


def built(form: type[T], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Instances of a model. (`st.builds` reads the wire names from its signature, and would fill them in too.)"""
    return st.fixed_dictionaries(fields).map(lambda given: form(**given))


times = st.floats(min_value=0, max_value=4e9, allow_nan=False)
texts = st.text(max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, json_values, max_size=3)
token_ids = st.lists(st.integers(0, 200_000), max_size=8)
messages: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.none() | texts}
)

records: st.SearchStrategy[Record] = st.one_of(
    built(AttemptRecord, time=times, runner=texts, workspace=objects, sandbox=objects),
    built(
        IntentRecord,
        turn=st.integers(0, 99),
        time=times,
        keep=st.integers(0, 9),
        messages=st.lists(messages, max_size=3),
        tools=st.none() | st.lists(objects, max_size=2),
        branch=st.integers(0, 3),
    ),
    built(
        ResponseRecord,
        turn=st.integers(0, 99),
        time=times,
        seconds=times,
        message=messages,
        finish_reason=texts,
        model=texts,
        usage=built(Usage, prompt_tokens=st.integers(0, 9), completion_tokens=st.integers(0, 9)),
        prompt_token_ids=st.none() | token_ids,
        completion_token_ids=st.none() | token_ids,
        logprobs=st.none() | st.lists(st.floats(-50, 0), max_size=8),
        prompt_keep=st.integers(0, 9),
        policy_spans=st.lists(built(PolicySpan, tokens=st.integers(0, 4), version=st.none() | texts), max_size=2),
    ),
    built(
        ObservationsRecord,
        turn=st.integers(0, 99),
        time=times,
        results=st.lists(
            built(Observation, call_id=texts, tool=texts, content=texts, error=st.booleans(), data=objects), max_size=2
        ),
    ),
    built(StopRecord, time=times, stop_reason=st.sampled_from(StopReason), message=texts, agent_seconds=times),
    built(ArtifactsRecord, time=times, key=st.none() | texts, bytes=st.integers(0, 2**40)),
    built(FailedRecord, time=times, reason=texts, message=texts),
)
