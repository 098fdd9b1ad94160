"""A policy update in single situations that matter to users."""

from datetime import timedelta

import pytest

from rollout_api.model_server import Gate, PolicyStep, ServerState, TransferMode
from rollout_operator.model_server.control import version_of
from rollout_operator.model_server.policy import decide
from rollout_operator.server_contact import Call, ServerReport
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
    """Continue, without acknowledgements, until the update is at a step."""
    for _ in range(rounds):
        fleet.round()
        if step_of(fleet) is step:
            return
        while fleet.under_way:
            fleet.step(0)
    raise AssertionError(f"never comes to {step}: {fleet.status}")


def look_in_vain(fleet: Fleet, rounds: int, seconds: float) -> None:
    """Do rounds at this interval while no engine responds."""
    for engine in fleet.engines:
        engine.failing.add("look")
    for _ in range(rounds):
        fleet.now += timedelta(seconds=seconds)
        fleet.round()
        while fleet.under_way:
            fleet.step(0)


def assert_all_load(fleet: Fleet, version: int) -> None:
    """Let the engines respond again, and check that all get this version and none was evicted."""
    for engine in fleet.engines:
        engine.failing.clear()
    fleet.calm()
    assert fleet.status.policy.current == version
    assert not any(entry.state is ServerState.EVICTED for before in fleet.history for entry in before.servers)


def test_engines_own_name_for_its_weights_is_version_0_unless_a_load_broke() -> None:
    assert [version_of(name) for name in ("7", "default", None, "", "loading-7", "step-7")] == [7, 0, 0, 0, None, 0]


def test_weights_are_fetched_before_any_call_is_held() -> None:
    fleet = at_version(1)
    fleet.ask_for(2)
    until(fleet, PolicyStep.PAUSING)
    assert all(engine.fetched == 2 for engine in fleet.engines)
    assert not any(engine.paused for engine in fleet.engines)


def test_wrong_uri_is_reported_and_delays_no_call() -> None:
    fleet = at_version(1)
    fleet.bad_versions.add(2)
    fleet.ask_for(2)
    fleet.calm(rounds=100)
    assert fleet.last is not None
    assert (fleet.last.reason, fleet.status.policy.gate) == ("FetchFailed", Gate.OPEN)
    assert all(entry.ready for entry in fleet.status.servers)


def test_silent_runner_delays_an_update_by_ten_seconds_and_is_named() -> None:
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


def test_server_that_cannot_load_is_replaced_and_the_others_continue() -> None:
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


def test_operator_that_died_between_load_and_label_distrusts_the_old_label() -> None:
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


def test_server_that_only_sets_the_label_is_detected_by_checksums() -> None:
    for servers in (2, 3):
        fleet = at_version(1, servers=servers)
        fleet.engines[0].lies = True
        fleet.ask_for(2)
        fleet.calm(rounds=60)
        assert fleet.is_at_rest()
        assert {engine.weights for engine in fleet.engines} == {2}, servers


def test_traffic_is_not_resumed_before_servers_report_the_new_weights() -> None:
    fleet = at_version(1)
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    until(fleet, PolicyStep.LOADING)
    decision = fleet.round()
    assert [task.operation.call for task in decision.tasks] == [Call.LOAD] * 3
    assert fleet.status.policy.step is PolicyStep.LOADING


def test_gate_stays_closed_until_servers_are_checked_after_the_resume() -> None:
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


def test_new_server_with_an_abandoned_version_gets_no_calls_before_a_load() -> None:
    fleet = at_version(1)
    fleet.kill_engine(0)
    fleet.start_engines()
    newcomer = fleet.engines[0]
    fleet.reports[newcomer.key] = ServerReport(fleet.now, paused=False, version=2, checked=True)
    decision = fleet.round()
    assert [entry.ready for entry in fleet.status.servers] == [False, True, True]
    assert [task.operation.call for task in decision.tasks if task.servers[0].key == newcomer.key] == [Call.LOAD]


def test_newer_version_replaces_one_that_is_not_loaded_yet() -> None:
    fleet = at_version(1)
    before = fleet.status.policy.update
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.ask_for(3)
    fleet.calm()
    assert fleet.status.policy.update == before + 1
    assert {engine.weights for engine in fleet.engines} == {3}


def test_unavailable_trainer_removes_no_server() -> None:
    fleet = at_version(1, mode=TransferMode.PUSH)
    fleet.trainer_away = True
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    until(fleet, None)
    assert (fleet.status.policy.current, fleet.status.policy.failed) == (1, 2)
    assert all(entry.ready for entry in fleet.status.servers)


def half_pushed() -> Fleet:
    """Return a fleet whose trainer sent a part of version 2 and died: the update has failed, and version 1 is wanted
    again.
    """
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


def test_trainer_that_dies_during_a_push_removes_no_server() -> None:
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


def test_newer_version_is_loaded_after_the_trainer_returns() -> None:
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


def test_restarted_gateway_is_notified_again_and_its_engine_is_unchanged() -> None:
    fleet = at_version(1)
    fleet.restart_gateway(0)
    fleet.crash()
    fleet.calm()
    told = fleet.engines[0]
    assert (told.opened, told.restarts, told.uid) == (1, 0, "uid-0")


