"""Jobs whose model is a ModelServer. Its policy changes and parts of it die during rollouts, and every token is
recorded with the version that sampled it.
"""

from collections.abc import Callable

import pytest

from rollout_api.cluster import MODEL_SERVER_LABEL, job_tag, own_model_server_name
from tests.support.cluster import OPERATOR_NAMESPACE, Cluster, Job, Object, eventually
from tests.support.model_server import NAME, Server, standin_spec
from tests.support.served_jobs import (
    MEMBERS,
    POLICIES,
    Truth,
    endless_model,
    let_end,
    remember,
    results_of,
    served_job,
    versions_in,
    wait_tokens,
)


@pytest.fixture
def script(cluster: Cluster, namespace: str) -> Object:
    """Return fields of a ModelServer whose model continues until `let_end`."""
    return endless_model(cluster, namespace)


@pytest.mark.alone  # it kills the operator
def test_every_token_has_its_version_when_operator_and_engine_die(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], script: Object
) -> None:
    server = Server(cluster, namespace).apply(replicas=2, **script).wait_ready(2)
    job = new_job(served_job("served", {"serverRef": NAME}, tasks=3, runners=2)).apply()
    wait_tokens(server, 3 * MEMBERS)

    server.ask_for(1)
    server.wait_policy(1)
    update = server.policy["update"]
    told = lambda: {runner.get("policyUpdate") for runner in job.reports} == {update} or None  # noqa: E731
    eventually(told, 30, job.describe)

    server.ask_for(2)
    server.wait_step("Acknowledging", "Loading")
    operator = ("delete", "pod", "-n", OPERATOR_NAMESPACE, "-l", "app.kubernetes.io/name=agent-rollouts")
    cluster.kubectl(*operator, "--force", "--grace-period=0")
    server.wait_policy(2)

    server.ask_for(3)
    server.wait_step("Pausing", "Acknowledging", "Loading")
    truth: Truth = {}
    remember(server, f"{NAME}-0", truth)
    cluster.kubectl("delete", "pod", f"{NAME}-0", "-n", namespace, "--force", "--grace-period=0")
    server.wait_policy(3)
    server.wait_ready(2)
    assert job.sealed() == 0, "all of it happened under the rollouts"
    let_end(server)
    job.wait("Succeeded")
    assert (server.policy["gate"], server.policy["current"]) == ("Open", 3)

    for entry in server.ready:
        remember(server, entry["name"], truth)
    reader, results = results_of(job)
    assert [result.index for result in results] == list(range(3 * MEMBERS))
    seen: set[int] = set()
    for result in results:
        assert result.failed_attempts == []
        versions = versions_in(reader, result, truth)
        assert {POLICIES[0], POLICIES[-1]} <= set(versions), "all updates came while it was under way"
        assert result.policy_versions == sorted({str(version) for version in versions})
        seen.update(versions)
    assert seen == set(POLICIES)
    assert {session for session, _ in truth} >= {f"{job_tag(job.uid)}rollout-{result.index}" for result in results}
    job.delete()
    assert server.found is not None, "it belongs to nobody's job"


KINDS = (
    "rolloutjobs,rolloutshards,modelservers,sandboxes,pods,jobs,statefulsets,services,secrets,serviceaccounts,roles,rolebindings,"
    "networkpolicies,poddisruptionbudgets,persistentvolumeclaims"
)


@pytest.mark.full
def test_jobs_own_server_is_suspended_and_deleted_with_the_job(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], script: Object
) -> None:
    def everything() -> set[tuple[str, str]]:
        return {(found["kind"], found["metadata"]["name"]) for found in cluster.list(KINDS, namespace)}

    before = everything()
    model = {"server": standin_spec(cluster, namespace, **script)}
    job = new_job(served_job("own", model, tasks=1, runners=1)).apply()
    server = Server(cluster, namespace, own_model_server_name("own")).wait_ready(1)
    wait_tokens(server, MEMBERS)
    server.ask_for(1)
    server.wait_policy(1)

    job.suspend(True)
    job.wait("Suspended")
    selector = f"{MODEL_SERVER_LABEL}={server.name}"
    eventually(lambda: None if cluster.list("pods", namespace, selector) else True, 120, server.describe)

    job.suspend(False)
    server.wait_ready(1)
    wait_tokens(server, MEMBERS)
    truth: Truth = {}
    remember(server, server.ready[0]["name"], truth)
    let_end(server)
    job.wait("Succeeded")
    reader, results = results_of(job)
    assert len(results) == MEMBERS
    for result in results:
        assert set(versions_in(reader, result, truth)) == {1}
    eventually(lambda: True if server.found is None else None, 60, server.describe)
    job.delete()
    eventually(lambda: True if everything() == before else None, 120, lambda: f"left: {everything() - before}")
