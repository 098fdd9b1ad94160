"""Random lives of a fleet: whatever is lost at any time, no token gets a wrong version, and the gate opens again."""

from collections.abc import Callable
from datetime import timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_api.model_server import Gate, PolicyStep, TransferMode
from tests.support.full import examples
from tests.unit.rollout_operator.model_server.policy_world import Fleet

ANY = st.integers(0, 7)
REQUESTS = st.sampled_from(["pause", "sleep", "wake", "fetch", "reload", "half", "resume", "look", "check", "open"])


class Life(RuleBasedStateMachine):
    fleet: Fleet

    @initialize(servers=st.integers(1, 4), runners=st.integers(0, 3), mode=st.sampled_from(TransferMode))
    def begin(self, servers: int, runners: int, mode: TransferMode) -> None:
        self.fleet = Fleet(servers, runners, mode)
        self.fleet.ask_for(1)
        self.fleet.calm()
        assert self.fleet.is_at_rest()

    @rule(lost=st.integers(0, 9), steps=st.lists(ANY, max_size=12), seconds=st.sampled_from([0, 0, 1, 3]))
    def look(self, lost: int, steps: list[int], seconds: int) -> None:
        self.fleet.round(write_is_lost=lost == 0)
        for number in steps:
            self.fleet.step(number)
            self.fleet.check()
        self.fleet.now += timedelta(seconds=seconds)

    @rule(rounds=st.integers(1, 6))
    def go_on(self, rounds: int) -> None:
        """Do several quick rounds, so that updates make progress."""
        for _ in range(rounds):
            self.fleet.round()
            for number in range(len(self.fleet.runners)):
                self.fleet.acknowledge(number)
            for _ in range(40):
                self.fleet.step(0)
                self.fleet.check()
            self.fleet.now += timedelta(seconds=1)

    @rule()
    def lose_the_operator(self) -> None:
        self.fleet.crash()

    @rule(more=st.integers(1, 2), bad=st.integers(0, 4))
    def ask_for_a_new_version(self, more: int, bad: int) -> None:
        version = self.fleet.wanted.version + more
        if bad == 0:
            self.fleet.bad_versions.add(version)
        self.fleet.ask_for(version)

    @rule(of_target=st.booleans())
    def delete_the_files_of_a_version(self, of_target: bool) -> None:
        policy = self.fleet.status.policy
        self.fleet.bad_versions.add(policy.target if of_target else policy.current)

    @precondition(lambda self: self.fleet.runners)
    @rule(which=ANY)
    def acknowledge(self, which: int) -> None:
        self.fleet.acknowledge(which)

    @precondition(lambda self: self.fleet.runners)
    @rule(which=ANY, hangs=st.booleans())
    def hang_a_runner(self, which: int, hangs: bool) -> None:
        self.fleet.runners[which % len(self.fleet.runners)].hangs = hangs

    @rule(which=ANY)
    def kill_an_engine(self, which: int) -> None:
        self.fleet.kill_engine(which)

    @rule(which=ANY)
    def restart_an_engine_unseen(self, which: int) -> None:
        self.fleet.kill_engine(which)
        self.fleet.start_engines()

    @rule(which=ANY)
    def restart_an_engine_before_it_is_counted(self, which: int) -> None:
        self.fleet.restart_engine_uncounted(which)

    @rule(which=ANY)
    def restart_a_gateway(self, which: int) -> None:
        self.fleet.restart_gateway(which)

    @rule()
    def start_engines(self) -> None:
        self.fleet.start_engines()

    @rule(which=ANY, request=REQUESTS)
    def fail_a_request(self, which: int, request: str) -> None:
        self.fleet.engines[which % len(self.fleet.engines)].failing ^= {request}

    @rule(away=st.booleans())
    def lose_the_trainer(self, away: bool) -> None:
        self.fleet.trainer_away = away

    @rule(asleep=st.booleans())
    def lend_the_memory(self, asleep: bool) -> None:
        self.fleet.asleep = asleep

    @rule(seconds=st.sampled_from([10, 60, 700, 1500]))
    def wait(self, seconds: int) -> None:
        self.fleet.now += timedelta(seconds=seconds)

    @invariant()
    def versions_are_true(self) -> None:
        self.fleet.check()

    def teardown(self) -> None:
        fleet = self.fleet
        if fleet.asleep:
            fleet.settle()
            assert fleet.is_at_rest(), f"{fleet.status}\n{fleet.last}"
        fleet.calm()
        if not fleet.is_at_rest():
            assert fleet.bad_versions & {fleet.status.policy.current, fleet.wanted.version}, (
                f"{fleet.status}\n{fleet.last}"
            )
            self._check_reason()
            fleet.ask_for(max(fleet.wanted.version, *fleet.bad_versions) + 1)
            fleet.calm()
        assert fleet.is_at_rest(), f"{fleet.status}\n{fleet.last}"

    def _check_reason(self) -> None:
        """Check what is reported about versions that cannot be fetched."""
        fleet = self.fleet
        opened = sum(fleet.is_open(engine) for engine in fleet.engines)
        if fleet.status.policy.current not in fleet.bad_versions:
            assert opened == len(fleet.engines), fleet.status
        elif opened:
            return
        reasons = ("FetchFailed",) if opened else ("Loading", "NotEnoughServers", "RollingBack")
        for _ in range(10):
            assert fleet.last is not None
            assert fleet.last.reason in reasons, fleet.last
            assert not fleet.last.settled
            if ": fetch" in fleet.last.message:
                return
            fleet.settle(rounds=1)  # a retry has no result for a moment
        raise AssertionError(f"no reason: {fleet.last}")


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(60), stateful_step_count=40)


