"""A simulated fleet: servers with weights, runners with streams, and an operator that may be lost at any moment.

The real state of the servers is known here, so the operator's belief can be compared with it. An operation is done
request by request, so it can be cut off between two requests.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rollout_api.model_server import Gate, ModelServerStatus, PolicySource, PolicyStep, ServerState, TransferMode
from rollout_operator.model_server.policy import Decision, Task, decide
from rollout_operator.model_server.update_state import Runner, Seen
from rollout_operator.server_contact import Call, Failure, Server, ServerOperation, ServerReport

HALF = -1
"""Weights that were changed only in part."""
Key = tuple[str, int]


@dataclass
class Engine:
    """The real state of one server."""

    name: str
    uid: str
    restarts: int = 0
    up: bool = True
    paused: bool = False
    asleep: bool = False
    says_asleep: bool | None = False
    weights: int = 0
    named: str = "default"
    fetched: int | None = None
    leaving: bool = False
    had_traffic: bool = False
    traffic_start: int = 0
    """Return its number of restarts, as a runner that called it reads it."""
    failing: set[str] = field(default_factory=set)
    """Requests that fail: pause, sleep, wake, fetch, reload, half, resume, look."""
    lies: bool = False
    """Whether the engine reports a load that it has not done."""
    process: int = 0
    """The gateway's name for the engine's process."""
    opened: int | None = None
    """Version for which the gateway answers calls."""
    counted: bool = True
    """Whether the kubelet has counted its last restart."""

    @property
    def key(self) -> Key:
        return self.uid, self.restarts


@dataclass
class Process:
    """A runner's process."""

    key: str
    acknowledged: int | None = None
    hangs: bool = False


class Crash(Exception):
    """A request failed permanently."""


class Ended(Exception):
    """A request was meant for a process that has ended."""


