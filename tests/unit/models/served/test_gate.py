"""Which policy sampled which token: the runner's part of an update, tested with an operator and servers that know the
truth.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.models.pool.fleet import for_adapter
from agent_runtime.models.pool.gate import LEASE_SECONDS, SILENCE_SECONDS, CallSpans, PolicyGate
from rollout_api.model_server import AdapterStatus, Gate, ModelServerStatus, PolicyStatus, ServerStatus
from tests.support.full import examples

ME = "job-uid/0"
STEP = 0.1
CHECK_SECONDS = 3.0
MIXED_SECONDS = 10.0
"""How long the operator waits for an acknowledgement (contract of the policy update)."""


@dataclass
class Call:
    spans: CallSpans
    truth: list[int] = field(default_factory=list)
    """Version that sampled each token that has arrived."""
    on_the_way: deque[tuple[float, int]] = field(default_factory=deque)
    """(arrival, version) of tokens in transit."""


class World:
    """An operator that updates the policy repeatedly, a server, and a runner that may be cut off from the operator."""

    def __init__(self, random: Random, *, partitions: bool) -> None:
        self.random, self.partitions = random, partitions
        self.now = 0.0
        self.policy = PolicyStatus(current=0, target=0)
        self.served, self.paused, self.acknowledged = 0, False, 0
        self.gate = PolicyGate(ME)
        self.calls: list[Call] = []
        self.ended: list[tuple[list[int], list[int | None]]] = []
        """What was recorded, and the truth, of each call that is over."""
        self.operator = self._operator()
        self.operator_next = 0.0
        self.cut_off_until = self.looked = 0.0
        self.gate.see(self.policy, 0.0)

    def _operator(self) -> Iterator[float]:
        random = self.random
        while True:
            yield random.uniform(0.2, 20)
            target = self.policy.current + 1
            update = self.policy.update + 1
            self._write(gate=Gate.SHUT, target=target, update=update, mixed=[], paused=False)
            yield random.uniform(0, 2)
            self.paused = True
            yield random.uniform(0, 0.5)
            self._write(paused=True)
            waited = 0.0
            while self.acknowledged < update and waited < MIXED_SECONDS:
                yield STEP
                waited += STEP
            if self.acknowledged < update:
                self._write(mixed=[ME])
            yield random.uniform(0.2, 3)
            if loaded := random.random() < 0.8:
                self.served = target
            self.paused = False
            yield random.uniform(0, 2)
            self._write(gate=Gate.OPEN, current=target if loaded else self.policy.current, paused=False)

    def _write(self, **fields: object) -> None:
        self.policy = self.policy.model_copy(update=fields)
        if self.now >= self.cut_off_until:
            self.gate.see(self.policy, self.now)  # the watch

    def step(self) -> None:
        random, now = self.random, self.now
        while self.operator_next <= now:
            self.operator_next += next(self.operator)
        for call in self.calls:
            if not self.paused and random.random() < 0.5:
                call.on_the_way.append((now + random.uniform(0, 0.3), self.served))
            while call.on_the_way and call.on_the_way[0][0] <= now:
                call.truth.append(call.on_the_way.popleft()[1])
                self.gate.arrived(call.spans, 1, now)
        if self.partitions and random.random() < 0.003:
            self.cut_off_until = now + random.uniform(0, 40)
        if now >= self.cut_off_until:
            if now - self.looked >= CHECK_SECONDS:
                self.looked = now
                self.gate.see(self.policy, now)
            self.acknowledged = self.gate.acknowledged or 0
        self.gate.acknowledges(now)
        if self.gate.is_open and len(self.calls) < 3 and random.random() < 0.1:
            self.calls.append(Call(self.gate.begin(streamed=True)))
        for call in list(self.calls):
            patient = not self.partitions or random.random() < 0.5
            if random.random() < 0.01 and not (patient and call.spans.pending):
                self.calls.remove(call)
                recorded = [
                    None if span.version is None else int(span.version)
                    for span in self.gate.end(call.spans)
                    for _ in range(span.tokens)
                ]
                self.ended.append((call.truth, recorded))
        self.now += STEP


def play(random: Random, *, partitions: bool) -> World:
    world = World(random, partitions=partitions)
    for _ in range(1500):
        world.step()
    return world


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32))
def test_no_token_is_ever_recorded_with_a_version_that_did_not_make_it(seed: int) -> None:
    for truth, recorded in play(Random(seed), partitions=True).ended:
        assert len(recorded) == len(truth)
        assert all(said in (None, made) for made, said in zip(truth, recorded, strict=True))


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32))
def test_every_token_keeps_its_version_while_the_runner_hears_of_updates(seed: int) -> None:
    for truth, recorded in play(Random(seed), partitions=False).ended:
        assert recorded == truth
        versions = [version for version in recorded if version is not None]
        assert versions == sorted(versions)


def shut(update: int, current: int, **fields: object) -> PolicyStatus:
    return PolicyStatus.model_validate(
        {"current": current, "target": current + 1, "gate": Gate.SHUT, "update": update, **fields}
    )


def opened(update: int, current: int) -> PolicyStatus:
    return PolicyStatus(current=current, target=current, update=update)


def settle_silence(gate: PolicyGate, start: float) -> float:
    """Check until it acknowledges; return the time."""
    now = start
    while not gate.acknowledges(now):
        now += STEP
        assert now < start + 60, "never acknowledged"
    return now


def test_an_update_is_acknowledged_only_once_all_streams_are_silent() -> None:
    gate = PolicyGate(ME)
    gate.see(opened(3, 7), 0)
    call = gate.begin(streamed=True)
    gate.see(shut(4, 7, paused=True), 1)
    for tenth in range(10, 30):
        gate.arrived(call, 1, tenth / 10)
        assert not gate.acknowledges(tenth / 10)
    assert settle_silence(gate, 3.0) >= 2.9 + SILENCE_SECONDS - STEP
    assert gate.acknowledged == 4


def test_runner_without_calls_does_not_delay_an_update() -> None:
    gate = PolicyGate(ME)
    gate.see(opened(3, 7), 0)
    gate.see(shut(4, 7), 1)
    assert not gate.acknowledges(1.1), "the servers are not paused yet"
    gate.see(shut(4, 7, paused=True), 2)
    assert gate.acknowledges(2.1)


def test_a_process_that_stood_still_does_not_take_that_for_silence() -> None:
    gate = PolicyGate(ME)
    gate.see(opened(0, 0), 0)
    gate.begin(streamed=True)
    gate.see(shut(1, 0, paused=True), 1)
    assert not gate.acknowledges(1.0)
    assert not gate.acknowledges(9.0)


def test_tokens_that_arrive_before_the_open_gate_is_seen_get_the_answers_version() -> None:
    gate = PolicyGate(ME)
    gate.see(opened(0, 5), 0)
    call = gate.begin(streamed=True)
    gate.arrived(call, 2, 0.5)
    gate.see(shut(1, 5, paused=True), 1)
    now = settle_silence(gate, 1)
    gate.arrived(call, 3, now + 2)
    assert call.pending == 3
    gate.see(opened(1, 6), now + 3)
    assert [(s.tokens, s.version) for s in gate.end(call)] == [(2, "5"), (3, "6")]


def test_tokens_after_a_missed_update_have_no_version() -> None:
    gate = PolicyGate(ME)
    gate.see(opened(0, 5), 0)
    call = gate.begin(streamed=True)
    gate.arrived(call, 2, LEASE_SECONDS - 1)
    gate.arrived(call, 4, LEASE_SECONDS + 60)
    gate.see(opened(1, 6), LEASE_SECONDS + 61)
    gate.arrived(call, 1, LEASE_SECONDS + 62)
    assert [(s.tokens, s.version) for s in gate.end(call)] == [(2, "5"), (5, None)]


def test_unstreamed_answer_across_an_update_is_masked() -> None:
    gate = PolicyGate(ME)
    gate.see(opened(0, 5), 0)
    across, within = gate.begin(streamed=False), gate.begin(streamed=False)
    gate.arrived(within, 8, 0.5)
    gate.see(shut(1, 5, paused=True), 1)
    settle_silence(gate, 1)
    gate.see(opened(1, 6), 4)
    gate.arrived(across, 9, 5)
    assert [(s.tokens, s.version) for s in gate.end(within)] == [(8, "5")]
    assert [(s.tokens, s.version) for s in gate.end(across)] == [(9, None)]


def test_tokens_across_another_model_server_of_the_same_name_have_no_version() -> None:
    gate = PolicyGate(ME)
    gate.see(opened(9, 9), 0)
    call = gate.begin(streamed=True)
    gate.arrived(call, 3, 100)
    gate.see(opened(0, 0), 101)
    gate.arrived(call, 1, 102)
    assert [(s.tokens, s.version) for s in gate.end(call)] == [(4, None)]


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 2, None])), max_size=8), st.integers(0, 40))
def test_a_cut_keeps_the_versions_of_the_tokens_that_stay(chunks: list[tuple[int, int | None]], keep: int) -> None:
    call = CallSpans(began=1, streamed=True)
    versions: list[int | None] = []
    for tokens, version in chunks:
        call.pending = tokens
        call.settle(version)
        versions += [version] * tokens
    call.cut(keep)
    assert [version for tokens, version in call.settled for _ in range(tokens)] == versions[:keep]


@pytest.mark.parametrize("known", [False, True])
def test_no_call_starts_before_the_gate_is_known_to_be_open(known: bool) -> None:
    gate = PolicyGate(ME)
    if known:
        gate.see(shut(1, 0), 0)
    assert not gate.is_open


def test_endless_streams_are_not_the_old_version_forever() -> None:
    gate = PolicyGate(ME)
    gate.see(opened(0, 5), 0)
    call = gate.begin(streamed=True)
    for second in range(1, 20):
        # The operator has given up waiting at 11, and this runner has not heard of it when it looks at 10.
        if second <= 10:
            gate.see(shut(1, 5, paused=True), second)
        gate.arrived(call, 1, second + 0.5)
        assert not gate.acknowledges(second + 0.6)
    gate.see(opened(1, 6), 20)
    spans = gate.end(call)
    assert [span.version for span in spans] == ["5", None]
    assert spans[0].tokens <= 10


def test_call_to_an_adapter_keeps_the_version_with_which_each_attempt_began() -> None:
    gate = PolicyGate(ME, fixed=True)
    gate.see(opened(0, 5), 0)
    call, other = gate.begin(streamed=True), gate.begin(streamed=False)
    gate.arrived(call, 3, 1)
    gate.see(opened(0, 6), 2)
    gate.arrived(call, 2, 100)  # also without a recent status
    call.begin_again(gate.version)
    gate.arrived(call, 4, 101)
    gate.arrived(other, 1, 102)
    assert [(s.tokens, s.version) for s in gate.end(call)] == [(5, "5"), (4, "6")]
    assert [(s.tokens, s.version) for s in gate.end(other)] == [(1, "5")]


def test_servers_without_the_current_version_of_an_adapter_get_no_calls_to_it() -> None:
    names = ("has", "old", "none", "shut")
    adapters: list[dict[str, int]] = [{"red": 2, "blue": 1}, {"red": 1}, {}, {"red": 2}]
    status = ModelServerStatus(
        servers=[
            ServerStatus(name=name, url="http://x", ready=name != "shut", adapters=loaded)
            for name, loaded in zip(names, adapters, strict=True)
        ],
        policy=opened(3, 0),
        adapters={"red": AdapterStatus(current=2)},
    )
    seen = for_adapter(status, "red")
    assert ([server.name for server in seen.servers if server.ready], seen.policy.current) == (["has"], 2)
    assert seen.policy.update == 3
    assert not any(server.ready for server in for_adapter(status, "green").servers)
