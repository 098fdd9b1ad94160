"""The operator's part in tests without a cluster: each Sandbox gets a real executor, a process of this machine. A
loopback address stands for its pod's.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agent_runtime.sandboxes.cluster.sandbox_object import POD_IP
from rollout_api.cluster import EXECUTOR_PORT, executor_token, token_sha256
from rollout_api.conditions import Condition
from rollout_api.sandbox import SandboxPlaces, SandboxStatus, WorkspaceMode
from tests.integration.cluster_provider.stand_in_api import StandInApi

REPOSITORY = Path(__file__).parents[3]
KEY = "5e" * 32
EXCEEDED = 'pods "s" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'


def condition(kind: str, holds: bool, reason: str, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": "True" if holds else "False", "reason": reason, "message": message}


class StandInOperator:
    """Starts and ends executors with their Sandboxes. It does nothing while `hears` is False."""

    def __init__(self) -> None:
        self.api = StandInApi(self._changed)
        self.hears = True
        self.answers: list[dict[str, Any]] = []
        """Statuses that the next Sandboxes get instead of a pod."""
        self.modes: list[str] = []
        """Modes in which the next Sandboxes come up, whatever they asked for."""
        self.most_pods: int | None = None
        """Quota of pods. A Sandbox beyond it waits, and is finished after its startSeconds."""
        self.trial_fails = False
        """The next Sandbox's first pod runs, and ends before it listens; a Plain one takes its place."""
        self.executors: dict[str, subprocess.Popen[bytes]] = {}
        self._homes: dict[str, tempfile.TemporaryDirectory[str]] = {}
        self._starting: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End everything."""
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for name in list(self.executors):
            self.kill(name)
        await self.api.stop()

    def finish(self, name: str, reason: str, message: str = "", *, executor: signal.Signals | None = None) -> None:
        """Set the Sandbox to Finished. Its executor gets that signal; without one, it keeps the address of its pod."""
        if executor is not None:
            self.executors[name].send_signal(executor)
        status = {**self.api.sandboxes[name].get("status", {})}
        kept = [c for c in status.get("conditions", []) if c["type"] not in ("Ready", "Finished", "Reconciled")]
        status["conditions"] = [*kept, condition("Ready", False, reason), condition("Finished", True, reason, message)]
        self.api.set_status(name, status)

    def kill(self, name: str) -> None:
        """Remove the pod with everything in it."""
        process = self.executors.pop(name)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._homes.pop(name).cleanup()

    def hear(self) -> None:
        """Work again, and make up for what was missed."""
        self.hears = True
        for sandbox in self.api.sandboxes.values():
            if not sandbox.get("status"):
                self._changed("ADDED", sandbox)

    def _changed(self, kind: str, sandbox: dict[str, Any]) -> None:
        name = sandbox["metadata"]["name"]
        if kind == "DELETED" and name in self.executors:
            self.kill(name)
        elif kind == "ADDED" and self.hears:
            task = asyncio.create_task(self._start(name))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _fits_into_quota(self, name: str, start_seconds: float) -> bool:
        """Wait for room in the quota. Return whether there is some for the Sandbox, which may have ended."""
        deadline = asyncio.get_running_loop().time() + start_seconds
        while self.most_pods is not None and len(self.executors) >= self.most_pods and name in self.api.sandboxes:
            if asyncio.get_running_loop().time() >= deadline:
                self.finish(name, "StartDeadlineExceeded", f"its pod could not be created: {EXCEEDED}")
                return False
            if not self.api.sandboxes[name].get("status"):
                self.api.set_status(name, {"conditions": [condition("Reconciled", False, "Forbidden", EXCEEDED)]})
            await asyncio.sleep(0.05)
        return name in self.api.sandboxes

    async def _start(self, name: str) -> None:
        sandbox = self.api.sandboxes[name]
        if self.answers:
            self.api.set_status(name, self.answers.pop(0))
            return
        if self.trial_fails:
            self.trial_fails = False
            self.modes.insert(0, "Plain")
            ready = {"conditions": [condition("Ready", True, "Running")], POD_IP: "127.9.9.9", "mode": "Overlay"}
            self.api.set_status(name, ready)
            await asyncio.sleep(0.2)
            self.api.set_status(name, {"conditions": [condition("Ready", False, "TrialFailed")]})
        if not await self._fits_into_quota(name, sandbox["spec"]["startSeconds"]):
            return
        workspaces = sandbox["spec"]["workspaces"]
        asked = workspaces["mode"]
        mode = self.modes.pop(0) if self.modes else "Overlay" if asked == "Auto" else asked
        places = workspaces["perSandbox"] if mode == "Overlay" else 1
        address = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.{random.randint(1, 254)}"
        home = self._homes[name] = tempfile.TemporaryDirectory(prefix="rollout-stand-in-", ignore_cleanup_errors=True)
        folder = Path(home.name)
        folder.chmod(0o711)
        for part in ("state", "root"):
            (folder / part).mkdir()
        os.chown(folder / "root", 65534, 65534)
        configuration = {
            "listen": f"tcp:{address}:{EXECUTOR_PORT}",
            "tokenSha256": token_sha256(executor_token(KEY, name, sandbox["metadata"]["uid"])),
            "mode": mode,
            "places": places,
            "stateDir": str(folder / "state"),
            "idleSeconds": sandbox["spec"]["idleSeconds"],
            **({"root": str(folder / "root"), "user": "nobody"} if mode == "Plain" else {"masks": [str(folder)]}),
        }
        (folder / "config.json").write_text(json.dumps(configuration))
        self.executors[name] = subprocess.Popen(  # noqa: ASYNC220 (takes a millisecond, and must outlive the task)
            [sys.executable, "-P", "-m", "agent_runtime.executor", "--config", str(folder / "config.json")],
            env={"PATH": os.defpath, "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"},
            start_new_session=True,
            stderr=(folder / "log").open("wb"),
        )
        # Ready means that the container runs; the executor listens some moments later.
        await asyncio.sleep(0.05)
        overlay = ("Supported", "") if mode == "Overlay" else ("TrialFailed", "the kernel refused the mount")
        status = SandboxStatus(
            conditions=[
                Condition.model_validate(one)
                for one in (
                    condition("Scheduled", True, "Scheduled"),
                    condition("ImagePulled", True, "Pulled"),
                    condition("Overlay", mode == "Overlay", *overlay),
                    condition("Ready", True, "Running"),
                )
            ],
            pod_name=name,
            pod_ip=address,
            mode=WorkspaceMode(mode),
            places=SandboxPlaces(total=places),
        )
        with contextlib.suppress(KeyError):
            self.api.set_status(name, status.wire())