class Fleet:
    """All servers and runners, and a small version of the operator's loop."""

    def __init__(self, servers: int, runners: int, mode: TransferMode = TransferMode.PULL, uri: bool = True) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.mode, self.has_uri, self.replicas = mode, uri, servers
        self.engines = [Engine(f"s-{index}", f"uid-{index}", process=index) for index in range(servers)]
        self.runners = [Process(f"job/{index}") for index in range(runners)]
        self.wanted = PolicySource(version=0)
        self.asleep = False
        self.status = ModelServerStatus()
        self.pods = self.processes = servers
        self.bad_versions: set[int] = set()
        self.trainer_away = False
        self.last: Decision | None = None
        self.history: list[ModelServerStatus] = []
        # What one operator process remembers.
        self.reports: dict[Key, ServerReport] = {}
        self.failures: dict[Key, dict[Call, Failure]] = {}
        self.silent: dict[Key, datetime] = {}
        self.busy: dict[Key, ServerOperation] = {}
        self.under_way: list[tuple[Task, Iterator[None]]] = []

    # The operator.

    def seen(self) -> Seen:
        return Seen(
            wanted=self.wanted,
            asleep=self.asleep,
            mode=self.mode,
            min_ready=(self.replicas + 1) // 2,
            load_limit=timedelta(seconds=1440),
            status=self.status,
            servers=[self._server(engine) for engine in self.engines],
            runners=[Runner(runner.key, runner.acknowledged) for runner in self.runners],
            now=self.now,
        )

    def _server(self, engine: Engine) -> Server:
        entry = next((entry for entry in self.status.servers if entry.name == engine.name), None)
        return Server(
            name=engine.name,
            uid=engine.uid,
            restarts=engine.restarts,
            url=f"http://{engine.name}",
            control_url=f"http://{engine.name}:1",
            up=engine.up,
            leaving=engine.leaving,
            loaded=entry is not None and entry.ready,
            report=self.reports.get(engine.key),
            busy=self.busy.get(engine.key),
            failures=dict(self.failures.get(engine.key, {})),
            silent_since=self.silent.get(engine.key),
        )

    def round(self, *, write_is_lost: bool = False) -> Decision:
        """Do one round like the loop: start tasks, then write the status."""
        for engine in self.engines:
            entry = next((entry for entry in self.status.servers if entry.uid == engine.uid), None)
            if entry is not None and entry.state is ServerState.EVICTED:
                engine.leaving = True
        decision = decide(self.seen())
        for task in decision.tasks:
            assert not any(server.key in self.busy for server in task.servers), "a busy server is asked"
            for server in task.servers:
                self.busy[server.key] = task.operation
            self.under_way.append((task, self._operation(task, dict(self.reports))))
        new = self.status.model_copy(update={"policy": decision.policy, "servers": list(decision.servers)})
        if decision.policy.model_copy(update={"needed": self.status.policy.needed}) != self.status.policy:
            assert all(task.operation.call is Call.LOOK for task in decision.tasks), "asked before it was written down"
        self._check_patience(decision)
        if new != self.status and not write_is_lost:
            self.status = new
            self.history.append(new)
            self._note_traffic()
        self.last = decision
        return decision

    def _check_patience(self, decision: Decision) -> None:
        """Check that each runner had ten seconds before it was given up."""
        old = self.status.policy
        if old.step is PolicyStep.ACKNOWLEDGING and decision.policy.mixed:
            assert old.since is not None
            assert self.now - datetime.fromisoformat(old.since) >= timedelta(seconds=10), decision.policy.mixed

    def crash(self) -> None:
        """Replace the operator by one that knows nothing. Requests in progress stay half done."""
        self.reports, self.failures, self.silent, self.busy, self.under_way = {}, {}, {}, {}, []

    def step(self, number: int) -> None:
        """Do one request of one operation."""
        if not self.under_way:
            return
        task, work = self.under_way[number % len(self.under_way)]
        try:
            next(work)
        except StopIteration:
            self.under_way.remove((task, work))
            for server in task.servers:
                self.busy.pop(server.key, None)

    def _operation(self, task: Task, reports: dict[Key, ServerReport]) -> Iterator[None]:
        failed: dict[Key, tuple[str, bool]] = {}
        ended: set[Key] = set()
        if task.operation.call is Call.LOAD and self.mode is TransferMode.PUSH and _source(task).version > 0:
            yield
            if self.trainer_away:
                failed = {server.key: ("the hook failed", True) for server in task.servers}
        for server in task.servers:
            if server.key not in failed:
                try:
                    process = int(reports[server.key].process) if server.key in reports else None
                    for _ in self._requests(task.operation, server.key, process):
                        yield
                except Crash as crash:
                    untouched = str(crash) == "fetch"
                    failed[server.key] = f"{server.name}: {crash}", untouched
                except Ended:
                    ended.add(server.key)
        for server in task.servers:
            yield
            self._look(task.operation, server.key, failed.get(server.key), ended=server.key in ended)

    def _requests(self, operation: ServerOperation, key: Key, process: int | None) -> Iterator[None]:
        engine = self._engine(key)
        match operation.call:
            case Call.PAUSE:
                yield
                engine = self._must(key, "pause", process)
                engine.paused, engine.opened = True, None
            case Call.SLEEP:
                yield
                engine = self._must(key, "pause", process)
                engine.paused, engine.opened, engine.says_asleep = True, None, None
                yield
                engine = self._must(key, "sleep", process)
                self.check_may_load(engine)
                engine.asleep = True
                yield
                self._must(key, "look", process).says_asleep = True
            case Call.WAKE:
                is_unsure = engine.says_asleep is None
                if is_unsure:
                    yield
                    self._must(key, "wake", process).had_traffic = False  # its calls are aborted
                yield
                engine = self._must(key, "wake", process)
                # vLLM continues all calls if its memory was not released (vllm/v1/engine/core.py, `wake_up`).
                engine.paused, engine.asleep = engine.asleep, False
                if is_unsure:
                    yield
                    self._must(key, "pause", process).paused = True
                yield
                self._must(key, "look", process).says_asleep = False
            case Call.RESUME:
                yield
                assert not self._must(key, "resume", process).asleep, f"{engine.name} is resumed in its sleep"
                engine.paused = False
                self.check_serving(engine)
                # A call may end before its runner reads that the server restarted.
                is_settled = self.status.policy.step is not PolicyStep.LOADING
                assert is_settled or not engine.had_traffic, f"{engine.name} resumes with a version that may be undone"
            case Call.CHECK:
                yield
                if self._must(key, "check", process).paused:
                    raise Crash("vLLM answers 409")
            case Call.OPEN:
                yield
                self._must(key, "open", process).opened = _version(operation)
            case Call.FETCH | Call.LOAD:
                version = _version(operation)
                yield
                if self.mode is TransferMode.PULL and version > 0:
                    self._must(key, "fetch")
                    if version in self.bad_versions:
                        raise Crash("fetch")
                    self._must(key, "fetch").fetched = version
                if operation.call is Call.FETCH:
                    return
                yield
                engine = self._must(key, "look", process)
                engine.named, engine.opened = f"loading-{version}", None
                yield
                assert not self._must(key, "reload", process).asleep, f"{engine.name} is loaded in its sleep"
                self.check_may_load(engine)
                if not engine.lies:
                    engine.weights = HALF
                self._must(key, "half", process)
                if not engine.lies:
                    engine.weights = version
                yield
                self._must(key, "look", process).named = str(version)

    def _look(self, operation: ServerOperation, key: Key, failed: tuple[str, bool] | None, *, ended: bool) -> None:
        failures = self.failures.setdefault(key, {})
        if not ended:
            failures.pop(operation.call, None)
        if failed is not None:
            failures[operation.call] = Failure(self.now, operation, *failed)
        old = self.reports.pop(key, None)
        try:
            engine = self._must(key, "look")
        except Crash:
            failures[Call.LOOK] = Failure(self.now, ServerOperation(Call.LOOK), "no answer")
            self.silent.setdefault(key, self.now)
            return
        self.silent.pop(key, None)
        failures.pop(Call.LOOK, None)
        named = engine.named
        version = 0 if named == "default" else None if named.startswith("loading") else int(named)
        report = ServerReport(
            self.now,
            engine.paused,
            version,
            fetched=engine.fetched if old or operation.call is Call.FETCH else None,
            process=str(engine.process),
            opened=engine.opened,
            calls=int(engine.had_traffic),
            asleep=engine.says_asleep,
        )
        same = old is not None and (old.process, old.version) == (report.process, version)
        if old is not None and same and operation.call not in (Call.LOAD, Call.WAKE):
            report = replace(report, checked=old.checked, digest=old.digest)
        if operation.call is Call.CHECK and failed is None and not ended and old is not None and same:
            report = replace(report, checked=True, digest=f"d{engine.weights}")
        self.reports[key] = report

    def _engine(self, key: Key) -> Engine:
        found = next((engine for engine in self.engines if engine.key == key), None)
        if found is None:
            raise Crash("gone")
        return found

    def _must(self, key: Key, request: str, process: int | None = None) -> Engine:
        engine = self._engine(key)
        if not engine.up or request in engine.failing:
            raise Crash(request)
        if process not in (None, engine.process):
            raise Ended
        return engine

    # The rest of the world.

    def ask_for(self, version: int) -> None:
        self.wanted = PolicySource(version=version, uri=f"s3://b/{version}" if self.has_uri else None)

    def acknowledge(self, number: int) -> None:
        policy = self.status.policy
        runner = self.runners[number % len(self.runners)]
        if policy.gate is Gate.SHUT and policy.paused and not runner.hangs:
            runner.acknowledged = policy.update

    def kill_engine(self, number: int) -> None:
        engine = self.engines[number % len(self.engines)]
        engine.up, engine.opened = False, None

    def restart_engine_uncounted(self, number: int) -> None:
        """Restart an engine before the kubelet has counted that, so that the status does not show it."""
        index = number % len(self.engines)
        old = self.engines[index]
        if old.up:
            kept: dict[str, Any] = {"fetched": old.fetched, "failing": old.failing, "leaving": old.leaving}
            self.engines[index] = Engine(
                old.name, old.uid, old.restarts, process=self._new_process(), counted=False, **kept
            )

    def restart_gateway(self, number: int) -> None:
        """Restart the gateway, which then knows nothing about its engine. All calls went through it."""
        engine = self.engines[number % len(self.engines)]
        engine.opened, engine.process, engine.had_traffic = None, self._new_process(), False

    def _new_process(self) -> int:
        self.processes += 1
        return self.processes

    def start_engines(self) -> None:
        """Restart ended engines with the model's own weights, and create deleted pods again."""
        for index, engine in enumerate(self.engines):
            if engine.leaving:
                self.pods += 1
                self.engines[index] = Engine(engine.name, f"uid-{self.pods}", process=self._new_process())
            elif not engine.up:
                self.engines[index] = Engine(
                    engine.name,
                    engine.uid,
                    engine.restarts + 1,
                    fetched=engine.fetched,
                    failing=engine.failing,
                    process=self._new_process(),
                )
            elif not engine.counted:
                engine.restarts, engine.counted = engine.restarts + 1, True

    def _note_traffic(self) -> None:
        if self.status.policy.gate is Gate.OPEN:
            for engine in self.engines:
                if self.is_open(engine) and engine.opened is not None:
                    engine.had_traffic, engine.traffic_start = True, engine.restarts

    def _is_left(self, engine: Engine) -> bool:
        """Whether runners have left it or are about to: it was evicted, or has another start. Further tokens do not
        count.
        """
        entry = next((entry for entry in self.status.servers if entry.uid == engine.uid), None)
        is_another = entry is not None and engine.had_traffic and entry.restarts != engine.traffic_start
        return is_another or (entry is not None and entry.state is ServerState.EVICTED)

    def is_open(self, engine: Engine) -> bool:
        """Whether runners call it by the status that they read."""
        return any(
            entry.ready and entry.uid == engine.uid and entry.restarts == engine.restarts
            for entry in self.status.servers
        )

    def calm(self, rounds: int = 400) -> None:
        """End all failures and the trainer's use of the memory, then do rounds until all is settled."""
        self.asleep = False
        self.settle(rounds)

    def settle(self, rounds: int = 400) -> None:
        """End all failures, then do rounds until all is settled."""
        for engine in self.engines:
            engine.failing.clear()
        for runner in self.runners:
            runner.hangs = False
        self.trainer_away = False
        for _ in range(rounds):
            self.round()
            self.start_engines()
            for number in range(len(self.runners)):
                self.acknowledge(number)
            while self.under_way:
                self.step(0)
            self.now += timedelta(seconds=1)
            if self.is_at_rest():
                return

    def is_at_rest(self) -> bool:
        policy = self.status.policy
        if self.asleep:
            return policy.step is PolicyStep.ASLEEP and all(engine.asleep for engine in self.engines)
        return (
            policy.step is None
            and self.wanted.version in (policy.current, policy.failed)
            and all(self.is_open(engine) and engine.opened == policy.current for engine in self.engines)
        )

    # What must hold at every moment.

    def check_may_load(self, engine: Engine) -> None:
        """Check that weights under a stream change or are released only when its runner has reported, or was named, at
        the version change of its tokens.
        """
        if not engine.had_traffic:
            return
        policy = self.status.policy
        assert policy.gate is Gate.SHUT, f"{engine.name} is loaded with the gate open"
        assert engine.paused, f"{engine.name} is loaded while it answers"
        for runner in self.runners:
            known = runner.acknowledged == policy.update or runner.key in policy.mixed
            assert known, f"{engine.name} is loaded, and {runner.key} has not acknowledged"

    def check_serving(self, engine: Engine) -> None:
        """Calls go on only with whole weights, of the version that the reopening will name."""
        # A wrong report cannot be detected before the engine runs; its tokens do not count until the gate opens.
        if engine.had_traffic and not engine.leaving and not engine.lies and not self._is_left(engine):
            policy = self.status.policy
            expected = policy.target if policy.step is PolicyStep.RESUMING else policy.current
            assert engine.weights == expected, f"{engine.name} resumes with {engine.weights}, not {expected}"

    def check(self) -> None:
        policy = self.status.policy
        for engine in self.engines:
            if engine.opened is not None and not engine.lies and not self._is_left(engine):
                assert engine.weights == engine.opened, f"{engine.name} answers as {engine.opened}: {engine.weights}"
            # The version of an engine without calls does not matter.
            if policy.gate is Gate.OPEN and self.is_open(engine) and engine.opened is not None:
                assert engine.weights == policy.current, f"{engine.name} is ready with {engine.weights}: {self.status}"
                assert not engine.paused, f"{engine.name} is paused, and the gate is open"
            if engine.had_traffic and not engine.paused and engine.up:
                self.check_serving(engine)
                held = policy.paused and policy.step is not PolicyStep.RESUMING
                assert not held or not self.is_open(engine), f"{engine.name} is said to be paused, and is not"
        for entry in self.status.servers:
            assert not entry.ready or entry.policy_version == policy.current, entry
        assert (policy.gate is Gate.OPEN) == (policy.step in (None, PolicyStep.FETCHING)), policy
        for before, after in itertools.pairwise(self.history):
            assert before.policy.update <= after.policy.update
            assert before.policy.current <= after.policy.current
        opened = [status.policy for status in self.history if status.policy.gate is Gate.OPEN]
        for old, new in itertools.pairwise(opened):
            assert old.current == new.current or old.update < new.update, "runners cannot tell that the version changed"


def _source(task: Task) -> PolicySource:
    assert task.operation.source is not None
    return task.operation.source


def _version(operation: ServerOperation) -> int:
    assert operation.source is not None
    return operation.source.version
