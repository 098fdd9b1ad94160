"""The rights that the chart gives the operator suffice for all its work."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

from kubernetes.aio import client, config

from agent_runtime.kube.api import KubeApi
from agent_runtime.runner.report import previous_report
from rollout_api.rollout_job import RunnerReport
from tests.integration.operator_core.conftest import OPERATOR_ACCOUNT, RUNNER_ACCOUNT, Replica
from tests.integration.operator_core.control_plane import REPOSITORY, ControlPlane, until

NAMESPACE = "rights"


def assert_only_its_label_of_a_node_can_be_changed(plane: ControlPlane) -> None:
    """The operator can label a node without user namespaces, and can change nothing else of it."""
    metadata = {"name": "old", "labels": {"pool": "old"}}
    status = {"conditions": [{"type": "Ready", "status": "True"}], "runtimeHandlers": [{"name": ""}, {"name": "kata"}]}
    plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
    plane.kubectl("patch", "node", "old", "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))

    def labels() -> dict[str, str]:
        found: dict[str, str] = json.loads(plane.kubectl("get", "node", "old", "-o", "json"))["metadata"]["labels"]
        return {key: value for key, value in found.items() if not key.startswith("kubernetes.io/")}

    lacking = {f"userns.rollout.dev/{handler}": "false" for handler in ("default", "kata")}
    until(lambda: labels() == {"pool": "old", **lacking}, "the labels of a node without user namespaces")
    # kubectl reads a node before it patches it.
    plane.kubectl("create", "clusterrole", "read-nodes", "--verb=get", "--resource=nodes")
    account = OPERATOR_ACCOUNT.removeprefix("system:serviceaccount:")
    plane.kubectl(
        "create", "clusterrolebinding", "read-nodes", "--clusterrole=read-nodes", f"--serviceaccount={account}"
    )
    for change in (
        {"metadata": {"labels": {"pool": "new"}}},
        {"metadata": {"labels": {"pool": None}}},
        {"metadata": {"labels": {"node-role.kubernetes.io/gpu": ""}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"finalizers": ["example.com/kept"]}},
        {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "gone"}]}},
        {"spec": {"unschedulable": True}},
        {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}},
    ):
        refusal = plane.refusal_of("patch", "node", "old", "-p", json.dumps(change), f"--as={OPERATOR_ACCOUNT}")
        assert "the operator may change only labels" in refusal, (change, refusal)
    ready = {"status": {"runtimeHandlers": [{"name": "", "features": {"userNamespaces": True}}]}}
    plane.kubectl("patch", "node", "old", "--subresource=status", "--type=merge", "-p", json.dumps(ready))
    until(lambda: labels() == {"pool": "old"}, "no label on a node that was upgraded")


def test_charts_permissions_suffice_for_all_states_of_jobs_and_sandboxes(plane: ControlPlane, tmp_path: Path) -> None:
    plane.kubectl("create", "namespace", NAMESPACE)
    rights = plane.helm(
        "template", "rollout-operator", str(REPOSITORY / "charts/agent-rollouts"), "--namespace", NAMESPACE,
        "--kube-version", "1.35.4", "--show-only", "templates/rbac.yaml", "--set", f"watch.namespaces={{{NAMESPACE}}}",
    )  # fmt: skip
    plane.kubectl("apply", "-f", "-", text=rights)
    replica = Replica(plane, NAMESPACE, OPERATOR_ACCOUNT, tmp_path)
    try:
        replica.until_it_leads()
        assert_only_its_label_of_a_node_can_be_changed(plane)
        job: dict[str, Any] = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "job", "namespace": NAMESPACE},
            "spec": {
                "tasks": {"inline": [{"name": "task", "prompt": "do it"}]},
                "agent": {"type": "Nop"},
                "sandbox": {"image": "localhost/none:1"},
                "output": {"uri": "s3://bucket/results"},
            },
        }
        sandbox = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "Sandbox",
            "metadata": {"name": "by-hand", "namespace": NAMESPACE},
            "spec": {"image": "localhost/none:1", "startSeconds": 3, "workspaces": {"mode": "Plain"}},
        }
        engine = {"image": "localhost/none:1", "version": "0.27.0"}
        cached: dict[str, Any] = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "ModelServer",
            "metadata": {"name": "cached", "namespace": NAMESPACE},
            "spec": {"model": {"name": "m"}, "engine": engine, "cache": {"size": "1Gi"}},
        }
        served = {
            **cached,
            "metadata": {"name": "served", "namespace": NAMESPACE},
            "spec": {"model": {"name": "m"}, "engine": engine, "podDisruptionBudget": {}},
        }
        owner = copy.deepcopy(job)
        owner["metadata"]["name"] = "owner"
        owner["spec"] |= {"model": {"server": {"model": {"name": "m"}, "engine": engine, "toolCallParser": "hermes"}}}
        plane.apply(job, sandbox, cached, served, owner)
        until(lambda: plane.get("job", "job-runner", NAMESPACE), "the Job of its runners")
        _runner_reports_and_may_do_nothing_else(plane)
        until(lambda: "create pods/by-hand" in plane.writes(OPERATOR_ACCOUNT, NAMESPACE), "the Sandbox's pod")
        until(lambda: "delete pods/by-hand" in plane.writes(OPERATOR_ACCOUNT, NAMESPACE), "its end: no node took it")
        plane.kubectl("patch", "rolloutjob", "job", "-n", NAMESPACE, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        until(lambda: plane.get("job", "cached-download", NAMESPACE), "the download of weights")
        until(lambda: plane.get("statefulset", "served", NAMESPACE), "the servers")
        until(lambda: plane.get("modelserver", "owner-model", NAMESPACE), "the ModelServer of a job's own")
        changes = '{"spec":{"replicas":2,"podDisruptionBudget":null,"clients":[{"podSelector":{}}]}}'
        plane.kubectl("patch", "modelserver", "served", "-n", NAMESPACE, "--type=merge", "-p", changes)
        for written in (
            "patch statefulsets/served",
            "update networkpolicies/served",
            "delete poddisruptionbudgets/served",
        ):
            until(lambda written=written: written in plane.writes(OPERATOR_ACCOUNT, NAMESPACE), written)
        until(lambda: "patch jobs/job-runner" in plane.writes(OPERATOR_ACCOUNT, NAMESPACE), "its suspension")
        until(lambda: "event/" in plane.kubectl("get", "events", "-n", NAMESPACE, "-o", "name"), "events")
        # The one right that only a Job with failed pods needs, when it is resumed.
        assert (
            plane.kubectl("auth", "can-i", "delete", "jobs.batch", "-n", NAMESPACE, f"--as={OPERATOR_ACCOUNT}") == "yes"
        )
    finally:
        replica.process.kill()
        replica.process.wait()
    assert plane.forbidden(OPERATOR_ACCOUNT, NAMESPACE) == []
    assert "forbidden" not in replica.log.read_text()


def _runner_reports_and_may_do_nothing_else(plane: ControlPlane) -> None:
    """Check that a runner can write only the status of its own job's RolloutShards, which the operator sums up."""
    selector = ["-n", NAMESPACE, "-l", "rollout.dev/job=job", "-o", "name"]
    (own,) = until(lambda: plane.kubectl("get", "rolloutshards", *selector).split(), "the shard of its runner")
    shard = own.partition("/")[2]

    async def report() -> None:
        configuration = client.Configuration()
        await config.load_kube_config(str(plane.kubeconfig(RUNNER_ACCOUNT)), client_configuration=configuration)
        api = KubeApi(configuration, NAMESPACE)
        await api.apply_report(shard, RunnerReport(index=0, sealed=1).wire())
        assert previous_report(await api.get_shard(shard)) == RunnerReport(index=0, sealed=1)
        await api.close()

    asyncio.run(report())

    def sealed() -> bool:
        job = plane.get("rolloutjob", "job", NAMESPACE) or {}
        return bool(job.get("status", {}).get("sealed") == 1)

    until(sealed, "the sums")

    def may(*request: str) -> bool:
        return plane.kubectl("auth", "can-i", *request, "-n", NAMESPACE, f"--as={RUNNER_ACCOUNT}", check=False) == "yes"

    assert may("patch", f"rolloutshards/{shard}", "--subresource=status")
    assert not may("patch", f"rolloutshards/{shard}")
    assert not may("patch", "rolloutshards/other-0-0", "--subresource=status")
    assert not may("patch", "rolloutjobs/job", "--subresource=status")
    assert not may("create", "rolloutshards")
