"""Which request a retry repeats: never two samples of one request, never one sample of two."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent_runtime.proxy.call import Answers, Identity
from agent_runtime.proxy.chat import BadRequest
from tests.support.full import examples


def test_request_is_identified_by_api_and_body_and_a_header_marks_a_retry() -> None:
    first = Identity.of("/messages", {}, b"{}")
    assert first.digest == Identity.of("/messages", {"x-stainless-retry-count": "2"}, b"{}").digest
    assert first.digest != Identity.of("/responses", {}, b"{}").digest
    assert first.digest != Identity.of("/messages", {}, b"{ }").digest
    counts = {"": False, "0": False, "x": False, "-1": False, "²": False, "9" * 5000: False, "1": True, "17": True}
    for count, is_retry in counts.items():
        assert Identity.of("/messages", {"x-stainless-retry-count": count}, b"").is_retry is is_retry


def test_a_key_that_is_too_long_to_keep_is_refused() -> None:
    with pytest.raises(BadRequest, match="Idempotency-Key"):
        Identity.of("/messages", {"idempotency-key": "k" * 256}, b"")


@dataclass(eq=False)
class Sample:
    """A call, and its outcome."""

    identity: Identity
    live: bool = True
    delivered_to: list[str] = field(default_factory=list)


class Retries(RuleBasedStateMachine):
    """Clients send bodies, lose replies and send them again."""

    @initialize()
    def begin(self) -> None:
        """Begin without requests."""
        self.answers: Answers[Sample] = Answers()
        self.samples: list[Sample] = []

    @rule(body=st.sampled_from("ab"), is_retry=st.booleans(), key=st.sampled_from([None, None, "k"]))
    def ask(self, body: str, is_retry: bool, key: str | None) -> None:
        """Send a request."""
        identity = Identity(body, key, is_retry)
        try:
            found = self.answers.find(identity)
        except BadRequest:
            assert key is not None
            return
        if found is None:
            sample = Sample(identity)
            self.samples.append(sample)
            self.answers.begun(identity, sample)
            return
        assert found.identity.digest == body
        if key is None:
            assert is_retry
            assert not found.live
            assert not found.delivered_to
            found.delivered_to.append("retry")
        else:
            assert found.identity.key == key

    @precondition(lambda self: any(sample.live for sample in self.samples))
    @rule(data=st.data(), end=st.sampled_from(["delivered", "undelivered", "failed"]))
    def finish(self, data: st.DataObject, end: str) -> None:
        """End a call."""
        sample = data.draw(st.sampled_from([sample for sample in self.samples if sample.live]))
        sample.live = False
        if end == "failed":
            self.answers.failed(sample.identity, sample)
            sample.delivered_to.append("nobody, it failed")
        elif end == "undelivered":
            self.answers.undelivered(sample.identity, sample)
        else:
            sample.delivered_to.append("original")

    @invariant()
    def nobody_shares_without_a_key(self) -> None:
        """Check that each sample was delivered to at most one client."""
        assert all(len(sample.delivered_to) <= 1 for sample in getattr(self, "samples", []))


TestRetries = Retries.TestCase
TestRetries.settings = settings(max_examples=examples(50), stateful_step_count=20)