def test_engine_that_restarted_without_operator_serves_only_after_a_load() -> None:
    fleet = at_version(1)
    fleet.restart_engine_uncounted(0)
    fleet.crash()
    fleet.round()
    fleet.check()
    assert fleet.engines[0].opened is None
    fleet.calm()
    assert [(engine.opened, engine.weights) for engine in fleet.engines] == [(1, 1)] * 3


@pytest.mark.parametrize("step", [PolicyStep.PAUSING, PolicyStep.LOADING])
def test_operator_restarted_late_in_a_step_asks_before_it_evicts_a_server(step: PolicyStep) -> None:
    fleet = at_version(1)
    fleet.ask_for(2)
    until(fleet, PolicyStep.PAUSING)
    if step is PolicyStep.LOADING:
        until(fleet, PolicyStep.ACKNOWLEDGING)
        fleet.acknowledge(0)
        until(fleet, PolicyStep.LOADING)
    fleet.now += timedelta(seconds=100)
    fleet.crash()
    look_in_vain(fleet, rounds=10, seconds=3)
    assert_all_load(fleet, 2)


def test_restarted_operator_waits_for_engines_that_load_for_minutes() -> None:
    fleet = at_version(1)
    fleet.ask_for(2)
    until(fleet, PolicyStep.ACKNOWLEDGING)
    fleet.acknowledge(0)
    until(fleet, PolicyStep.LOADING)
    fleet.crash()
    look_in_vain(fleet, rounds=100, seconds=6)
    assert (step_of(fleet), fleet.status.policy.target) == (PolicyStep.LOADING, 2)
    assert_all_load(fleet, 2)


def test_update_number_grows_when_the_version_changes_while_no_server_takes_calls() -> None:
    """Runners may hold tokens of the old version, from a server that has just ended or is draining."""
    fleet = at_version(1, servers=1)
    before = fleet.status.policy
    fleet.kill_engine(0)
    fleet.ask_for(2)
    fleet.round()
    after = fleet.status.policy
    assert (after.current, after.gate, after.update) == (2, Gate.OPEN, before.update + 1)
    fleet.calm()
    assert fleet.status.policy.update == after.update


def test_asleep_releases_the_memory_of_all_servers_and_wakes_them_with_the_version_that_they_had() -> None:
    fleet = at_version(1)
    fleet.asleep = True
    fleet.settle()
    assert all(engine.asleep and engine.paused for engine in fleet.engines)
    assert (step_of(fleet), fleet.status.policy.gate, fleet.status.policy.current) == (PolicyStep.ASLEEP, Gate.SHUT, 1)
    fleet.kill_engine(0)
    fleet.settle()
    assert all(engine.asleep for engine in fleet.engines), "a server that starts meanwhile takes the trainer's memory"
    fleet.calm()
    assert fleet.is_at_rest()
    assert [(engine.asleep, engine.weights) for engine in fleet.engines] == [(False, 1)] * 3


def test_version_that_is_wanted_while_servers_sleep_is_loaded_when_they_wake_and_not_before() -> None:
    fleet = at_version(1)
    fleet.asleep = True
    fleet.settle()
    fleet.ask_for(2)
    for _ in range(20):
        fleet.round()
        while fleet.under_way:
            fleet.step(0)
        fleet.now += timedelta(seconds=1)
    assert (step_of(fleet), {engine.weights for engine in fleet.engines}) == (PolicyStep.ASLEEP, {1})
    fleet.calm()
    assert {engine.weights for engine in fleet.engines} == {2}
    assert [status.policy.step for status in fleet.history].count(PolicyStep.PAUSING) == 1, (
        "one pause for sleep and load"
    )


def test_version_that_cannot_be_fetched_when_servers_wake_is_fetched_again_with_the_gate_open() -> None:
    fleet = at_version(1)
    fleet.asleep = True
    fleet.settle()
    fleet.bad_versions.add(2)
    fleet.ask_for(2)
    fleet.calm(rounds=100)
    assert fleet.last is not None
    assert (fleet.last.reason, fleet.status.policy.gate) == ("FetchFailed", Gate.OPEN)
    assert {engine.weights for engine in fleet.engines} == {1}
    fleet.bad_versions.clear()
    fleet.calm()
    assert {engine.weights for engine in fleet.engines} == {2}


def test_a_server_that_cannot_release_its_memory_is_named_and_kept() -> None:
    fleet = at_version(1, runners=0)
    fleet.engines[0].failing.add("sleep")
    fleet.asleep = True
    until(fleet, PolicyStep.SLEEPING, rounds=200)
    for _ in range(5):
        fleet.round()
        while fleet.under_way:
            fleet.step(0)
    assert fleet.last is not None
    assert (fleet.last.reason, fleet.last.message) == (
        "Sleeping",
        "2 of 3 servers have released their memory; s-0: sleep; it is retried",
    )
    assert not any(entry.state is ServerState.EVICTED for entry in fleet.status.servers)


