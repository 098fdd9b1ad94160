"""kodo's calls: limited in time, believed only with evidence, and made with its real signatures."""

import asyncio
import inspect
import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_runtime.integrations import kodo
from agent_runtime.integrations.kodo import ContainerNotFound, KodoContainers, KodoProvider, call, import_kodo
from agent_runtime.sandboxes.base import SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.container import executor
from agent_runtime.sandboxes.container.executor import ContainerExecutors
from rollout_api.sandbox import Kodo, Resources, SandboxTemplate
from tests.support import kodo_double

SPEC = WorkspaceSpec(
    group="g0", working_dir="/w", image="image:1", resources=Resources(cpu="500m", memory="1Gi"), start_seconds=7
)
# What is used of kodo, as its source has it; the file names the commit.
RECORDED = Path(kodo_double.__file__).with_name("kodo_signatures.json")
SIGNATURES: dict[str, str] = json.loads(RECORDED.read_text())["signatures"]
CONFIG = {"tokenSha256": "0" * 64, "mode": "Plain"}


def names(function: str) -> set[str]:
    """Return the names of a function's parameters."""
    return set(re.findall(r"\w+(?==|,|\))", SIGNATURES[function]))


class Pods:
    """A kodo runner of the backend `kubernetes` whose first copies never arrive."""

    def __init__(self, lost_copies: int = 0) -> None:
        self.lost, self.copies, self.started, self.deleted = lost_copies, list[set[str]](), list[Any](), list[str]()
        self.manager = SimpleNamespace(client=SimpleNamespace(read_namespaced_pod=self._read))

    def _read(self, *, name: str, namespace: str) -> Any:
        assert (name, namespace) == ("pod", "rl")
        return SimpleNamespace(status=SimpleNamespace(pod_ip="10.0.0.7"))

    def start_container(self, image: str, name: str | None = None, **kwargs: Any) -> Any:
        self.started.append((image, name, kwargs))

    def copy_to_container(self, container_ref: Any, src_path: str, dest_path: str) -> None:
        assert (container_ref, dest_path) == ("pod", "/tmp/.rollout")
        self.copies.append({path.name for path in Path(src_path).iterdir()})

    def execute_command(self, container_ref: Any, command: str, **kwargs: Any) -> tuple[str, str]:
        # What kodo answers to a failed command is text like any other.
        return ("arrived\n", "0") if len(self.copies) > self.lost else ("Exit code not found", "-1")

    def stop_container(self, container_ref: Any) -> None:
        self.deleted.append(container_ref)


def containers(runner: Any, tmp_path: Path) -> KodoContainers:
    bundle = tmp_path / "bundle"
    (bundle / "python").mkdir(parents=True, exist_ok=True)
    (bundle / "executor").touch()
    settings = Kodo.model_validate({"backend": "Kubernetes", "namespace": "rl", "nodeSelector": {"disk": "ssd"}})
    return KodoContainers(runner, settings, bundle)


async def test_pod_is_started_with_the_tasks_resources_and_reached_at_its_address(tmp_path: Path) -> None:
    pods = Pods()
    address = await containers(pods, tmp_path).start("pod", SPEC, CONFIG, tmp_path)
    ((image, name, options),) = pods.started
    assert (image, name, options["node_selector"], options["timeout"]) == ("image:1", "pod", {"disk": "ssd"}, 7)
    wanted = {"cpu": "500m", "memory": "1Gi"}
    assert options["resources"] == {"requests": wanted, "limits": wanted}
    assert set(options) <= names("KubernetesManager.start_pod")
    # kodo hands a pod's command to a shell.
    assert "exec /tmp/.rollout/executor" in options["command"]
    assert address.startswith("tcp:10.0.0.7:")
    assert pods.copies == [{"executor", "python", "config.json", "whole"}]
    # In a tar the mark comes last.
    assert sorted(pods.copies[0])[-1] == "whole"


async def test_a_copy_that_was_cut_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kodo, "ARRIVAL_SECONDS", 0.02)
    monkeypatch.setattr(kodo, "ARRIVAL_POLL_SECONDS", 0.01)
    pods = Pods(lost_copies=2)
    await containers(pods, tmp_path).start("pod", SPEC, CONFIG, tmp_path)
    assert len(pods.copies) == 3


