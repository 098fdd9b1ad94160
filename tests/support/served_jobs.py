"""Jobs whose model is a ModelServer of the stand-in: rollouts that continue until they are told to end, and what
engines really did, to compare the record with.
"""

import asyncio
import json

from agent_runtime.recording.reader import RunReader, open_run
from agent_runtime.recording.store import Store
from rollout_api.cluster import job_tag
from rollout_api.records import Result
from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Job, Object, eventually
from tests.support.model_server import Server, quick_pods
from tests.support.vllm_server import logprobs_by

MEMBERS, MOST_TURNS = 4, 400
POLICIES = range(4)
# Slow enough that answers are running at every event, and that the closed gate is observed.
ARGUMENTS = "--script /script/script.json --tokens-per-second 20 --load-seconds 2"
TEXT = "I have looked at the files of this folder once more, and before I say what I think of them I write down what I saw. "

Truth = dict[tuple[str, int], set[tuple[int, float, int]]]
"""By session and position: the sampled tokens of the engines, with log probability and policy version."""


def endless_model(cluster: Cluster, namespace: str, *arguments: str) -> Object:
    """Return fields of a ModelServer whose model calls a tool in every turn until `let_end`, also with new engines."""
    call = {"name": "bash", "arguments": {"command": "echo saw >> notes"}}
    answers = {"*": [{"text": f"{turn}. {TEXT}", "tool_calls": [call]} for turn in range(MOST_TURNS)]}
    metadata = {"name": "script", "namespace": namespace}
    data = {"script.json": json.dumps(answers)}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    mount = {"name": "script", "mountPath": "/script", "readOnly": True}
    pod = quick_pods(volumeMounts=[mount]) | {"volumes": [{"name": "script", "configMap": {"name": "script"}}]}
    standin = {"name": "STANDIN_ARGS", "value": " ".join((ARGUMENTS, *arguments))}
    return {"env": [standin], "podTemplate": {"spec": pod}}


def let_end(server: Server) -> None:
    """Have its model end from now on."""
    for entry in server.ready:
        server.ask_engine(entry["name"], "/_standin/script", {"*": ["Done."] * MOST_TURNS})


def served_job(name: str, model: Object, tasks: int, runners: int) -> Object:
    """Return a job that works until `let_end`."""
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
    """Record what an engine has really done so far."""
    for request in server.ask_engine(pod, "/_standin/served"):
        for version, begin, end in request["spans"]:
            for number in range(begin, end):
                place = request["session"], len(request["prompt_ids"]) + number
                made = request["ids"][number], request["logprobs"][number], version
                truth.setdefault(place, set()).add(made)


def wait_tokens(server: Server, rollouts: int, jobs: int = 1) -> None:
    """Wait until engines have sampled tokens for each of the rollouts of so many jobs."""

    def working() -> bool | None:
        served = [one for entry in server.ready for one in server.ask_engine(entry["name"], "/_standin/served")]
        return len({one["session"] for one in served if one["spans"]}) >= rollouts * jobs or None

    eventually(working, 120, server.describe)


def results_of(job: Job) -> tuple[RunReader, list[Result]]:
    """Return the run and its results, after a check that each rollout has reward 1 and one branch without forks."""
    uri = job.manifest["spec"]["output"]["uri"]
    reader = asyncio.run(open_run(Store.open(uri, job.cluster.environ, patience_seconds=30), job.name))
    found = list(reader.results())
    for result in found:
        assert (result.outcome, result.reward) == ("Completed", 1), result
        assert (result.token_capture, result.token_forks, result.branches) == ("Tokens", 0, 1), result
    return reader, found


def versions_in(reader: RunReader, result: Result, truth: Truth) -> list[int]:
    """Return the policy versions of a rollout's trained tokens, in order, after a comparison of each token with the
    engines' record.
    """
    [branch] = asyncio.run(reader.tokens(result.index))
    assert branch.logprobs is not None
    ids, versions, tag = branch.token_ids, list[int](), job_tag(reader.job_file.uid)
    # A dead engine cannot be asked for its answers, but they can be computed: its weights determine each logprob.
    marks = {version: [0.0, *logprobs_by(version, ids[:1], ids[1:])] for version in POLICIES}
    for position in (position for position, mask in enumerate(branch.mask) if mask):
        logprob, version = branch.logprobs[position], int(branch.policy_versions[position] or -1)
        assert logprob == marks[version][position], (result.index, position)
        token = ids[position], logprob, version
        assert token in truth.get((f"{tag}rollout-{result.index}", position), {token}), (result.index, position)
        versions.append(version)
    assert versions == sorted(versions), "an older policy followed a newer one"
    return versions
