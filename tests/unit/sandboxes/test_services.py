"""The order in which services start, and the reasons when they do not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from agent_runtime.sandboxes import services as starting
from agent_runtime.sandboxes.base import CommandResult, Output, ProcessStatus, Service, StartState, WorkspaceSpec
from agent_runtime.sandboxes.services import ServiceFailed, ServiceWorkspace, hosts_file, start_services, without_proxy
from rollout_api.services import HealthCheck, ServiceState

pytestmark = pytest.mark.usefixtures("virtual_clock")

SPEC = WorkspaceSpec(group="g", working_dir="/")
HEALTH = HealthCheck(command="check", seconds=1)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(starting, "LONGEST_PAUSE_SECONDS", 0.01)


@dataclass
class Workspace:
    """A workspace whose program ends after some looks, and whose check fails some times."""

    name: str
    log: list[str]
    exit_code: int | None = None
    looks: int = 0
    unhealthy: int = 0
    keys: list[str] = field(default_factory=list)
    pace: float = 1.0
    """Seconds that its program works in one second; 0 while it is paused."""
    began: float = field(default_factory=lambda: time.monotonic())

    async def start_process(self, command: Any, *, key: str) -> str:
        self.log.append(f"start {self.name}")
        self.keys.append(key)
        return "p"

    async def process(self, process: str, *, key: str | None = None) -> ProcessStatus:
        self.looks -= 1
        ended = self.exit_code is not None and self.looks < 0
        seconds = (time.monotonic() - self.began) * self.pace
        return ProcessStatus("p", not ended, self.exit_code if ended else None, 0, 6, b"", seconds)

    async def read_output(self, process: str, cursor: int, *, wait_seconds: float) -> Output:
        return Output(b"broken", 6, True, 0)

    async def run(self, command: str, *, key: str, deadline_seconds: float) -> CommandResult:
        self.keys.append(key)
        self.unhealthy -= 1
        code = 0 if self.unhealthy < 0 else 1
        if code == 0:
            self.log.append(f"healthy {self.name}")
        return CommandResult(code, None, None, 0.0, b"no answer", b"", 9, 0)


async def start(*given: tuple[Service, Workspace]) -> None:
    started = [(service, cast(ServiceWorkspace, workspace)) for service, workspace in given]
    await start_services(started, completion_seconds=1)


def service(name: str, health: HealthCheck | None = None, **needs: ServiceState) -> Service:
    return Service(name, SPEC, ["run"], depends_on=needs, health=health)


async def test_services_start_in_the_order_of_their_dependencies() -> None:
    log: list[str] = []
    web = service("web", db=ServiceState.HEALTHY, migrate=ServiceState.COMPLETED)
    migrate = service("migrate", db=ServiceState.HEALTHY)
    await start(
        (web, Workspace("web", log)),
        (migrate, Workspace("migrate", log, exit_code=0, looks=3)),
        (service("db", HEALTH), Workspace("db", log, unhealthy=3)),
    )
    assert log == ["start db", "healthy db", "start migrate", "start web"]


async def test_restored_service_that_had_completed_does_not_run_again() -> None:
    log: list[str] = []
    restored = replace(SPEC, start=cast(StartState, object()))
    await start(
        (Service("web", restored, ["run"], depends_on={"seed": ServiceState.COMPLETED}), Workspace("web", log)),
        (Service("seed", restored, ["run"]), Workspace("seed", log, exit_code=1)),
        (Service("job", restored, ["run"], completes=True), Workspace("job", log, exit_code=1)),
    )
    assert log == ["start web"]


async def test_all_services_with_a_check_are_healthy_before_the_agent_starts() -> None:
    log: list[str] = []
    db, cache = Workspace("db", log, unhealthy=2), Workspace("cache", log, unhealthy=4)
    await start((service("db", HEALTH), db), (service("cache", HEALTH), cache))
    assert sorted(log) == ["healthy cache", "healthy db", "start cache", "start db"]
    assert len(set(db.keys)) == len(db.keys) == 4, "each try has its own key, so that a restarted runner repeats them"


async def test_service_that_ends_or_never_gets_healthy_fails_the_start_with_its_output() -> None:
    log: list[str] = []
    with pytest.raises(ServiceFailed, match=r"service 'db' ended with exit code 3 before it was ready\nbroken"):
        await start((service("db", HEALTH), Workspace("db", log, exit_code=3, unhealthy=99)))
    with pytest.raises(
        ServiceFailed, match=r"service 'db' was not ready after 1 s; its health check ends with exit code 1"
    ):
        await start((service("db", HEALTH), Workspace("db", log, unhealthy=10**6)))
    needy = service("web", job=ServiceState.COMPLETED)
    with pytest.raises(ServiceFailed, match="service 'job' ended with exit code 2"):
        await start((needy, Workspace("web", log)), (service("job"), Workspace("job", log, exit_code=2)))
    with pytest.raises(ServiceFailed, match="service 'web' ended with exit code 1"):
        await start((service("web"), Workspace("web", log, exit_code=1)))
    needy = service("web", db=ServiceState.HEALTHY)
    with pytest.raises(ServiceFailed, match="has no health check"):
        await start((needy, Workspace("web", log)), (service("db"), Workspace("db", log)))
    with pytest.raises(ServiceFailed, match="has no command"):
        await start((Service("db", SPEC), Workspace("db", log)))


async def test_service_that_must_complete_ends_before_the_agent_starts() -> None:
    seed = Service("seed", SPEC, ["run"], completes=True)
    workspace = Workspace("seed", [], exit_code=0, looks=5)
    await start((seed, workspace))
    assert workspace.looks < 0
    with pytest.raises(ServiceFailed, match="service 'seed' ended with exit code 5"):
        await start((seed, Workspace("seed", [], exit_code=5, looks=5)))


async def test_service_that_should_complete_and_does_not_fails_the_start() -> None:
    with pytest.raises(ServiceFailed, match=r"service 'seed' did not end within 1 s \(timeouts.setupSeconds\)"):
        await start((Service("seed", SPEC, ["run"], completes=True), Workspace("seed", [])))
    needy = service("web", seed=ServiceState.COMPLETED)
    with pytest.raises(ServiceFailed, match="service 'seed' did not end within 1 s"):
        await start((needy, Workspace("web", [])), (service("seed"), Workspace("seed", [])))


async def test_time_of_a_pause_does_not_count_for_services() -> None:
    """Other rollouts may use the sandbox's memory for longer than a service has time to start."""
    checked, seed = Workspace("db", [], unhealthy=120, pace=0), Workspace("seed", [], exit_code=0, looks=120, pace=0)
    await start((service("db", HEALTH), checked), (Service("seed", SPEC, ["run"], completes=True), seed))
    assert checked.unhealthy < 0
    assert seed.looks < 0
    assert time.monotonic() - checked.began > HEALTH.seconds


async def test_cancelled_start_leaves_nothing_running() -> None:
    before = asyncio.all_tasks()
    task = asyncio.create_task(start((service("db", HEALTH), Workspace("db", [], unhealthy=10**6))))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before


def test_command_of_a_service_replaces_those_of_its_dockerfile() -> None:
    built = WorkspaceSpec(group="g", working_dir="/", entrypoint=["tini", "--"], command=["serve"])
    assert Service("s", built).argv == ["tini", "--", "serve"]
    assert Service("s", built, args=["other"]).argv == ["tini", "--", "other"]
    assert Service("s", built, ["sh"]).argv == ["sh"]


def test_every_name_leads_to_the_tasks_own_network_without_a_proxy() -> None:
    found = [Service("db", SPEC, aliases=["postgres"])]
    assert hosts_file(found) == b"127.0.0.1 localhost workspace client main db postgres\n::1 localhost\n"
    assert without_proxy(found)["NO_PROXY"] == "localhost,127.0.0.1,::1,client,main,db,postgres"
    assert without_proxy([]) == {}
