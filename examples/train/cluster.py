"""Learning on a cluster: `python -m examples.train.cluster --uri s3://bucket/prefix --secret storage`.

Rollouts and the policy's servers are pods there; the trainer is wherever kubectl and the object storage can be reached from.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from kubernetes.aio import client, config

from agent_runtime.recording.store import Store
from examples.train import lake, policy
from examples.train.laptop import tell
from examples.train.policy import Weights
from examples.train.trainer import Settings, Trainer
from rolloutctl.job_stream import JobStream

MANIFESTS = Path(__file__).with_name("cluster.yaml")
GROUP, VERSION = "rollout.dev", "v1alpha1"
PLURALS = {"ModelServer": "modelservers", "RolloutJob": "rolloutjobs"}
LOOK_SECONDS = 0.5
"""Between two looks at an object. An update of a policy takes seconds."""
PATIENCE_SECONDS = 600.0
"""For servers to come up, for a job's runners, and for one update."""

Object = dict[str, Any]
T = TypeVar("T")


class ClusterServer:
    """The ModelServer's policy, by its spec; weights go through object storage. The operator does and verifies the rest."""

    def __init__(self, objects: client.CustomObjectsApi, namespace: str, uri: str, environ: Mapping[str, str]) -> None:
        self._objects, self._namespace, self._uri, self._environ = objects, namespace, uri, environ

    async def update(self, version: int, weights: Weights) -> None:
        """See PolicyServer. Raises StorageError, ApiException, TimeoutError."""
        if version:  # what a server is started with is version 0
            uri = f"{self._uri}/policy-{version}"
            await upload(weights, uri, self._environ)
            spec = {"policy": {"version": version, "uri": uri}}
            where = (GROUP, VERSION, self._namespace, PLURALS["ModelServer"], "lake")
            await self._objects.patch_namespaced_custom_object(*where, {"spec": spec})
        await found(self._objects, self._namespace, "ModelServer", lambda status: serves(status, version))


def serves(status: Object, version: int) -> bool | None:
    """True once that version answers; None before."""
    known = status.get("policy", {})
    is_ready = any(server["ready"] for server in status.get("servers", []))
    return (is_ready and known.get("current") == version and known.get("gate") == "Open") or None


async def upload(weights: Weights, uri: str, environ: Mapping[str, str]) -> None:
    """Write weights to object storage. Raises StorageError."""
    with tempfile.TemporaryDirectory(prefix="policy-") as folder:
        policy.save(weights, Path(folder))
        store = Store.open(uri, environ)
        for file in Path(folder).iterdir():
            await store.put(file.name, file.read_bytes())


async def found(objects: client.CustomObjectsApi, namespace: str, kind: str, look: Callable[[Object], T | None]) -> T:
    """What `look` finds in the status of the object, as soon as it finds something. Raises TimeoutError, ApiException."""
    status: Object = {}
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (there := look(status)) is None:
                await asyncio.sleep(LOOK_SECONDS)
                where = (GROUP, VERSION, namespace, PLURALS[kind], "lake")
                there_is: Any = await objects.get_namespaced_custom_object(*where)
                status = there_is.get("status", {})
    except TimeoutError:
        raise TimeoutError(f"{kind} lake is not so far after {PATIENCE_SECONDS:g} s; its status: {status}") from None
    return there


async def learn(
    objects: client.CustomObjectsApi,
    namespace: str,
    image: str,
    uri: str,
    secret: str,
    environ: Mapping[str, str],
    settings: Settings,
) -> list[float]:
    """The learning curve. Makes ModelServer and RolloutJob `lake`; the servers are gone at the end, the job stays."""
    weights_uri = f"{uri}/weights"
    await upload(policy.fresh_weights(), f"{weights_uri}/first", environ)
    text = MANIFESTS.read_text()
    for name, value in {"WEIGHTS": weights_uri, "OUTPUT": f"{uri}/out", "IMAGE": image, "STORAGE": secret}.items():
        text = text.replace(name, value)
    for manifest in yaml.safe_load_all(text):
        where = (GROUP, VERSION, namespace, PLURALS[manifest["kind"]])
        await objects.create_namespaced_custom_object(*where, manifest)
    try:
        server = ClusterServer(objects, namespace, weights_uri, environ)
        run = await found(objects, namespace, "RolloutJob", running)
        stream = await JobStream.open(run, environ, patience_seconds=PATIENCE_SECONDS)
        curve = await Trainer(stream, stream.groups(), server, settings).run(tell)
        await stream.close()
    finally:
        await objects.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURALS["ModelServer"], "lake")
    return curve


def running(status: Object) -> str | None:
    """Where the job's run is recorded, once its runners are at work."""
    ready = any(found["type"] == "Ready" and found["status"] == "True" for found in status.get("conditions", []))
    return status.get("resultURI") if ready else None


async def _main(options: argparse.Namespace) -> None:
    best = lake.best_possible(slippery=options.slippery)
    print(f"best possible: {best:.1%}; at random: {lake.at_random(slippery=options.slippery):.1%}")
    settings = Settings(options.slippery, options.updates, learning_rate=options.learning_rate)
    async with await config.new_client_from_config() as api:  # type: ignore[no-untyped-call]
        objects = client.CustomObjectsApi(api)
        await learn(objects, options.namespace, options.image, options.uri, options.secret, os.environ, settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.train.cluster", description=__doc__)
    parser.add_argument("--namespace", default="default")
    parser.add_argument(
        "--image", default="agent-rollouts-lake-policy:latest", help="made by: hack/images/build lake-policy"
    )
    parser.add_argument("--uri", required=True, help="where runs and weights go, in object storage")
    parser.add_argument("--secret", required=True, help="Secret of the namespace with the storage's credentials")
    parser.add_argument("--slippery", action="store_true", help="ice that carries you to the side two times of three")
    parser.add_argument("--updates", type=int, default=Settings.updates)
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    asyncio.run(_main(parser.parse_args()))
