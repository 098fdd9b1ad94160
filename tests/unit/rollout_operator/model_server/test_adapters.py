"""LoRA adapters of a fleet: calls get a version only where it is loaded, and one adapter never waits for another."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import hypothesis.strategies as st
from hypothesis import given, settings

from rollout_api.model_server import ModelServerStatus, PolicySource, ServerState, ServerStatus, TransferMode
from rollout_operator.model_server.policy import Decision, decide
from rollout_operator.model_server.update_state import AdapterWanted, Seen
from rollout_operator.server_contact import (
    AdapterFailure,
    Call,
    LoadedAdapter,
    Server,
    ServerOperation,
    ServerReport,
    WantedAdapter,
)
from tests.support.full import examples

NAMES = ("blue", "red")


@dataclass
class Gateway:
    """The real state of one server's gateway."""

    name: str
    restarts: int = 0
    wanted: dict[str, WantedAdapter] = field(default_factory=dict)
    loaded: set[tuple[str, int]] = field(default_factory=set)
    loading: set[tuple[str, int]] = field(default_factory=set)
    failed: dict[tuple[str, int], AdapterFailure] = field(default_factory=dict)

    def want(self, wanted: tuple[WantedAdapter, ...]) -> None:
        self.wanted, self.failed = {adapter.name: adapter for adapter in wanted}, {}
        keys = {(adapter.name, source.version) for adapter in wanted for source in adapter.sources}
        self.loading |= keys - self.loaded
        self.loaded &= keys

    def report(self) -> dict[str, LoadedAdapter]:
        def of(keys: object, name: str) -> tuple[int, ...]:
            return tuple(sorted(version for other, version in keys if other == name))  # type: ignore[attr-defined]

        return {
            name: LoadedAdapter(
                adapter.current,
                of(self.loaded, name),
                of(self.loading, name),
                {version: failure for (other, version), failure in self.failed.items() if other == name},
            )
            for name, adapter in self.wanted.items()
        }

    def load(self, now: datetime, *, bad: set[tuple[str, int]], unreachable: set[str]) -> None:
        for key in sorted(self.loading):
            if key in bad or key[0] in unreachable:
                self.failed[key] = AdapterFailure(now, "no", fetched=key in bad)
            else:
                self.loaded.add(key)
        self.loading.clear()


