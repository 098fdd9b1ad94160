"""What a policy update does in the situations that a user would ask about, one by one."""

from datetime import timedelta

from rollout_api.model_server import Gate, PolicyStep, ServerState, TransferMode
from rollout_operator.model_server.control import version_of
from rollout_operator.model_server.policy import decide
from rollout_operator.model_server.update_state import Call, ServerReport
from tests.unit.rollout_operator.model_server.policy_world import Fleet


def at_version(version: int, servers: int = 3, runners: int = 1, mode: TransferMode = TransferMode.PULL) -> Fleet:
    fleet = Fleet(servers, runners, mode)
    fleet.ask_for(version)
    fleet.calm()
    assert fleet.is_at_rest()
    return fleet


def step_of(fleet: Fleet) -> PolicyStep | None:
    return fleet.status.policy.step


def until(fleet: Fleet, step: PolicyStep | None, rounds: int = 100) -> None:
    """Go on, without acknowledgements, until the update is at a step."""
    for _ in range(rounds):
        fleet.round()
        if step_of(fleet) is step:
            return
        while fleet.under_way:
            fleet.step(0)
    raise AssertionError(f"never comes to {step}: {fleet.status}")


def test_an_engines_own_name_for_its_weights_is_the_models_own_version_and_a_broken_load_is_none() -> None:
    assert [version_of(name) for name in ("7", "default", None, "", "loading-7", "step-7")] == [7, 0, 0, 0, None, 0]


def test_weights_are_fetched_before_anybody_is_held_up() -> None:
    fleet = at_version(1)
    fleet.ask_for(2)
    until(fleet, PolicyStep.PAUSING)
    assert all(engine.fetched == 2 for engine in fleet.engines)
    assert not any(engine.paused for engine in fleet.engines)


def test_a_wrong_uri_is_said_and_holds_up_nobody() -> None:
    fleet = at_version(1)
    fleet.bad_versions.add(2)
    fleet.ask_for(2)
    fleet.calm(rounds=100)
    assert fleet.last is not None
    assert (fleet.last.reason, fleet.status.policy.gate) == ("FetchFailed", Gate.OPEN)
    assert all(entry.ready for entry in fleet.status.servers)


def test_a_silent_runner_holds_up_an_update_for_ten_seconds_and_is_named() -> None:
    fleet = at_version(1, runners=2)
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    fleet.now += timedelta(seconds=9)
    fleet.round()
    assert step_of(fleet) is PolicyStep.ACKNOWLEDGING
    fleet.now += timedelta(seconds=1)
    fleet.round()
    assert step_of(fleet) is PolicyStep.LOADING
    assert fleet.status.policy.mixed == ["job/1"]


def test_one_server_that_cannot_load_is_replaced_and_the_others_go_on() -> None:
    fleet = at_version(1)
    fleet.engines[0].failing.add("reload")
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    until(fleet, None)
    assert fleet.status.policy.current == 2
    evicted = [entry.name for before in fleet.history for entry in before.servers if entry.state is ServerState.EVICTED]
    assert set(evicted) == {"s-0"}
    assert fleet.engines[0].leaving
    assert {entry.name for entry in fleet.status.servers if entry.ready} == {"s-1", "s-2"}
    fleet.calm()
    assert fleet.is_at_rest()


def test_too_few_that_can_load_all_go_back_and_a_higher_version_is_wanted() -> None:
    fleet = at_version(1)
    fleet.engines[0].failing.add("reload")
    fleet.engines[1].failing.add("half")
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    until(fleet, PolicyStep.LOADING)
    fleet.round()
    while fleet.under_way:
        fleet.step(0)
    fleet.round()
    assert (fleet.status.policy.target, fleet.status.policy.failed) == (1, 2)
    fleet.calm()
    assert {engine.weights for engine in fleet.engines} == {1}
    assert fleet.last is not None
    assert fleet.last.reason == "LoadFailed"
    fleet.ask_for(3)
    fleet.calm()
    assert {engine.weights for engine in fleet.engines} == {3}


def test_an_engine_that_ends_in_between_does_not_stop_an_update() -> None:
    fleet = at_version(1)
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.kill_engine(0)
    fleet.kill_engine(1)
    fleet.acknowledge(0)
    until(fleet, None)
    assert (fleet.status.policy.current, fleet.status.policy.failed) == (2, None)


def test_an_operator_that_dies_between_a_load_and_its_name_does_not_trust_the_old_name() -> None:
    fleet = at_version(1, servers=1, runners=0)
    fleet.ask_for(2)
    until(fleet, PolicyStep.LOADING)
    fleet.round()
    while fleet.engines[0].weights != 2:
        fleet.step(0)
    fleet.crash()
    fleet.engines[0].failing.add("reload")
    fleet.round()
    while fleet.under_way:
        fleet.step(0)
    decision = fleet.round()
    assert [task.operation.call for task in decision.tasks] == [Call.LOAD]


def test_one_that_only_names_the_version_is_told_by_its_checksums() -> None:
    for servers in (2, 3):
        fleet = at_version(1, servers=servers)
        fleet.engines[0].lies = True
        fleet.ask_for(2)
        fleet.calm(rounds=60)
        assert fleet.is_at_rest()
        assert {engine.weights for engine in fleet.engines} == {2}, servers


