"""Jobs whose model is a ModelServer: its policy changes and parts of it die under their rollouts, and every token is
recorded with the version that made it."""

import asyncio
import json
from collections.abc import Callable

import pytest

from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.cluster import MODEL_SERVER_LABEL, own_model_server_name
from rollout_api.records import Result
from tests.support.cluster import OPERATOR_NAMESPACE, QUICKSTART_IMAGE, Cluster, Job, Object, eventually
from tests.support.model_server import NAME, Server, small_containers, standin_spec
from tests.support.vllm_server import logprobs_by

MEMBERS, MOST_TURNS = 4, 400
POLICIES = range(4)
# Slow enough that answers are under way whenever something happens, and that the shut gate is seen.
ARGUMENTS = "--script /script/script.json --tokens-per-second 20 --load-seconds 2"
TEXT = "I have looked at the files of this folder once more, and before I say what I think of them I write down what I saw. "

Truth = dict[tuple[str, int], set[tuple[int, float, int]]]
"""By session and position: tokens that engines made there, with log probability and policy version."""


@pytest.fixture
def script(cluster: Cluster, namespace: str) -> Object:
    """Fields of a ModelServer whose model goes on calling a tool until `let_end`, also when its engines are new."""
    call = {"name": "bash", "arguments": {"command": "echo saw >> notes"}}
    answers = {"*": [{"text": f"{turn}. {TEXT}", "tool_calls": [call]} for turn in range(MOST_TURNS)]}
    metadata = {"name": "script", "namespace": namespace}
    data = {"script.json": json.dumps(answers)}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    mount = {"name": "script", "mountPath": "/script", "readOnly": True}
    engine = {
        "name": "engine",
        "volumeMounts": [mount],
        "startupProbe": {"periodSeconds": 1},
        "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
    }
    pod = {
        "initContainers": small_containers(),
        "containers": [engine],
        "volumes": [{"name": "script", "configMap": {"name": "script"}}],
        "terminationGracePeriodSeconds": 5,
    }
    return {"env": [{"name": "STANDIN_ARGS", "value": ARGUMENTS}], "podTemplate": {"spec": pod}}


def let_end(server: Server) -> None:
    """From now on its model has nothing more to do."""
    for entry in server.ready:
        server.ask_engine(entry["name"], "/_standin/script", {"*": ["Done."] * MOST_TURNS})


def manifest(name: str, model: Object, tasks: int, runners: int) -> Object:
    """A job that works until `let_end`."""
    task = {"prompt": "Look around.", "verifier": {"commands": ["test -s notes"]}}
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {
            "mode": "Train",
            "groupSize": MEMBERS,
            "agent": {"type": "ToolCalling", "tools": ["bash"], "maxTurns": MOST_TURNS},
            "sandbox": {"image": QUICKSTART_IMAGE},
            "verifier": {"mode": "Separate"},
            "model": model,
            "sampling": {"maxTokens": 400},
            "runners": {"replicas": runners},
            "tasks": {"inline": [{"name": f"task-{number}"} | task for number in range(tasks)]},
        },
    }


def remember(server: Server, pod: str, truth: Truth) -> None:
    """What an engine has really done so far."""
    for request in server.ask_engine(pod, "/_standin/served"):
        for version, begin, end in request["spans"]:
            for number in range(begin, end):
                place = request["session"], len(request["prompt_ids"]) + number
                made = request["ids"][number], request["logprobs"][number], version
                truth.setdefault(place, set()).add(made)


def wait_tokens(server: Server, rollouts: int) -> None:
    """Until engines have made some for each of the rollouts."""
    wanted = {f"rollout-{index}" for index in range(rollouts)}

    def working() -> bool | None:
        truth: Truth = {}
        for entry in server.ready:
            remember(server, entry["name"], truth)
        return wanted <= {session for session, _ in truth} or None

    eventually(working, 120, server.describe)


def results_of(job: Job) -> tuple[RunReader, list[Result]]:
    """The run, and its results when all rollouts went well at the first attempt that counts."""
    uri = job.manifest["spec"]["output"]["uri"]
    reader = asyncio.run(open_run(Store.open(uri, job.cluster.environ, patience_seconds=30), job.name))
    found = reader.results()
    for result in found:
        assert (result.outcome, result.reward) == ("Completed", 1), result
        assert (result.token_capture, result.token_forks, result.branches) == ("Tokens", 0, 1), result
    return reader, found


def versions_in(reader: RunReader, result: Result, truth: Truth) -> list[int]:
    """The policy versions of a rollout's trained tokens in order, each token checked against what engines did."""
    [branch] = asyncio.run(reader.tokens(result.index))
    assert branch.logprobs is not None
    ids, versions = branch.token_ids, list[int]()
    # What an engine did that died cannot be asked for, and can be computed: weights leave their mark on each token.
    marks = {version: [0.0, *logprobs_by(version, ids[:1], ids[1:])] for version in POLICIES}
    for position in (position for position, mask in enumerate(branch.mask) if mask):
        logprob, version = branch.logprobs[position], int(branch.policy_versions[position] or -1)
        assert logprob == marks[version][position], (result.index, position)
        token = ids[position], logprob, version
        assert token in truth.get((f"rollout-{result.index}", position), {token}), (result.index, position)
        versions.append(version)
    assert versions == sorted(versions), "an older policy followed a newer one"
    return versions


@pytest.mark.alone  # it kills the operator
def test_no_token_has_a_wrong_version_when_operator_and_engine_die_during_policy_updates(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], script: Object
) -> None:
    server = Server(cluster, namespace).apply(replicas=2, **script).wait_ready(2)
    job = new_job(manifest("served", {"serverRef": NAME}, tasks=3, runners=2)).apply()
    wait_tokens(server, 3 * MEMBERS)

    server.ask_for(1)
    server.wait_policy(1)
    update = server.policy["update"]
    told = lambda: {runner.get("policyUpdate") for runner in job.status["runners"]} == {update} or None  # noqa: E731
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
    assert {session for session, _ in truth} >= {f"rollout-{result.index}" for result in results}
    job.delete()
    assert server.found is not None, "it belongs to nobody's job"


KINDS = (
    "rolloutjobs,modelservers,sandboxes,pods,jobs,statefulsets,services,secrets,serviceaccounts,roles,rolebindings,"
    "networkpolicies,poddisruptionbudgets,persistentvolumeclaims"
)


def test_a_jobs_own_server_follows_it_through_suspension_keeps_its_policy_and_leaves_nothing(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], script: Object
) -> None:
    def everything() -> set[tuple[str, str]]:
        return {(found["kind"], found["metadata"]["name"]) for found in cluster.list(KINDS, namespace)}

    before = everything()
    model = {"server": standin_spec(cluster, namespace, **script)}
    job = new_job(manifest("own", model, tasks=1, runners=1)).apply()
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
