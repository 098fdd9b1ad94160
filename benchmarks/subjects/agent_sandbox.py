"""Rollouts that do nothing in agent-sandbox's warm pools: claim a sandbox, and delete the claim when it is ready.

The same as in agent-sandbox's own load test for reinforcement learning (`examples/agent-sandbox-rl/tests/loadtest.py`): a
template and a pool for each environment, which are as large as its share of the concurrent rollouts, and rollouts that run
no command. Recycled, a claim serves several rollouts of its environment, and a script in the sandbox restores its files
between them, which the load test calls `reuse`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from benchmarks.conversation import answer_questions

GROUP = "extensions.agents.x-k8s.io"
VERSION = f"{GROUP}/v1beta1"
FILL_SECONDS, CLAIM_SECONDS, RESET_SECONDS = 900.0, 300.0, 60.0
POLL_SECONDS = 0.5
NOT_ACCEPTED, RETRY_SECONDS = (429, 503), 1.0  # an API server with too many requests
REUSES = 32  # rollouts of a recycled sandbox, its load test's default
STDIN, STDOUT = 0, 1  # channels of pods/exec
# Ends at once on SIGTERM, unlike the `sleep infinity` of its load test, so that the place of a pod is soon free.
COMMAND = """mkdir -p /environment && echo "$ENVIRONMENT" >/environment/name && cp -a /environment /pristine
trap 'exit 0' TERM; while true; do sleep 3600 & wait $!; done"""
# Like the load test's reset, with a copy in place of `git reset` and `git clean`, which take longer: ends processes,
# restores the environment, removes temporary files, and prints whether the environment is as it was.
RESET = """for p in /proc/[0-9]*; do p=${p#/proc/}; case $p in 1|$$|$PPID) ;; *) kill -9 $p 2>/dev/null ;; esac; done
rm -rf /environment /tmp/* /var/tmp/* && cp -a /pristine /environment
diff -r /pristine /environment >/dev/null && echo clean || echo dirty
"""


def template(name: str, image: str) -> dict[str, Any]:
    """Return the SandboxTemplate of an environment. What it leaves out makes its pods start sooner: requests of resources,
    a token, variables of Services, a NetworkPolicy.
    """
    container = {
        "name": "agent-runtime",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", COMMAND],
        "env": [{"name": "ENVIRONMENT", "value": name}],
        "securityContext": {"runAsUser": 0},
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
    }
    return {"spec": {"podTemplate": {"spec": pod}, "networkPolicyManagement": "Unmanaged"}}


def pool_size(members: int, environments: int, at_once: int) -> int:
    """Return how many sandboxes of each environment wait: its share of the concurrent rollouts, as in its `sizing.py`."""
    return min(max(1, round(at_once / environments)), members)


class Failed(Exception):
    """A rollout failed; the message says why."""


@dataclass
class Found:
    """What the rollouts of one measurement took."""

    claims: list[float] = field(default_factory=list)
    cold: int = 0
    """Claims whose pool was empty, so that a pod was made for each."""
    failed: int = 0
    why: str = ""
    """Why the first one failed."""

    @contextlib.contextmanager
    def failures(self, rollouts: int) -> Iterator[None]:
        """Count this many failed rollouts when the context ends by an error, and go on."""
        try:
            yield
        except (Failed, aiohttp.ClientError, TimeoutError) as error:
            self.failed += rollouts
            self.why = self.why or f"{type(error).__name__}: {error}"


class WarmPools:
    """Answers {call: fill, ...} with {seconds}, and {call: claims | recycled, ...} with {seconds, claims, cold, failed}."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._numbers = itertools.count()

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        ask: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "fill": self.fill,
            "claims": self.claims,
            "recycled": self.recycled,
        }
        return await ask[question.pop("call")](**question)

    async def fill(self, namespace: str, environments: int, size: int, image: str) -> dict[str, Any]:
        """Create the pools and wait until all of their sandboxes are ready."""
        started = time.perf_counter()
        for number in range(environments):
            name = _environment(number)
            await self._create(namespace, "SandboxTemplate", name, template(name, image))
            pool = {"spec": {"replicas": size, "sandboxTemplateRef": {"name": name}}}
            await self._create(namespace, "SandboxWarmPool", name, pool)
        await self._wait_filled(namespace, size, started)
        return {"seconds": time.perf_counter() - started}

    async def claims(self, namespace: str, environments: int, members: int, at_once: int) -> dict[str, Any]:
        """Run each rollout with a claim of its own. Environments alternate, so that all pools are used all the time."""
        waiting = [_environment(number) for _ in range(members) for number in range(environments)]
        found = Found()

        async def work() -> None:
            while waiting:
                with found.failures(1):
                    claim, _ = await self._claim(namespace, waiting.pop(), found)
                    await self._delete(namespace, claim)

        return await self._measure(namespace, found, [work() for _ in range(at_once)])

    async def recycled(self, namespace: str, environments: int, members: int, at_once: int) -> dict[str, Any]:
        """Run the rollouts of an environment one after the other in as many sandboxes as its pool has. A pool shrinks with
        each claim, so that no pods are made that no rollout uses.
        """
        shards = pool_size(members, environments, at_once)
        held: Counter[str] = Counter()
        places = asyncio.Semaphore(at_once)
        found = Found()

        async def work(environment: str, rollouts: int) -> None:
            while rollouts > 0:
                served = min(rollouts, REUSES)
                async with places:
                    with found.failures(served):
                        claim, pod = await self._claim(namespace, environment, found)
                        held[environment] += 1
                        await self._shrink(namespace, environment, max(0, shards - held[environment]))
                        await self._reset(namespace, pod, served - 1)
                        await self._delete(namespace, claim)
                rollouts -= served

        shares = [len(range(shard, members, shards)) for shard in range(shards)]
        jobs = [work(_environment(number), share) for number in range(environments) for share in shares]
        return await self._measure(namespace, found, jobs)

    async def _reset(self, namespace: str, pod: str, times: int) -> None:
        """Restore the files of a sandbox so many times, over one connection."""
        query = [("container", "agent-runtime"), ("command", "/bin/sh"), ("stdin", "1"), ("stdout", "1")]
        path = f"{self._url}/api/v1/namespaces/{namespace}/pods/{pod}/exec"
        async with (
            asyncio.timeout(RESET_SECONDS * (times + 1)),
            self._session.ws_connect(path, params=query, protocols=("v4.channel.k8s.io",)) as shell,
        ):
            for _ in range(times):
                await shell.send_bytes(bytes([STDIN]) + RESET.encode())
                if (answer := await _line(shell)) != "clean":
                    raise Failed(f"the files of {pod} could not be restored: {answer}")

    async def _claim(self, namespace: str, environment: str, found: Found) -> tuple[str, str]:
        """Return a claim's name and its ready sandbox's, which is also its pod's."""
        name = f"claim-{next(self._numbers)}"
        ready = self._waiting[name] = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        try:
            await self._create(namespace, "SandboxClaim", name, {"spec": {"warmPoolRef": {"name": environment}}})
            async with asyncio.timeout(CLAIM_SECONDS):
                sandbox = await ready
        except TimeoutError as error:
            raise Failed(f"{name} of pool {environment} is not ready after {CLAIM_SECONDS} s") from error
        finally:
            del self._waiting[name]
        found.claims.append(time.perf_counter() - started)
        # A sandbox that was made for the claim, because the pool had none, has the claim's name.
        found.cold += sandbox == name
        return name, sandbox

    async def _measure(self, namespace: str, found: Found, jobs: Sequence[Coroutine[Any, Any, None]]) -> dict[str, Any]:
        """Run these jobs while one watch of all claims tells when each is ready."""
        watch: asyncio.Future[Any] = asyncio.create_task(self._watch(namespace))
        started = time.perf_counter()
        work: asyncio.Future[Any] = asyncio.gather(*jobs)
        try:
            await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
            await (watch if watch.done() else work)
        finally:
            watch.cancel()
        return {"seconds": time.perf_counter() - started, **vars(found)}

    async def _watch(self, namespace: str) -> None:
        while True:
            # Each watch begins with the claims that exist, so none is missed between two of them.
            path = self._path(namespace, "SandboxClaim")
            async with self._session.get(path, params={"watch": "1"}) as events:
                async for line in events.content:
                    event = json.loads(line)
                    if event.get("type") in ("ADDED", "MODIFIED"):
                        self._note(event["object"])
            await asyncio.sleep(RETRY_SECONDS)

    def _note(self, claim: Mapping[str, Any]) -> None:
        ready = self._waiting.get(claim["metadata"]["name"])
        status = claim.get("status", {})
        conditions = {found["type"]: found["status"] for found in status.get("conditions", [])}
        sandbox = status.get("sandbox", {}).get("name")
        if ready is not None and not ready.done() and conditions.get("Ready") == "True" and sandbox:
            ready.set_result(sandbox)

    async def _wait_filled(self, namespace: str, size: int, started: float) -> None:
        while True:
            pools = (await self._call("GET", self._path(namespace, "SandboxWarmPool")))["items"]
            ready = [pool.get("status", {}).get("readyReplicas", 0) for pool in pools]
            if min(ready) >= size:
                return
            if time.perf_counter() - started > FILL_SECONDS:
                raise RuntimeError(f"pools of {size} sandboxes have after {FILL_SECONDS} s: {ready}")
            await asyncio.sleep(POLL_SECONDS)

    async def _create(self, namespace: str, kind: str, name: str, body: Mapping[str, Any]) -> None:
        whole = {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name}, **body}
        await self._call("POST", self._path(namespace, kind), whole)

    async def _delete(self, namespace: str, claim: str) -> None:
        await self._call("DELETE", f"{self._path(namespace, 'SandboxClaim')}/{claim}")

    async def _shrink(self, namespace: str, pool: str, replicas: int) -> None:
        path = f"{self._path(namespace, 'SandboxWarmPool')}/{pool}"
        headers = {"Content-Type": "application/merge-patch+json"}
        await self._call("PATCH", path, {"spec": {"replicas": replicas}}, headers)

    def _path(self, namespace: str, kind: str) -> str:
        return f"{self._url}/apis/{VERSION}/namespaces/{namespace}/{kind.lower()}s"

    async def _call(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        while True:
            async with self._session.request(verb, path, json=body, headers=headers) as reply:
                found: dict[str, Any] = await reply.json()
                if reply.status < 300:
                    return found
                if reply.status not in NOT_ACCEPTED:
                    raise Failed(f"{verb} {path}: {reply.status} {found.get('message')}")
            await asyncio.sleep(RETRY_SECONDS)


def _environment(number: int) -> str:
    return f"environment-{number:03}"


async def _line(shell: aiohttp.ClientWebSocketResponse) -> str:
    """Return the next line of a shell's output."""
    text = b""
    while not text.endswith(b"\n"):
        message = await shell.receive()
        if message.type != aiohttp.WSMsgType.BINARY:
            raise Failed(f"pods/exec ended: {message.data} {message.extra}")
        if message.data[0] == STDOUT:
            text += message.data[1:]
    return text.decode().strip()


async def main() -> None:
    configuration = client.Configuration()
    await config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)
    trust = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    assert configuration.cert_file is not None  # the harness's administrator has a certificate
    trust.load_cert_chain(configuration.cert_file, configuration.key_file)
    connector = aiohttp.TCPConnector(ssl=trust, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await answer_questions(WarmPools(session, configuration.host).answer)


if __name__ == "__main__":
    asyncio.run(main())