def test_weights_are_not_resumed_before_servers_say_that_they_have_them() -> None:
    fleet = at_version(1)
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    until(fleet, PolicyStep.LOADING)
    decision = fleet.round()
    assert [task.operation.call for task in decision.tasks] == [Call.LOAD] * 3
    assert fleet.status.policy.step is PolicyStep.LOADING


def test_the_gate_stays_shut_while_servers_are_paused_or_were_not_asked_since_they_were_resumed() -> None:
    fleet = at_version(1)
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    until(fleet, PolicyStep.RESUMING)
    before = fleet.now - timedelta(seconds=1)
    for report, asked in (
        (ServerReport(fleet.now, paused=True, version=2, checked=True), Call.RESUME),
        (ServerReport(before, paused=False, version=2, checked=True), Call.LOOK),
        (ServerReport(fleet.now, paused=False, version=2, checked=False), Call.CHECK),
        (ServerReport(fleet.now, paused=False, version=2, checked=True), Call.OPEN),
    ):
        fleet.reports = {engine.key: report for engine in fleet.engines}
        decision = decide(fleet.seen())
        assert decision.policy.gate is Gate.SHUT
        assert [task.operation.call for task in decision.tasks] == [asked] * 3


def test_a_new_server_with_a_version_that_was_given_up_gets_no_calls_until_it_has_the_current_one() -> None:
    fleet = at_version(1)
    fleet.kill_engine(0)
    fleet.start_engines()
    newcomer = fleet.engines[0]
    fleet.reports[newcomer.key] = ServerReport(fleet.now, paused=False, version=2, checked=True)
    decision = fleet.round()
    assert [entry.ready for entry in fleet.status.servers] == [False, True, True]
    assert [task.operation.call for task in decision.tasks if task.servers[0].key == newcomer.key] == [Call.LOAD]


def test_a_newer_version_takes_the_place_of_one_that_is_not_loaded_yet() -> None:
    fleet = at_version(1)
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.ask_for(3)
    fleet.calm()
    assert fleet.status.policy.update == 1
    assert {engine.weights for engine in fleet.engines} == {3}


def test_a_trainer_that_is_away_costs_no_server() -> None:
    fleet = at_version(1, mode=TransferMode.PUSH)
    fleet.trainer_away = True
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    until(fleet, None)
    assert (fleet.status.policy.current, fleet.status.policy.failed) == (1, 2)
    assert all(entry.ready for entry in fleet.status.servers)


def half_pushed() -> Fleet:
    """One whose trainer sent version 2 in part, and died: the update has failed, version 1 is asked for again."""
    fleet = at_version(1, mode=TransferMode.PUSH)
    for engine in fleet.engines:
        engine.failing.add("half")
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    until(fleet, PolicyStep.LOADING)
    while fleet.status.policy.failed is None:
        fleet.round()
        while fleet.under_way:
            fleet.step(0)
    return fleet


def test_a_trainer_that_dies_while_it_sends_costs_no_server_however_long_it_is_away() -> None:
    fleet = half_pushed()
    fleet.trainer_away = True
    asked = 0
    for _ in range(3000):
        asked += sum(task.operation.call is Call.LOAD for task in fleet.round().tasks)
        while fleet.under_way:
            fleet.step(0)
        fleet.now += timedelta(seconds=1)
    assert 50 < asked < 150, "again and again, and not all the time"
    assert fleet.last is not None
    assert (fleet.last.reason, fleet.status.policy.gate) == ("RollingBack", Gate.SHUT)
    assert "the hook failed" in fleet.last.message
    fleet.calm()
    assert [engine.uid for engine in fleet.engines] == ["uid-0", "uid-1", "uid-2"]
    assert {engine.weights for engine in fleet.engines} == {1}
    assert fleet.is_at_rest()


def test_a_newer_version_is_loaded_when_the_trainer_is_back_and_the_old_one_is_not_waited_for() -> None:
    fleet = half_pushed()
    fleet.trainer_away = True
    for _ in range(10):
        fleet.round()
        while fleet.under_way:
            fleet.step(0)
    fleet.ask_for(3)
    fleet.calm()
    assert {engine.weights for engine in fleet.engines} == {3}
    assert [engine.uid for engine in fleet.engines] == ["uid-0", "uid-1", "uid-2"]


def test_a_server_that_a_person_paused_is_resumed_and_gets_no_calls_until_then() -> None:
    fleet = at_version(1)
    fleet.engines[0].paused = True
    fleet.now += timedelta(seconds=10)
    fleet.round()
    while fleet.under_way:
        fleet.step(0)
    fleet.round()
    assert [entry.ready for entry in fleet.status.servers] == [False, True, True]
    fleet.calm()
    assert not fleet.engines[0].paused


def test_a_gateway_that_forgot_is_told_again_and_its_engine_stays_as_it_is() -> None:
    fleet = at_version(1)
    fleet.restart_gateway(0)
    fleet.crash()
    fleet.calm()
    told = fleet.engines[0]
    assert (told.opened, told.restarts, told.uid) == (1, 0, "uid-0")


def test_an_engine_that_restarted_while_the_operator_was_down_answers_nothing_until_it_has_the_policy() -> None:
    fleet = at_version(1)
    fleet.restart_engine_uncounted(0)
    fleet.crash()
    fleet.round()
    fleet.check()
    assert fleet.engines[0].opened is None
    fleet.calm()
    assert [(engine.opened, engine.weights) for engine in fleet.engines] == [(1, 1)] * 3