def test_server_that_does_not_wake_up_is_replaced_and_the_others_continue() -> None:
    fleet = at_version(1)
    fleet.asleep = True
    fleet.settle()
    fleet.engines[0].failing.add("wake")
    fleet.asleep = False
    until(fleet, PolicyStep.LOADING)
    assert [entry.state for entry in fleet.status.servers].count(ServerState.EVICTED) == 1
    fleet.calm()
    assert fleet.is_at_rest()


def test_server_that_failed_to_sleep_samples_no_token_between_waking_and_loading() -> None:
    fleet = at_version(1, runners=0)
    fleet.engines[0].failing.add("sleep")
    fleet.asleep = True
    until(fleet, PolicyStep.SLEEPING, rounds=200)
    fleet.round()
    while fleet.under_way:
        fleet.step(0)
    fleet.ask_for(2)
    fleet.asleep = False
    for _ in range(20):
        fleet.round()
        while fleet.under_way:
            fleet.step(0)
            fleet.check()
        fleet.now += timedelta(seconds=1)
    fleet.calm()
    assert fleet.is_at_rest()


def test_version_that_new_servers_cannot_fetch_when_they_wake_does_not_keep_the_gate_shut() -> None:
    fleet = at_version(1, servers=1)
    fleet.kill_engine(0)
    fleet.asleep = True
    for _ in range(3):
        fleet.round()
        fleet.now += timedelta(seconds=1)
    fleet.bad_versions.add(2)
    fleet.ask_for(2)
    fleet.calm(rounds=200)
    assert fleet.last is not None
    assert (fleet.last.reason, fleet.status.policy.gate) == ("FetchFailed", Gate.OPEN)
    assert {engine.weights for engine in fleet.engines} == {1}


def without_versions_to_fetch() -> Fleet:
    """Return a fleet that wakes without calls, for which neither the current version nor the wanted one can be fetched."""
    fleet = at_version(1, servers=1, runners=0)
    fleet.bad_versions = {2, 3}
    fleet.kill_engine(0)
    fleet.ask_for(2)
    fleet.round()
    fleet.start_engines()
    fleet.asleep = True
    fleet.round()
    fleet.asleep = False
    fleet.ask_for(3)
    return fleet


def test_two_versions_that_cannot_be_fetched_are_retried_in_turn_every_30_seconds() -> None:
    fleet = without_versions_to_fetch()
    messages: list[str] = []
    loads = 0
    for _ in range(100):
        decision = fleet.round()
        messages.append(decision.message)
        loads += sum(task.operation.call is Call.LOAD for task in decision.tasks)
        while fleet.under_way:
            fleet.step(0)
        fleet.now += timedelta(seconds=1)
    assert messages.count("version 2: 0 servers have it, 1 are needed; s-0: fetch") > 80
    assert 6 <= loads <= 8
    fleet.bad_versions.remove(3)
    fleet.calm()
    assert (fleet.is_at_rest(), fleet.status.policy.current) == (True, 3)


def test_newer_version_is_loaded_without_a_pause_after_a_failed_fetch() -> None:
    fleet = without_versions_to_fetch()
    fleet.settle(rounds=10)
    fleet.ask_for(4)
    fleet.calm(rounds=10)
    assert (fleet.is_at_rest(), fleet.status.policy.current) == (True, 4)


def test_servers_sleep_when_no_version_can_be_fetched() -> None:
    fleet = without_versions_to_fetch()
    fleet.settle(rounds=10)
    fleet.asleep = True
    fleet.settle(rounds=10)
    assert fleet.is_at_rest()


def test_servers_sleep_while_a_trainer_that_died_in_a_load_stays_away() -> None:
    fleet = half_pushed()
    fleet.trainer_away = True
    for asleep in (False, True):
        fleet.asleep = asleep
        for _ in range(10):
            fleet.round()
            while fleet.under_way:
                fleet.step(0)
            fleet.now += timedelta(seconds=1)
    assert fleet.is_at_rest()
    fleet.calm()
    assert fleet.is_at_rest()
    assert [engine.uid for engine in fleet.engines] == ["uid-0", "uid-1", "uid-2"]


def without_servers_in_resuming() -> Fleet:
    """Return a fleet whose last server ended before it resumed with version 2, whose files were deleted."""
    fleet = at_version(1, servers=1, runners=0)
    fleet.ask_for(2)
    until(fleet, PolicyStep.RESUMING)
    fleet.bad_versions = {2}
    fleet.kill_engine(0)
    fleet.settle(rounds=10)
    assert fleet.last is not None
    assert (fleet.last.reason, fleet.last.message) == (
        "NotEnoughServers",
        "version 2: 0 servers serve it, 1 are needed; s-0: fetch",
    )
    return fleet


def test_newer_version_is_loaded_when_no_server_is_left_to_resume() -> None:
    fleet = without_servers_in_resuming()
    fleet.ask_for(3)
    fleet.calm(rounds=20)
    assert (fleet.is_at_rest(), fleet.status.policy.current) == (True, 3)


def test_servers_sleep_when_no_server_is_left_to_resume() -> None:
    fleet = without_servers_in_resuming()
    fleet.asleep = True
    fleet.settle(rounds=20)
    assert fleet.is_at_rest()
