"""Runners as separate processes, with a stand-in for the two calls that they make to the API server."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_api.cluster import shard_name
from tests.support.ports import free_port

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]

SUPERVISOR = """
import sys
from agent_runtime.runner.supervisor import supervise
sys.exit(supervise([sys.executable, *sys.argv[1:]]))
"""


class ApiServer:
    """One RolloutJob with its RolloutShards, and a ModelServer where a test has one: `get`, a watch that ends at once, and
    server-side apply of a shard's status.
    """

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.job: dict[str, Any] | None = deepcopy(job)
        self._shards: dict[str, dict[str, Any]] = {}
        self.model_server: dict[str, Any] | None = None
        self.reports: list[dict[str, Any]] = []
        """Every report that was applied, in order."""
        self._lock = threading.Lock()
        self._port = 0
        self.start()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
                    "users": [{"name": "test", "user": {"token": "none"}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                }
            )
        )

    def start(self) -> None:
        """Answer, always on the same port."""
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "/modelservers?" in self.path:
                    self._answer(200, None)  # a watch that ends without an event
                elif "/modelservers/" in self.path:
                    self._answer(*api._get_model_server())
                elif "/rolloutshards/" in self.path:
                    self._answer(*api._get_shard(self.path.rsplit("/", 1)[-1]))
                else:
                    self._answer(*api._get())

            def do_PATCH(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                body = json.loads(data)
                assert self.headers["Content-Type"] == "application/apply-patch+yaml; charset=utf-8"
                assert "force=true" in self.path
                if re.search(rb"\\u[dD][89a-fA-F]", data):  # as Kubernetes' parser of YAML
                    self._answer(400, {"message": "error decoding YAML: found invalid Unicode character escape code"})
                    return
                self._answer(*api._apply(body))

            def _answer(self, status: int, value: Any) -> None:
                data = b"" if value is None else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,)).start()

    def stop(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def runners(self) -> dict[int, dict[str, Any]]:
        """Return the current reports by runner."""
        with self._lock:
            return {report["index"]: report for name, report in self._shards.items() if self._has_shard(name)}

    def set_report(self, report: dict[str, Any]) -> None:
        """Write the report of the runner before this one."""
        assert self.job is not None
        metadata = self.job["metadata"]
        self._shards[shard_name(metadata["name"], metadata["uid"], report["index"])] = report

    def _get(self) -> tuple[int, Any]:
        with self._lock:
            return (200, deepcopy(self.job)) if self.job is not None else self._absent()

    def _has_shard(self, name: str) -> bool:
        """Whether the shard exists. Shards are deleted with their job."""
        metadata = self.job["metadata"] if self.job is not None else {"name": "", "uid": ""}
        return name in (shard_name(metadata["name"], metadata["uid"], index) for index in range(256))

    def _get_shard(self, name: str) -> tuple[int, Any]:
        with self._lock:
            status = {"status": self._shards[name]} if name in self._shards else {}
            return (200, {"metadata": {"name": name}, **status}) if self._has_shard(name) else self._absent()

    def set_model_server(self, status: dict[str, Any]) -> None:
        """Write a status, as the operator does."""
        with self._lock:
            version = 1 if self.model_server is None else int(self.model_server["metadata"]["resourceVersion"]) + 1
            self.model_server = {
                "metadata": {"name": "policy", "uid": "policy", "resourceVersion": str(version)},
                "spec": {"model": {"name": "policy"}, "engine": {}},
                "status": deepcopy(status),
            }

    def _get_model_server(self) -> tuple[int, Any]:
        with self._lock:
            return (200, deepcopy(self.model_server)) if self.model_server is not None else self._absent()

    def _apply(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            if not self._has_shard(body["metadata"]["name"]):
                return self._absent()
            self.reports.append(body["status"])
            self._shards[body["metadata"]["name"]] = body["status"]
            return 200, body

    def _absent(self) -> tuple[int, Any]:
        return 404, {"kind": "Status", "reason": "NotFound", "message": "rolloutjobs.rollout.dev not found"}


class Runner:
    """A supervisor with its engine, as in a pod."""

    def __init__(self, folder: Path, index: int, kubeconfig: Path, temporary: str) -> None:
        self.metrics_port = free_port()
        self.log = folder / f"runner-{index}.log"
        environ = dict(
            os.environ,
            PYTHONPATH=str(REPOSITORY),
            KUBECONFIG=str(kubeconfig),
            JOB_COMPLETION_INDEX=str(index),
            TMPDIR=temporary,
        )
        engine = [str(HERE / "local_engine.py"), str(folder), str(self.metrics_port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, *engine], env=environ, stdout=log, stderr=log
            )

    @property
    def engine(self) -> int | None:
        """Return the engine's process id."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            pids = path.read_text().split()
        except OSError:
            return None
        return int(pids[0]) if pids else None

    def end(self, seconds: float = 240) -> int:
        """Return its exit code."""
        return self.process.wait(timeout=seconds)

    def starts(self) -> int:
        """Return how many engines have opened their shard."""
        return self.log.read_text().count(" its shard of ")

    def lines(self) -> list[dict[str, Any]]:
        """Return its log."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


class Pods:
    """A job's folder, its API server and its runners."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir()
        # Short: sockets are made in it, whose paths have at most 107 bytes.
        self._temporary = tempfile.TemporaryDirectory(prefix="r-")
        job = deepcopy(job)
        job["metadata"].update(namespace="team", uid="0e6a2a3c-71f3-4b5e-9d1c-7f54b9d6c001")
        job["spec"]["output"] = {"uri": str(folder / "out")}
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "key").write_text("ab" * 32)
        self.api = ApiServer(job, folder)
        self.runners: list[Runner] = []

    def start(self, index: int = 0) -> Runner:
        """Start a runner."""
        runner = Runner(self.folder, index, self.api.kubeconfig, self._temporary.name)
        self.runners.append(runner)
        return runner

    def close(self) -> None:
        """End everything that still runs."""
        for runner in self.runners:
            if runner.process.poll() is None:
                if (engine := runner.engine) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(engine, signal.SIGKILL)
                runner.process.kill()
                runner.process.wait()
        self.api.stop()
        # Sandboxes outlive their runner, to be found by the next one.
        for executor in self._executors():
            with contextlib.suppress(ProcessLookupError):  # It was about to end by itself.
                os.kill(executor, signal.SIGTERM)
        wait_for(lambda: not self._executors())
        self._temporary.cleanup()

    def _executors(self) -> list[int]:
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if f"{self._temporary.name}/" in _text(path)
        ]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


StartPods = Callable[[str, dict[str, Any]], Pods]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[StartPods]:
    made: list[Pods] = []

    def start(name: str, job: dict[str, Any]) -> Pods:
        made.append(Pods(tmp_path / name, job))
        return made[-1]

    yield start
    for one in made:
        one.close()


def wait_for(condition: Callable[..., Any], seconds: float = 60) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)
