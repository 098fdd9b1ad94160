"""Two jobs whose models are adapters of one ModelServer. Each adapter is updated while its job's rollouts run."""

from collections.abc import Callable

from tests.support.cluster import Cluster, Job, Object, eventually
from tests.support.model_server import NAME, Server, upload_weights
from tests.support.served_jobs import MEMBERS, endless_model, let_end, results_of, served_job, versions_in, wait_tokens

ACCELERATOR = "test.rollout.dev/accelerator"


def test_two_policies_share_servers_and_every_token_has_its_own_version(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job]
) -> None:
    advertise_accelerators(cluster)
    server = Server(cluster, namespace).apply(
        replicas=2,
        accelerator={"resourceName": ACCELERATOR},
        lora={"maxRank": 8, "maxAdapters": 3},
        adapters={"solver": {"version": 0}, "critic": {"version": 0}},
        **endless_model(cluster, namespace),
    )
    server.wait_ready(2)
    jobs = [
        new_job(served_job(name, {"serverRef": NAME, "adapter": name}, tasks=1, runners=1)).apply()
        for name in ("solver", "critic")
    ]
    wait_tokens(server, MEMBERS, jobs=2)
    update_of(server, "solver", 1)
    update_of(server, "critic", 3)
    cluster.kubectl("delete", "pod", f"{NAME}-0", "-n", namespace, "--force", "--grace-period=0")
    server.wait_ready(2)
    wait_adapter(server, "critic", 3)
    update_of(server, "solver", 2)
    assert [job.sealed() for job in jobs] == [0, 0], "all of it happened under the rollouts"
    assert server.policy["update"] == 0, "no call was paused"
    let_end(server)
    for job, first, last in zip(jobs, (0, 0), (2, 3), strict=True):
        job.wait("Succeeded")
        reader, results = results_of(job)
        assert len(results) == MEMBERS
        for result in results:
            assert result.failed_attempts == []
            # The two jobs have sessions of the same names, so tokens are only compared with the marks of their weights.
            versions = versions_in(reader, result, truth={})
            assert (versions[0], versions[-1]) == (first, last)
            assert result.policy_versions == sorted({str(version) for version in versions})
    wrong = "model.adapter: ModelServer policy has no adapter absent (it has: critic, solver)"
    job = new_job(served_job("absent", {"serverRef": NAME, "adapter": "absent"}, tasks=1, runners=1)).apply()
    eventually(lambda: True if wrong in str(job.describe()) else None, 120, job.describe)


def update_of(server: Server, name: str, version: int) -> None:
    """Set another version of one adapter, and wait until all servers have it."""
    uri = upload_weights(server.cluster, server.namespace, f"{name}-{version}", version)
    server.patch(adapters={name: {"version": version, "uri": uri}})
    wait_adapter(server, name, version)


def wait_adapter(server: Server, name: str, version: int) -> None:
    """Wait until the version is current and both servers have it."""

    def is_there() -> bool | None:
        current = server.status.get("adapters", {}).get(name, {}).get("current")
        have = [entry.get("adapters", {}).get(name) for entry in server.ready]
        return (current, have) == (version, [version, version]) or None

    eventually(is_there, 120, server.describe)


def advertise_accelerators(cluster: Cluster) -> None:
    """Make every node report accelerators, which the engines of these tests do not use."""
    path = f"/status/capacity/{ACCELERATOR.replace('/', '~1')}"
    patch = f'[{{"op": "add", "path": "{path}", "value": "64"}}]'
    for node in cluster.kubectl("get", "nodes", "-o", "name").stdout.split():
        cluster.kubectl("patch", node, "--subresource=status", "--type=json", "-p", patch)

        def is_allocatable(node: str = node) -> bool | None:
            found = cluster.kubectl("get", node, "-o", "jsonpath={.status.allocatable}").stdout
            return ACCELERATOR in found or None

        eventually(is_allocatable, 60, lambda: "the kubelet has not taken the resource")