class Fleet:
    """Servers of the base model, and a small version of the operator's loop."""

    def __init__(self, servers: int) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.gateways = [Gateway(f"s-{index}") for index in range(servers)]
        self.wanted = {name: PolicySource(version=0) for name in NAMES}
        self.bad: set[tuple[str, int]] = set()
        self.unreachable: set[str] = set()
        self.status = ModelServerStatus()
        self.asked_again: dict[str, int] = dict.fromkeys((gateway.name for gateway in self.gateways), 0)

    def seen(self) -> Seen:
        return Seen(
            wanted=PolicySource(version=0),
            asleep=False,
            mode=TransferMode.PULL,
            min_ready=1,
            load_limit=timedelta(seconds=60),
            status=self.status,
            servers=[self._server(gateway) for gateway in self.gateways],
            runners=[],
            now=self.now,
            adapters={
                name: AdapterWanted(source, (len(self.gateways) + 1) // 2) for name, source in self.wanted.items()
            },
        )

    def _server(self, gateway: Gateway) -> Server:
        report = ServerReport(
            self.now, False, 0, checked=True, process=str(gateway.restarts), opened=0, adapters=gateway.report()
        )
        return Server(
            name=gateway.name,
            uid=gateway.name,
            restarts=gateway.restarts,
            url="http://s",
            control_url="http://s:1",
            up=True,
            leaving=False,
            loaded=True,
            report=report,
        )

    def round(self) -> Decision:
        decision = decide(self.seen())
        for task in decision.tasks:
            for server in task.servers:
                if task.operation.call is Call.ADAPT:
                    self.asked_again[server.name] += 1
                    next(one for one in self.gateways if one.name == server.name).want(task.operation.adapters)
        self.status = self.status.model_copy(
            update={"policy": decision.policy, "servers": list(decision.servers), "adapters": dict(decision.adapters)}
        )
        self.check()
        return decision

    def check(self) -> None:
        for name, status in self.status.adapters.items():
            here = [entry for entry in self.status.servers if entry.adapters.get(name) == status.current]
            for entry in here:
                gateway = next(one for one in self.gateways if one.name == entry.name)
                assert status.current == 0 or (name, status.current) in gateway.loaded, "a server has not what it says"
            assert status.source is None or status.source.version == status.current

    def load(self, *which: int) -> None:
        for index in which or range(len(self.gateways)):
            self.gateways[index].load(self.now, bad=self.bad, unreachable=self.unreachable)

    def settle(self) -> Decision:
        for _ in range(8):
            self.round()
            self.load()
            self.now += timedelta(seconds=31)
        return self.round()

    def ask_for(self, name: str, version: int) -> None:
        self.wanted[name] = PolicySource(version=version, uri=f"s3://b/{version}" if version else None)

    def current(self, name: str) -> int:
        return self.status.adapters[name].current


def test_version_is_served_when_enough_servers_have_it_and_only_there() -> None:
    fleet = Fleet(3)
    fleet.settle()
    fleet.ask_for("red", 1)
    fleet.round()
    fleet.load(0)
    fleet.round()
    assert fleet.current("red") == 0
    fleet.load(2)
    decision = fleet.round()
    assert fleet.current("red") == 1
    assert [entry.adapters for entry in decision.servers] == [{"blue": 0, "red": 1}, {"blue": 0}, {"blue": 0, "red": 1}]
    assert decision.settled
    fleet.settle()
    assert all(entry.adapters["red"] == 1 for entry in fleet.status.servers)
    # The gateways know which version a call without a version gets.
    assert [gateway.wanted["red"].current for gateway in fleet.gateways] == [1, 1, 1]


def test_adapter_that_no_server_can_load_is_given_up_and_the_other_one_goes_on() -> None:
    fleet = Fleet(2)
    fleet.settle()
    fleet.bad.add(("red", 1))
    fleet.ask_for("red", 1)
    fleet.ask_for("blue", 7)
    decision = fleet.settle()
    assert (fleet.current("red"), fleet.status.adapters["red"].failed, fleet.current("blue")) == (0, 1, 7)
    assert (decision.settled, decision.reason) == (False, "AdapterFailed")
    assert "give it a higher version" in decision.message
    asked = dict(fleet.asked_again)
    fleet.settle()
    assert fleet.asked_again == asked, "it was tried again"
    fleet.ask_for("red", 2)
    assert fleet.settle().settled
    assert fleet.current("red") == 2


def test_trainer_learns_that_the_first_version_of_a_new_adapter_is_refused() -> None:
    fleet = Fleet(2)
    fleet.bad.add(("red", 4))
    fleet.ask_for("red", 4)
    fleet.settle()
    assert (fleet.current("red"), fleet.status.adapters["red"].failed) == (4, 4)
    assert not any("red" in entry.adapters for entry in fleet.status.servers)
    fleet.bad.clear()
    fleet.settle()
    assert (fleet.current("red"), fleet.status.adapters["red"].failed) == (4, None)


def test_files_that_cannot_be_fetched_are_fetched_again() -> None:
    fleet = Fleet(2)
    fleet.settle()
    fleet.unreachable.add("red")
    fleet.ask_for("red", 1)
    decision = fleet.settle()
    assert (fleet.current("red"), fleet.status.adapters["red"].failed) == (0, None)
    assert (decision.settled, decision.reason) == (False, "LoadingAdapters")
    assert "it is retried" in decision.message
    fleet.unreachable.clear()
    assert fleet.settle().settled
    assert fleet.current("red") == 1


def test_server_that_has_restarted_gets_no_calls_to_an_adapter_until_it_has_it_again() -> None:
    fleet = Fleet(2)
    fleet.ask_for("red", 1)
    fleet.settle()
    fleet.gateways[0] = Gateway("s-0", restarts=1)
    fleet.round()
    assert [entry.adapters.get("red") for entry in fleet.status.servers] == [None, 1]
    fleet.settle()
    assert [entry.adapters.get("red") for entry in fleet.status.servers] == [1, 1]


def test_server_gets_calls_to_an_adapter_only_when_its_gateway_knows_the_name() -> None:
    """Otherwise its engine would answer 404, which ends a run."""
    fleet = Fleet(2)
    del fleet.wanted["blue"]
    fleet.settle()
    fleet.ask_for("blue", 0)
    fleet.round()
    assert [entry.adapters.get("blue") for entry in fleet.status.servers] == [None, None]
    fleet.round()
    assert [entry.adapters.get("blue") for entry in fleet.status.servers] == [0, 0]


def test_new_adapter_gets_no_calls_before_its_first_version_is_loaded() -> None:
    fleet = Fleet(1)
    fleet.ask_for("red", 4)
    fleet.round()
    fleet.round()
    assert (fleet.current("red"), fleet.status.servers[0].adapters) == (4, {"blue": 0})
    fleet.load()
    fleet.round()
    assert fleet.status.servers[0].adapters == {"blue": 0, "red": 4}


def test_first_report_after_a_restart_of_the_operator_decides_for_no_other_server() -> None:
    fleet = Fleet(4)
    fleet.settle()
    fleet.ask_for("red", 1)
    fleet.round()
    fleet.gateways[0].load(fleet.now, bad={("red", 1)}, unreachable=set())
    fleet.gateways[1].load(fleet.now, bad=set(), unreachable=set())
    seen = fleet.seen()
    for first in (0, 1):
        servers = [
            server if index == first else replace(server, report=None) for index, server in enumerate(seen.servers)
        ]
        status = decide(replace(seen, servers=servers)).adapters["red"]
        assert (status.current, status.failed) == (0, None)


def test_server_that_gets_no_calls_does_not_count_as_one_that_has_a_version() -> None:
    fleet = Fleet(2)
    fleet.settle()
    fleet.ask_for("red", 1)
    fleet.round()
    fleet.load(1)
    seen = fleet.seen()
    first, second = seen.servers
    assert second.report is not None
    paused = replace(second, report=replace(second.report, paused=True))
    assert decide(replace(seen, servers=[first, paused])).adapters["red"].current == 0
    assert decide(seen).adapters["red"].current == 1


def test_restarted_operator_keeps_the_written_status() -> None:
    fleet = Fleet(1)
    fleet.ask_for("red", 1)
    fleet.settle()
    seen = fleet.seen()
    unknown = replace(seen, servers=[replace(server, report=None) for server in seen.servers])
    decision = decide(unknown)
    assert [entry.adapters for entry in decision.servers] == [{"blue": 0, "red": 1}]
    assert {name: status.current for name, status in decision.adapters.items()} == {"blue": 0, "red": 1}


def test_gateway_is_opened_only_with_the_names_of_adapters() -> None:
    fleet = Fleet(1)
    fleet.ask_for("red", 1)
    fleet.settle()
    seen = fleet.seen()
    (server,) = seen.servers
    assert server.report is not None
    closed = replace(server, report=replace(server.report, opened=None, adapters={}))
    (task, *_) = decide(replace(seen, servers=[closed])).tasks
    assert task.operation == ServerOperation(
        Call.OPEN,
        PolicySource(version=0),
        (WantedAdapter("blue", 0, ()), WantedAdapter("red", 1, (PolicySource(version=1, uri="s3://b/1"),))),
    )


def test_adapter_that_is_removed_is_forgotten() -> None:
    fleet = Fleet(1)
    fleet.ask_for("red", 1)
    fleet.settle()
    del fleet.wanted["red"]
    fleet.settle()
    assert set(fleet.status.adapters) == set(fleet.gateways[0].wanted) == {"blue"}
    assert fleet.gateways[0].loaded == set()


ACTIONS = st.sampled_from(
    ["round", "load", "restart", "ask red", "ask blue", "bad red", "wait", "unreachable", "reach"]
)


@settings(max_examples=examples(300), deadline=None)
@given(servers=st.integers(1, 4), actions=st.lists(st.tuples(ACTIONS, st.integers(0, 3)), max_size=40))
def test_all_adapters_are_loaded_finally_after_any_events(servers: int, actions: list[tuple[str, int]]) -> None:
    fleet = Fleet(servers)
    fleet.settle()
    asked = 0
    for action, number in actions:
        index = number % servers
        match action.split():
            case ["round"]:
                fleet.round()
            case ["load"]:
                fleet.load(index)
            case ["restart"]:
                fleet.gateways[index] = Gateway(f"s-{index}", fleet.gateways[index].restarts + 1)
            case ["ask", name]:
                asked += 1
                fleet.ask_for(name, asked)
            case ["bad", name]:
                asked += 1
                fleet.bad.add((name, asked))
                fleet.ask_for(name, asked)
            case ["wait"]:
                fleet.now += timedelta(seconds=31)
            case ["unreachable"]:
                fleet.unreachable.add(NAMES[number % 2])
            case _:
                fleet.unreachable.clear()
    fleet.unreachable.clear()
    fleet.settle()
    for name, source in fleet.wanted.items():
        is_bad = (name, source.version) in fleet.bad
        status = fleet.status.adapters[name]
        assert (status.failed if is_bad else status.current) == source.version
        assert all(entry.adapters.get(name) == status.current for entry in fleet.status.servers)


def test_servers_in_the_status_list_their_adapters() -> None:
    entry = ServerStatus(name="s", url="http://s", ready=True, state=ServerState.READY, adapters={"red": 3})
    assert ServerStatus.model_validate(entry.wire()) == entry
