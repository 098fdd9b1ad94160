"""Runs in a runner's pod: measures the runner's cluster provider, and for comparison `pods/exec` and bare pods."""

import asyncio
import itertools
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from kubernetes import client, config, watch
from kubernetes.stream import stream

from agent_runtime.kube.api import KubeApi
from agent_runtime.runner.start import Start, read_start
from agent_runtime.sandboxes.base import Fence, Workspace, WorkspaceSpec
from agent_runtime.sandboxes.cluster.provider import ClusterProvider
from benchmarks.conversation import answer_questions
from rollout_api.cluster import RUNNER_FOLDER

# Runner indexes: the runner itself is 0 and has no sandboxes. One index for the permanent sandbox, one for those that are
# created to be timed.
WARM, COLD = 1, 2
FENCE = Fence(1, "benchmark")
DEADLINE_SECONDS = 60.0
START_SECONDS = 180
GONE_POLL_SECONDS = 0.2


class RunnerPod:
    """Answers a question {call, ...} with {seconds: [one value for each call]}."""

    def __init__(self, start: Start, api: KubeApi) -> None:
        self._start, self._api = start, api
        self._numbers = itertools.count()
        self._core: Any = client.CoreV1Api()
        self._warm = self._provider(WARM)
        self._staying: list[Workspace] = []
        self._turns = itertools.count()

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        ask: dict[str, Callable[..., Awaitable[list[float]]]] = {
            "tool": self._time_tool_calls,
            "exec": self._time_execs,
            "workspaces": self._time_workspaces,
            "cold": self._time_sandbox_starts,
            "pod": self._time_pod_starts,
        }
        call = question.pop("call")
        return {"seconds": await ask[call](**question)}

    async def close(self) -> None:
        await self._warm.close()
        await self._api.close()

    async def _time_tool_calls(self, times: int, at_once: int) -> list[float]:
        """Time `true` through the executor; concurrent calls use separate workspaces, as rollouts do."""
        free = list(await self._permanent_workspaces(at_once))

        async def call() -> None:
            workspace, turn = free.pop(), next(self._turns)
            result = await workspace.run(["true"], key=f"{turn}:true", deadline_seconds=DEADLINE_SECONDS)
            if not result.ok:
                raise RuntimeError(f"true did not succeed in the workspace: {result}")
            free.append(workspace)

        seconds = await _timed(times, at_once, call)
        # The executor remembers the calls of an attempt until it is told to forget them, at most 4,096.
        await asyncio.gather(*(workspace.acknowledge(next(self._turns)) for workspace in free))
        return seconds

    async def _time_execs(self, times: int, at_once: int) -> list[float]:
        """Time `true` through `pods/exec` with Kubernetes' own client, in the same pod; each thread has its own client."""
        pod = (await self._permanent_workspaces(1))[0].handle["sandbox"]
        namespace = self._start.job.metadata.namespace
        # `stream` replaces its client's request method, so a shared client would send other calls to the web socket.
        free = [client.CoreV1Api(client.ApiClient()) for _ in range(at_once)]

        def run(core: client.CoreV1Api) -> None:
            answer = stream(
                core.connect_get_namespaced_pod_exec, pod, namespace, container="sandbox", command=["true"],
                stdout=True, stderr=True, _preload_content=False,
            )  # fmt: skip
            answer.run_forever(timeout=DEADLINE_SECONDS)
            if answer.returncode != 0:
                raise RuntimeError(f"true ended with code {answer.returncode} through pods/exec")

        async def call() -> None:
            core = free.pop()
            await asyncio.to_thread(run, core)
            free.append(core)

        return await _timed(times, at_once, call)

    async def _time_workspaces(self, times: int, at_once: int, new_group: bool) -> list[float]:
        """Time from the request for a workspace to its first tool result, on a running sandbox."""
        await self._permanent_workspaces(1)

        async def call() -> None:
            number = next(self._numbers)
            group = f"group-{number}" if new_group else "group"
            made.append(await self._first_result(self._warm, group, f"warm-{number}"))

        seconds = []
        for _ in range(times // at_once):
            made: list[Workspace] = []
            seconds += await _timed(at_once, at_once, call)
            await asyncio.gather(*(workspace.release() for workspace in made))
        return seconds

    async def _time_sandbox_starts(self) -> list[float]:
        """Time from the request for a new sandbox to its first tool result."""
        provider = self._provider(COLD)
        await provider.open()
        await asyncio.sleep(_random_wait())
        try:
            return await _timed(1, 1, lambda: self._first_result(provider, "cold", f"cold-{next(self._numbers)}"))
        finally:
            await provider.close()

    async def _time_pod_starts(self, image: str) -> list[float]:
        """Time from the creation of a bare pod, like that of `kubectl run`, until it is Ready."""
        namespace = str(self._start.job.metadata.namespace)
        name = f"bare-{secrets.token_hex(4)}"
        pod = {
            "metadata": {"name": name},
            "spec": {
                "containers": [{"name": "bare", "image": image, "command": ["sleep", "600"]}],
                "terminationGracePeriodSeconds": 0,
            },
        }
        await asyncio.sleep(_random_wait())
        started = time.perf_counter()
        await asyncio.to_thread(self._make_ready, namespace, pod)
        seconds = time.perf_counter() - started
        await asyncio.to_thread(self._delete, namespace, name)
        return [seconds]

    def _make_ready(self, namespace: str, pod: dict[str, Any]) -> None:
        made = self._core.create_namespaced_pod(namespace, pod).metadata
        events = watch.Watch().stream(
            self._core.list_namespaced_pod, namespace, field_selector=f"metadata.name={made.name}",
            resource_version=made.resource_version, timeout_seconds=START_SECONDS,
        )  # fmt: skip
        if not any(_is_ready(event["object"]) for event in events):
            raise RuntimeError(f"pod {made.name} is not Ready after {START_SECONDS} s")

    def _delete(self, namespace: str, pod: str) -> None:
        self._core.delete_namespaced_pod(pod, namespace)
        while self._core.list_namespaced_pod(namespace, field_selector=f"metadata.name={pod}").items:
            time.sleep(GONE_POLL_SECONDS)

    async def _permanent_workspaces(self, count: int) -> Sequence[Workspace]:
        """Yield this many workspaces of a prepared group, which keep their sandbox alive."""
        if not self._staying:
            await self._warm.open()
        while len(self._staying) < count:
            self._staying.append(await self._first_result(self._warm, "group", f"stays-{len(self._staying)}"))
        return self._staying[:count]

    async def _first_result(self, provider: ClusterProvider, group: str, attempt: str) -> Workspace:
        spec = WorkspaceSpec(
            group=group, working_dir="/workspace", image=self._start.job.spec.sandbox.image, start_seconds=START_SECONDS
        )
        workspace = await provider.acquire(spec, attempt=attempt, fence=FENCE, name="agent")
        result = await workspace.run(["true"], key="0:true", deadline_seconds=DEADLINE_SECONDS)
        if not result.ok:
            raise RuntimeError(f"true did not succeed in a new workspace: {result}")
        return workspace

    def _provider(self, index: int) -> ClusterProvider:
        return ClusterProvider(self._start.job, index, self._start.key, self._api)


async def _timed(times: int, at_once: int, call: Callable[[], Awaitable[object]]) -> list[float]:
    """Return the seconds of each of `times` calls, with `at_once` of them running concurrently."""
    seconds: list[float] = []

    async def work(count: int) -> None:
        for _ in range(count):
            started = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - started)

    await asyncio.gather(*(work(times // at_once) for _ in range(at_once)))
    return seconds


def _random_wait() -> float:
    """Wait for a random time. The kubelet checks its pods once a second, and a start immediately after another one would
    always be at the same time in that interval.
    """
    return random.random()


def _is_ready(pod: Any) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())


async def main() -> None:
    config.load_incluster_config()
    start = read_start(Path(RUNNER_FOLDER), os.environ)
    runner = RunnerPod(start, await KubeApi.connect(str(start.job.metadata.namespace)))
    try:
        await answer_questions(runner.answer)
    finally:
        await runner.close()


if __name__ == "__main__":
    asyncio.run(main())
