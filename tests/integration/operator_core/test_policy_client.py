"""`ServedPolicy` against a real API server, by a person's kubeconfig."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.integration.operator_core.control_plane import REPOSITORY, ControlPlane, until

TRAINER = """
import asyncio, sys
from rolloutctl.policy import PolicyNotServed, ServedPolicy

async def main(version, uri, job, namespace):
    async with ServedPolicy.connect(job=job, namespace=namespace, patience_seconds=120) as policy:
        try:
            await policy.update(int(version), uri)
        except PolicyNotServed as error:
            print(error)
        else:
            print("served")

asyncio.run(main(*sys.argv[1:]))
"""


def test_trainer_changes_the_policy_and_continues_when_it_is_served(plane: ControlPlane, namespace: str) -> None:
    policy = {"version": 1, "uri": "s3://bucket/1", "digest": "sha256:" + "0" * 64, "minReady": 1}
    spec = {"model": {"name": "m"}, "engine": {"image": "vllm", "version": "0.27.0"}, "policy": policy}
    metadata = {"name": "train-model", "namespace": namespace}
    plane.apply({"apiVersion": "rollout.dev/v1alpha1", "kind": "ModelServer", "metadata": metadata, "spec": spec})

    def wanted() -> dict[str, Any]:
        found: dict[str, Any] = (plane.get("modelserver", "train-model", namespace) or {})["spec"]["policy"]
        return found

    with trainer(plane, 2, "s3://bucket/2", namespace) as update:
        until(lambda: wanted() == {"version": 2, "uri": "s3://bucket/2", "minReady": 1}, "the new policy")
        # As the operator does it once the servers have it.
        server = {"name": "train-model-0", "url": "http://10.0.0.1:8000", "ready": True, "policyVersion": 2}
        patch = {"status": {"policy": {"current": 2, "target": 2, "gate": "Open"}, "servers": [server]}}
        place = ("patch", "modelserver", "train-model", "-n", namespace, "--type=merge", "--subresource=status", "-p")
        assert update.poll() is None, "it waits until the version is served"
        plane.kubectl(*place, json.dumps(patch))
        assert update.communicate(timeout=60)[0] == "served\n"

    with trainer(plane, 1, "s3://bucket/1", namespace) as update:
        assert "ModelServer train-model: " in (said := update.communicate(timeout=60)[0])
        assert "cannot decrease" in said


def trainer(plane: ControlPlane, version: int, uri: str, namespace: str) -> "subprocess.Popen[str]":
    """A trainer of job `train`."""
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(version), uri, "train", namespace],
        cwd=REPOSITORY,
        env={**os.environ, "KUBECONFIG": str(plane.kubeconfig("admin"))},
        stdout=subprocess.PIPE,
        text=True,
    )
