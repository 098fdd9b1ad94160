"""The lease: two replicas never write at once, and one always takes over."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollout_operator.lease import SeenLease, decide, note

DURATION, RENEW_DEADLINE, WRITE = 15.0, 10.0, 5.0
"""Seconds; WRITE: for how long a write that was begun may still reach the API server."""
REPLICAS = ("a", "b", "c")


class Replica:
    """What one replica knows: its own clock, what it has read, until when it may write."""

    def __init__(self, clock_offset: float) -> None:
        self.offset = clock_offset
        self.seen: SeenLease | None = None
        self.held_until = float("-inf")


class Election(RuleBasedStateMachine):
    """Replicas that look, write, stall and lose replies, with clocks that disagree, before an API server that keeps one
    lease with optimistic locking."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.version = 0
        self.lease: dict[str, Any] | None = None
        self.replicas = {name: Replica(offset) for name, offset in zip(REPLICAS, (0.0, 5000.0, 123.0), strict=True)}

    @rule(name=st.sampled_from(REPLICAS), reply_is_lost=st.booleans(), stale=st.booleans(), latency=st.floats(0, 4))
    def look(self, name: str, reply_is_lost: bool, stale: bool, latency: float) -> None:
        """One round of a replica. `stale`: it acts on what it read before, and meets the optimistic lock."""
        replica = self.replicas[name]
        asked = self.now + replica.offset
        if not stale:
            replica.seen = note(replica.seen, self.lease, asked) if self.lease else None
        choice = decide(replica.seen, name, asked)
        self.now += latency
        if choice == "wait":
            return
        expected = replica.seen.version if replica.seen else None
        current = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if expected != current:
            return  # 409
        self.version += 1
        self.lease = {
            "metadata": {"resourceVersion": str(self.version)},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": int(DURATION)},
        }
        if not reply_is_lost:
            replica.seen = note(replica.seen, self.lease, asked)
            replica.held_until = asked - replica.offset + RENEW_DEADLINE

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def one_writes_at_most(self) -> None:
        # A holder's last write has ended before anybody else may begin one.
        writing = [name for name, replica in self.replicas.items() if self.now < replica.held_until + WRITE]
        leading = [name for name, replica in self.replicas.items() if self.now < replica.held_until]
        assert len(leading) <= 1
        assert not leading or set(writing) <= set(leading), (leading, writing)

    def teardown(self) -> None:
        """When all others have died, whoever is left gets the lease within two durations."""
        survivor = self.replicas["c"]
        for _ in range(2):
            self.look("c", reply_is_lost=False, stale=False, latency=0.0)
            self.now += DURATION
        self.look("c", reply_is_lost=False, stale=False, latency=0.0)
        assert self.now < survivor.held_until


TestElection = Election.TestCase


def test_a_released_lease_is_taken_at_once() -> None:
    seen = SeenLease(holder="", duration=1, version="7", since=100.0)
    assert decide(seen, "me", 100.0) == "take"


def test_the_age_of_a_lease_is_measured_by_our_own_clock() -> None:
    lease = {
        "metadata": {"resourceVersion": "7"},
        "spec": {"holderIdentity": "other", "leaseDurationSeconds": 15, "renewTime": "1990-01-01T00:00:00.000000Z"},
    }
    first = note(None, lease, now=100.0)
    assert decide(first, "me", 100.0) == "wait"
    again = note(first, lease, now=116.0)
    assert decide(again, "me", 116.0) == "take"
    renewed = note(again, lease | {"metadata": {"resourceVersion": "8"}}, now=116.0)
    assert decide(renewed, "me", 116.0) == "wait"