async def test_container_that_ends_before_its_executor_answers_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(Exception):
        status = 404

    class EndingPods(Pods):
        def _read(self, *, name: str, namespace: str) -> Any:
            if self.copies:
                raise Missing("no such pod")
            return SimpleNamespace(status=SimpleNamespace(pod_ip="127.0.0.1"))

        def copy_to_container(self, container_ref: Any, src_path: str, dest_path: str) -> None:
            self.copies.append(set())

        def execute_command(self, container_ref: Any, command: str, **kwargs: Any) -> tuple[str, str]:
            raise Missing("no such pod")

    monkeypatch.setattr(executor, "ENDED_POLL_SECONDS", 0.0)
    pods = EndingPods()
    pods.manager.client.read_namespaced_pod_log = pods._read
    executors = ContainerExecutors(tmp_path, containers(pods, tmp_path), lambda spec: CONFIG)
    with pytest.raises(SandboxFailure, match="ended before its executor answered") as failure:
        await executors.start("agent", SPEC)
    assert failure.value.reason == "ExecutorFailed"
    assert executors.names() == []


async def test_deleted_pod_is_not_a_failure_and_a_remaining_one_is(tmp_path: Path) -> None:
    class Error(Exception):
        status = 404

    def refuse(container_ref: str) -> None:
        raise Error("no pod")

    pods = Pods()
    pods.stop_container = refuse  # type: ignore[method-assign]
    await containers(pods, tmp_path).remove("pod")
    Error.status = 403
    with pytest.raises(SandboxFailure, match="no pod"):
        await containers(pods, tmp_path).remove("pod")


async def test_hanging_call_delays_nothing_else() -> None:
    released = threading.Event()
    with pytest.raises(SandboxFailure, match=r"did not start in 0\.05 s"):
        await call("start", 0.05, released.wait, 600)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "kodo start")
    released.set()


async def test_call_that_ends_after_its_deadline_is_harmless() -> None:
    released = threading.Event()
    with pytest.raises(SandboxFailure):
        await call("start", 0.01, released.wait, 600)
    released.set()
    await asyncio.sleep(0.05)
    assert await call("start", 60, lambda: 7) == 7


async def test_error_of_kodo_is_named() -> None:
    def fail() -> None:
        raise ValueError("no such backend")

    with pytest.raises(SandboxFailure, match=r"could not start: ValueError: no such backend") as failure:
        await call("start", 60, fail)
    assert not isinstance(failure.value, ContainerNotFound)


def test_missing_package_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kodo", None)
    with pytest.raises(SandboxFailure, match=r"pip install.*agent-rollouts\[kodo\]"):
        import_kodo()


@pytest.mark.parametrize(("backend", "manager"), [("Docker", "DockerManager"), ("Kubernetes", "KubernetesManager")])
async def test_a_runner_is_made_with_options_that_the_real_package_knows(
    backend: str, manager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    package = SimpleNamespace(ContainerRunner=lambda **options: made.append(options))
    monkeypatch.setattr(kodo, "import_kodo", lambda: package)

    async def bundle(provider: KodoProvider) -> Path:
        return tmp_path

    monkeypatch.setattr(KodoProvider, "_find_bundle", bundle)
    template = SandboxTemplate.model_validate({"provider": "Kodo", "kodo": {"backend": backend}})
    provider = KodoProvider(tmp_path / "run", template, places=1)
    await provider.open()
    await provider.close()
    (options,) = made
    assert options.pop("backend") == backend.lower()
    assert set(options) <= names(f"{manager}.__init__")


def shape(function: Any) -> str:
    """Return a signature without types."""
    found = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_the_double_has_the_signatures_of_the_real_package() -> None:
    """The signatures were read from its source, because the package is on no index and rarely installed."""
    for double in (kodo_double.ContainerRunner, kodo_double.DockerManager):
        for name, function in inspect.getmembers(double, inspect.isfunction):
            assert shape(function) == SIGNATURES[f"{double.__name__}.{name}"], f"{double.__name__}.{name}"


def test_recorded_signatures_equal_the_real_package_when_installed() -> None:
    """`PYTHONPATH=its/source`; the test above holds without it."""
    core = pytest.importorskip("kodo.core", reason="kodo is on no package index; its recorded signatures were compared")
    for name, recorded in SIGNATURES.items():
        kind, _, method = name.partition(".")
        assert shape(getattr(getattr(core, kind), method)) == recorded, name