def _with_calls_before_its_restart_is_counted(mode: TransferMode, servers: int = 1) -> Fleet:
    fleet = Fleet(servers, runners=0, mode=mode)
    fleet.ask_for(1)
    fleet.calm()
    fleet.kill_engine(0)
    fleet.start_engines()
    fleet.restart_engine_uncounted(0)
    _go_on(fleet, lambda: fleet.engines[0].had_traffic)
    return fleet


def _go_on(fleet: Fleet, is_over: Callable[[], bool]) -> None:
    for _ in range(30):
        if is_over():
            return
        fleet.round()
        while fleet.under_way:
            fleet.step(0)
        fleet.now += timedelta(seconds=1)
    raise AssertionError(fleet.status)


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("closed_by", ["nothing", "a person", "an update", "a sleep"])
def test_weights_never_change_under_calls_of_an_engine_whose_restart_is_counted_late(
    mode: TransferMode, closed_by: str
) -> None:
    fleet = _with_calls_before_its_restart_is_counted(mode)
    engine = fleet.engines[0]
    match closed_by:
        case "a person":
            engine.paused, engine.opened = True, None
        case "an update":
            fleet.ask_for(2)
            _go_on(fleet, lambda: engine.paused)
        case "a sleep":
            fleet.asleep = True
            _go_on(fleet, lambda: engine.asleep)
    fleet.start_engines()
    _go_on(fleet, lambda: fleet.status.servers[0].restarts == engine.restarts)
    fleet.ask_for(2)
    fleet.calm()
    assert fleet.is_at_rest()
    assert (engine.weights, fleet.engines[0].weights) == (1, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_calls_of_an_engine_whose_restart_is_counted_during_a_load_wait_for_the_others(fails: bool) -> None:
    fleet = _with_calls_before_its_restart_is_counted(TransferMode.PULL, servers=3)
    _go_on(fleet, lambda: all(fleet.is_open(engine) for engine in fleet.engines))
    engine, *others = fleet.engines
    fleet.ask_for(2)
    _go_on(fleet, lambda: fleet.status.policy.step is PolicyStep.LOADING)
    for other in others:
        other.failing.add("fetch")
    fleet.round()
    loads = fleet.under_way
    fleet.under_way = loads[:1]
    assert loads[0][0].servers[0].name == engine.name
    while fleet.under_way:
        fleet.step(0)
    fleet.start_engines()
    assert (engine.weights, engine.named) == (2, "2")
    for _ in range(5):
        fleet.round()
        while fleet.under_way:
            fleet.step(0)
    assert engine.paused
    fleet.under_way += loads[1:]
    if not fails:
        for other in others:
            other.failing.clear()
    _go_on(fleet, lambda: fleet.status.policy.gate is Gate.OPEN)
    assert fleet.status.policy.current == (1 if fails else 2)
    assert engine.leaving is fails
    assert engine.paused is fails
