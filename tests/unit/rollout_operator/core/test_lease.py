"""The lease: two replicas never write at once, and one always takes over."""

from collections.abc import Coroutine, Generator, Mapping
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_api.on_cluster.operator_config import LeaseSettings
from rollout_operator.api import ApiError, KubeApi
from rollout_operator.config import WRITE_SECONDS
from rollout_operator.lease import Leadership, SeenLease, decide, updated

SETTINGS = LeaseSettings(namespace="n")
REPLICAS = ("a", "b", "c")


class Request:
    """A request in transit: sent, handled by the API server and answered at separate times."""

    def __init__(self, body: Mapping[str, Any] | None) -> None:
        self.body = body
        self.is_handled = False
        self.answer: dict[str, Any] | None = None
        self.error: ApiError | None = None

    def __await__(self) -> Generator["Request", None, dict[str, Any] | None]:
        yield self
        if self.error:
            raise self.error
        return self.answer


class Api:
    """Sends a replica's requests."""

    async def find(self, kind: str, namespace: str, name: str) -> Any:
        return await Request(None)

    async def create(self, body: Mapping[str, Any]) -> Any:
        return await Request(body)

    replace = create


class Replica:
    """One process with its own clock."""

    def __init__(self, name: str, election: "Election", offset: float) -> None:
        self.offset = offset
        self.leadership = Leadership(
            cast("KubeApi", Api()), SETTINGS, name, lambda: election.now + offset, on_won=lambda: None
        )
        self.round: Coroutine[Request, None, None] | None = None
        self.request: Request | None = None

    def go_on(self) -> None:
        """Run until the next request is sent, or the round is over."""
        assert self.round is not None
        try:
            self.request = self.round.send(None)
        except (StopIteration, ApiError):
            self.round = self.request = None

    def give_up(self) -> None:
        """Lose the answer, or deliver it too late."""
        assert self.round is not None
        self.round.close()
        self.round = self.request = None


class Election(RuleBasedStateMachine):
    """Replicas whose requests are sent, handled and answered in any order, with an API server with optimistic locking."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.version = 0
        self.lease: dict[str, Any] | None = None
        self.was_deleted = False
        offsets = zip(REPLICAS, (0.0, 5000.0, 123.0), strict=True)
        self.replicas = {name: Replica(name, self, offset) for name, offset in offsets}

    @rule(name=st.sampled_from(REPLICAS))
    def send(self, name: str) -> None:
        replica = self.replicas[name]
        if replica.round is None:
            replica.round = replica.leadership._try()
            replica.go_on()

    @rule(name=st.sampled_from(REPLICAS))
    def handle(self, name: str) -> None:
        request = self.replicas[name].request
        if request is None or request.is_handled:
            return
        request.is_handled = True
        current = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if request.body is not None:
            if request.body["metadata"].get("resourceVersion") != current:
                request.error = ApiError(409, "it was changed")
                return
            self.version += 1
            self.lease = {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(request.body["spec"])}
        request.answer = self.lease

    @rule(name=st.sampled_from(REPLICAS))
    def answer(self, name: str) -> None:
        replica = self.replicas[name]
        if replica.request is not None and replica.request.is_handled:
            replica.go_on()

    @precondition(lambda self: any(replica.round for replica in self.replicas.values()))
    @rule(name=st.sampled_from(REPLICAS))
    def lose(self, name: str) -> None:
        if self.replicas[name].round is not None:
            self.replicas[name].give_up()

    @precondition(
        lambda self: not self.was_deleted and all(replica.leadership._seen for replica in self.replicas.values())
    )
    @rule()
    def delete(self) -> None:
        """Delete the Lease, which all replicas have seen."""
        self.lease, self.was_deleted = None, True

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def one_writes_at_most(self) -> None:
        # The last write of one holder has ended before another one may start to write.
        until = {name: replica.leadership._held_until - replica.offset for name, replica in self.replicas.items()}
        leading = [name for name in REPLICAS if self.replicas[name].leadership.held()]
        assert len(leading) <= 1
        others = [name for name in REPLICAS if name not in leading and until[name] > 0]
        assert not leading or all(self.now >= until[name] + WRITE_SECONDS for name in others), (self.now, until)

    def teardown(self) -> None:
        """When all other replicas have died, the last one gets the lease within two durations."""
        survivor = self.replicas["c"]
        if survivor.round is not None:
            survivor.give_up()
        for _ in range(4):
            self.send("c")
            while survivor.round is not None:
                self.handle("c")
                self.answer("c")
            if survivor.leadership.held():
                return
            self.now += SETTINGS.duration_seconds / 2
        raise AssertionError("nobody leads")


TestElection = Election.TestCase


def test_lease_that_was_renewed_meanwhile_is_respected_for_its_whole_duration() -> None:
    election = Election()
    for name in ("a", "b"):
        election.send(name)
        election.handle(name)
        election.answer(name)  # the Lease is free: `a` requests it, and `b` gets a conflict
        election.handle(name)
        election.answer(name)
    election.time_passes(1.0)
    election.send("b")
    election.time_passes(4.0)
    for step in (election.send, election.handle, election.answer):
        step("a")
    election.handle("b")
    election.answer("b")
    for _ in range(30):
        election.time_passes(0.5)
        election.send("b")
        for _ in range(2):
            election.handle("b")
            election.answer("b")
        election.one_writes_at_most()


def test_a_released_lease_is_taken_at_once() -> None:
    seen = SeenLease(holder="", duration=1, version="7", since=100.0)
    assert decide(seen, "me", 100.0) == "take"


def test_the_age_of_a_lease_is_measured_by_our_own_clock() -> None:
    lease = {
        "metadata": {"resourceVersion": "7"},
        "spec": {"holderIdentity": "other", "leaseDurationSeconds": 15, "renewTime": "1990-01-01T00:00:00.000000Z"},
    }
    first = updated(None, lease, now=100.0)
    assert decide(first, "me", 100.0) == "wait"
    again = updated(first, lease, now=116.0)
    assert decide(again, "me", 116.0) == "take"
    renewed = updated(again, lease | {"metadata": {"resourceVersion": "8"}}, now=116.0)
    assert decide(renewed, "me", 116.0) == "wait"


def test_deleted_lease_is_created_again_by_its_holder_and_by_others_only_when_its_term_is_over() -> None:
    election = Election()

    def go_through(name: str) -> None:
        election.send(name)
        while election.replicas[name].round is not None:
            election.handle(name)
            election.answer(name)

    go_through("a")
    go_through("b")
    election.delete()
    go_through("b")
    assert election.lease is None
    go_through("a")  # Its renewal is refused, so that it reads the Lease at the next try.
    go_through("a")
    assert election.lease is not None
    assert election.lease["spec"]["holderIdentity"] == "a"
    go_through("b")
    election.lease = None
    election.time_passes(SETTINGS.duration_seconds)
    go_through("b")
    assert election.replicas["b"].leadership.held()
