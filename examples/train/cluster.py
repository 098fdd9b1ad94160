"""Training on a cluster: `python -m examples.train.cluster --uri s3://bucket/prefix --secret storage`.

Rollouts and the policy's servers run in pods. The trainer runs on any machine that reaches the Kubernetes API and the object
storage.
"""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio import client, config

from agent_rollouts.records import Store
from agent_rollouts.session import JobStream, ServedPolicy
from examples.train import lake, policy
from examples.train.laptop import print_share
from examples.train.policy import Weights
from examples.train.trainer import Settings, Trainer

MANIFESTS = Path(__file__).with_name("cluster.yaml")
GROUP, VERSION = "rollout.dev", "v1alpha1"
PLURALS = {"ModelServer": "modelservers", "RolloutJob": "rolloutjobs"}
CHECK_SECONDS = 0.5
"""Interval between two checks of the job."""
PATIENCE_SECONDS = 600.0
"""Time limit for servers to start, for a job's runners, and for one update."""

Object = dict[str, Any]


class ClusterServer:
    """A policy server that writes new weights to object storage and names them in the ModelServer's spec; the operator loads
    and verifies them.
    """

    def __init__(self, policy: ServedPolicy, uri: str) -> None:
        self._policy, self._uri = policy, uri

    async def update(self, version: int, weights: Weights) -> None:
        """See PolicyServer. Raises StorageError, PolicyNotServed."""
        if version == 0:  # servers start with these weights
            await self._policy.served(0)
            return
        uri = f"{self._uri}/policy-{version}"
        await upload(weights, uri)
        await self._policy.update(version, uri)


async def upload(weights: Weights, uri: str) -> None:
    """Write weights to object storage. Raises StorageError."""
    with tempfile.TemporaryDirectory(prefix="policy-") as folder:
        policy.save(weights, Path(folder))
        store = Store.open(uri, os.environ)
        for file in Path(folder).iterdir():
            await store.put(file.name, file.read_bytes())


async def wait_for_runners(objects: client.CustomObjectsApi, namespace: str) -> str:
    """Wait until the job's runners are ready; return the URI of its run. Raises TimeoutError, ApiException."""
    status: Object = {}
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (run := run_uri(status)) is None:
                await asyncio.sleep(CHECK_SECONDS)
                where = (GROUP, VERSION, namespace, PLURALS["RolloutJob"], "lake")
                found_job: Any = await objects.get_namespaced_custom_object(*where)
                status = found_job.get("status", {})
    except TimeoutError:
        raise TimeoutError(
            f"no runner of the job is ready after {PATIENCE_SECONDS:g} s; its status: {status}"
        ) from None
    return run


async def learn(
    objects: client.CustomObjectsApi, namespace: str, image: str, uri: str, secret: str, settings: Settings
) -> list[float]:
    """Train the policy; return the learning curve. Creates a ModelServer and a RolloutJob, both named `lake`; the
    ModelServer is deleted at the end, the job is kept.
    """
    weights_uri = f"{uri}/weights"
    await upload(policy.fresh_weights(), f"{weights_uri}/first")
    text = MANIFESTS.read_text()
    for name, value in {"WEIGHTS": weights_uri, "OUTPUT": f"{uri}/out", "IMAGE": image, "STORAGE": secret}.items():
        text = text.replace(name, value)
    for manifest in yaml.safe_load_all(text):
        where = (GROUP, VERSION, namespace, PLURALS[manifest["kind"]])
        await objects.create_namespaced_custom_object(*where, manifest)
    try:
        served = ServedPolicy(objects, namespace, "lake", patience_seconds=PATIENCE_SECONDS)
        server = ClusterServer(served, weights_uri)
        run = await wait_for_runners(objects, namespace)
        stream = await JobStream.open(run, patience_seconds=PATIENCE_SECONDS)
        curve = await Trainer(stream, stream.groups(), server, settings).run(print_share)
        await stream.close()
    finally:
        await objects.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURALS["ModelServer"], "lake")
    return curve


def run_uri(status: Object) -> str | None:
    """Return the URI of the job's run; None until its runners are ready."""
    ready = any(found["type"] == "Ready" and found["status"] == "True" for found in status.get("conditions", []))
    return status.get("resultURI") if ready else None


async def _main(options: argparse.Namespace) -> None:
    best = lake.best_possible(slippery=options.slippery)
    print(f"best possible: {best:.1%}; at random: {lake.at_random(slippery=options.slippery):.1%}")
    settings = Settings(slippery=options.slippery, updates=options.updates, learning_rate=options.learning_rate)
    async with await config.new_client_from_config() as api:
        objects = client.CustomObjectsApi(api)
        await learn(objects, options.namespace, options.image, options.uri, options.secret, settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.train.cluster", description=__doc__)
    parser.add_argument("--namespace", default="default")
    parser.add_argument(
        "--image",
        default="agent-rollouts-lake-policy:latest",
        help="image of the policy's servers (`hack/images/build lake-policy`)",
    )
    parser.add_argument("--uri", required=True, help="prefix in object storage for runs and weights")
    parser.add_argument("--secret", required=True, help="Secret of the namespace with the storage's credentials")
    parser.add_argument("--slippery", action="store_true", help="slippery ice: two of three steps go sideways")
    parser.add_argument("--updates", type=int, default=Settings.updates)
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    asyncio.run(_main(parser.parse_args()))
