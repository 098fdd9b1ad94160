"""A ModelServer of vLLM itself on real nodes: its policy changes during a job, and every token is recorded with the
version whose weights sampled it.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_runtime.recording.branches import Branch
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from tests.support.cluster import QUICKSTART_IMAGE, REPOSITORY, STORAGE_SECRET, Cluster, Job, Object, eventually
from tests.support.images import OnNodes
from tests.support.model_server import NAME, Server, small_containers
from tests.support.vllm_environment import forward_pass, write_tiny_llama

IMAGE = "agent-rollouts-vllm:test"
VERSIONS = range(2)
TURNS = 24
TOKENS = 48
"""Tokens of each answer."""
MEMBERS = 4
TOLERANCE = 1e-2
"""Allowed difference between log probabilities of vLLM and of transformers, both in float32."""
FLAGS = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "8"),
    # vLLM 0.32 on the CPU ends when it splits the prompt of a seeded request.
    "--no-enable-chunked-prefill",
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def image(on_nodes: OnNodes) -> str:
    return on_nodes("vllm")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for version in VERSIONS:
        write_tiny_llama(folder, version)
    return folder


def upload(cluster: Cluster, namespace: str, folder: Path, name: str) -> str:
    """Return the URI of the folder's files in object storage."""
    uri = f"s3://{cluster.bucket}/{namespace}/{name}"
    store = Store.open(uri, cluster.environ, patience_seconds=30)
    for file in folder.iterdir():
        asyncio.run(store.put(file.name, file.read_bytes()))
    return uri


def engine(image: str, model: str) -> Object:
    """Fields of a ModelServer."""
    return {
        "model": {"name": NAME, "uri": model, "secretRef": STORAGE_SECRET},
        "engine": {"image": image, "version": "0.32.0"},
        "accelerator": {"count": 0},
        "resources": {"cpu": "500m", "memory": "3Gi", "sharedMemory": "256Mi"},
        "env": [
            {"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"},  # GiB
            # torch would compile kernels, and the image has no compiler.
            {"name": "TORCHDYNAMO_DISABLE", "value": "1"},
        ],
        "extraArgs": list(FLAGS),
        "weightTransfer": {"pull": {"secretRef": STORAGE_SECRET}},
        "podTemplate": {"spec": {"initContainers": small_containers()}},
    }


def talk(name: str) -> Object:
    """Return a job that calls the model for TURNS turns in each of its rollouts."""
    task = {
        "name": "talk",
        "prompt": "{observation}",
        "files": [{"path": "talk.py", "content": (REPOSITORY / "tests/support/talk.py").read_text()}],
        "environment": {"id": "talk:Talk", "maxSteps": TURNS, "runIn": "Sandbox"},
    }
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {
            "mode": "Train",
            "groupSize": MEMBERS,
            "seed": 3,
            "tasks": {"inline": [task]},
            "agent": {"type": "Environment", "maxTurns": TURNS},
            "sandbox": {"image": QUICKSTART_IMAGE},
            "model": {"serverRef": NAME},
            "sampling": {"temperature": 1, "maxTokens": TOKENS, "extra": {"ignore_eos": True}},
            "attempts": {"limit": 1},
        },
    }


def branches_of(job: Job) -> list[Branch]:
    """Return each rollout's tokens, when all of them went well."""
    uri = job.manifest["spec"]["output"]["uri"]
    reader = asyncio.run(open_run(Store.open(uri, job.cluster.environ, patience_seconds=30), job.name))
    found = []
    for result in reader.results():
        assert (result.outcome, result.turns, result.failed_attempts) == ("Completed", TURNS, []), result
        assert (result.token_capture, result.token_forks, result.branches) == ("Tokens", 0, 1), result
        found += asyncio.run(reader.tokens(result.index))
    assert len(found) == MEMBERS
    return found


def versions_of(branch: Branch) -> list[int]:
    """Return the policy versions of the sampled tokens, in order."""
    sampled = [version for version, mask in zip(branch.policy_versions, branch.mask, strict=True) if mask]
    assert len(sampled) == TURNS * TOKENS
    return [int(version or -1) for version in sampled]


def assert_made_by(checkpoint: Path, branches: list[Branch]) -> None:
    """Check that the recorded log probabilities are those of the checkpoint's weights."""
    computed = forward_pass(str(checkpoint), [branch.token_ids for branch in branches])
    for branch, logprobs in zip(branches, computed, strict=True):
        assert branch.logprobs is not None
        recorded = zip(branch.logprobs, logprobs, branch.mask, strict=True)
        assert max(abs(mine - theirs) for mine, theirs, mask in recorded if mask) < TOLERANCE


def test_vllm_serves_a_job_over_policy_updates_a_failed_load_and_a_rollback(
    cluster: Cluster, namespace: str, new_job: Callable[[Object], Job], image: str, checkpoints: Path, tmp_path: Path
) -> None:
    first, second = (upload(cluster, namespace, checkpoints / str(v), f"policy-{v}") for v in VERSIONS)
    server = Server(cluster, namespace).apply(**engine(image, first)).wait_ready(1, seconds=900)
    [before] = server.ready

    job = new_job(talk("updated")).apply()
    eventually(lambda: sampled_tokens(server) > MEMBERS * TOKENS or None, 240, server.describe)
    server.update(1, second)
    job.wait("Succeeded", seconds=900)
    over_the_update = [versions_of(branch) for branch in branches_of(job)]
    assert all(versions == sorted(versions) for versions in over_the_update)
    assert {0, 1} == {version for versions in over_the_update for version in versions}
    assert any({0, 1} <= set(versions) for versions in over_the_update), "it came under a rollout"

    (tmp_path / "config.json").write_bytes((checkpoints / "1" / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    broken = upload(cluster, namespace, tmp_path, "broken")
    server.patch(policy={"version": 2, "uri": broken})
    eventually(lambda: True if server.policy.get("failed") == 2 else None, 240, server.describe)
    server.wait_policy(1)
    after_failure = branches_of(finished(new_job, "after-failure"))
    assert {version for branch in after_failure for version in versions_of(branch)} == {1}
    assert_made_by(checkpoints / "1", after_failure)

    # Version numbers only increase: the first weights are served again as a later version.
    server.update(3, first)
    back = branches_of(finished(new_job, "back"))
    assert {version for branch in back for version in versions_of(branch)} == {3}
    assert_made_by(checkpoints / "0", back)
    assert [(entry["uid"], entry["restarts"]) for entry in server.ready] == [(before["uid"], before["restarts"])]


def finished(new_job: Callable[[Object], Job], name: str) -> Job:
    job = new_job(talk(name)).apply()
    job.wait("Succeeded", seconds=900)
    return job


def sampled_tokens(server: Server) -> float:
    """Return how many tokens vLLM has sampled."""
    lines = server.engine_text(f"{NAME}-0", "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))
