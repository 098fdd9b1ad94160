"""ModelServers of vLLM and SGLang themselves on real nodes: their policy changes during a job, and every token is recorded
with the version whose weights sampled it.
"""

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent_runtime.recording.branches import Branch
from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from tests.support.cluster import QUICKSTART_IMAGE, REPOSITORY, STORAGE_SECRET, Cluster, Job, Object, eventually
from tests.support.model_server import NAME, Server, small_containers
from tests.support.vllm_environment import forward_pass, write_tiny_llama

VERSIONS = range(2)
MEMBERS = 4
TOLERANCE = 1e-2
"""Allowed difference between log probabilities of an engine and of transformers, both in float32."""


@dataclass(frozen=True)
class Engine:
    """An engine on the CPU."""

    type: str
    version: str
    script: str
    """The script in hack that installs it, and prints the path of its Python."""
    flags: Sequence[str]
    turns: int
    tokens: int
    """Tokens of each answer."""
    sampled: str
    """Start of the lines of /metrics that count sampled tokens."""
    env: Sequence[Object] = field(default_factory=list)
    sampled_label: str = ""
    """A label that these lines have, too."""
    survives_malformed: bool = True
    """Whether the server still runs after it has tried to load malformed weights. If not, the gateway checks the files
    before they are loaded.
    """


VLLM = Engine(
    type="vLLM",
    version="0.32.0",
    script="vllm-environment",
    flags=(
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "8"),
        # vLLM 0.32 on the CPU ends when it splits the prompt of a seeded request.
        "--no-enable-chunked-prefill",
    ),
    turns=24,
    tokens=48,
    sampled="vllm:generation_tokens_total",
    env=(
        {"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"},  # GiB
        # torch would compile kernels, and the image has no compiler.
        {"name": "TORCHDYNAMO_DISABLE", "value": "1"},
    ),
)
SGLANG = Engine(
    type="SGLang",
    version="0.5.23",
    script="sglang-environment",
    flags=(
        *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--context-length", "8192", "--max-total-tokens", "65536"),
        *("--max-running-requests", "8", "--decode-log-interval", "1", "--skip-server-warmup"),
    ),
    # Plain torch samples a few tokens a second.
    turns=8,
    tokens=16,
    sampled="sglang:realtime_tokens_total{",
    sampled_label='mode="decode"',
    survives_malformed=False,
    env=({"name": "SGLANG_USE_CPU_ENGINE", "value": "1"},),
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module", params=[VLLM, SGLANG], ids=lambda engine: engine.type)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param
    return found


@pytest.fixture
def files(cluster: Cluster, namespace: str, engine: Engine, tmp_path: Path) -> Iterator[Object]:
    """`podTemplate.spec` of a pod in which the engine's packages are: volumes of this machine, because an image of them
    would be 7 GB, and each node needs it twice.
    """
    done = subprocess.run([REPOSITORY / "hack" / engine.script], stdout=subprocess.PIPE, text=True, check=True)
    python = Path(done.stdout.strip())
    folders = {"engine": python.parents[1]}
    if (base := python.resolve().parents[1]) != Path("/usr"):
        folders["python"] = base  # the image has no such Python
    libraries = folders["libraries"] = tmp_path / "libraries"
    libraries.mkdir()
    listed = subprocess.run(["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, text=True, check=True).stdout
    (numa,) = [line.rpartition("=> ")[2] for line in listed.splitlines() if "libnuma.so.1 (libc6,x86-64)" in line]
    shutil.copy(numa, libraries / "libnuma.so.1")
    volumes, mounts = [], []
    persistent, claims = list[Object](), list[Object]()
    for name, folder in folders.items():
        volume = f"{namespace}-{name}"
        size = {"storage": "1Gi"}
        shared = {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeMode": "Filesystem"}
        persistent.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": {
                    **shared,
                    "capacity": size,
                    "hostPath": {"path": str(folder)},
                    "persistentVolumeReclaimPolicy": "Retain",
                },
            }
        )
        claims.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {**shared, "volumeName": volume, "resources": {"requests": size}},
            }
        )
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}})
        mounts.append({"name": name, "mountPath": str(folder), "readOnly": True})
    cluster.apply(*persistent, *claims)
    path = f"{python.parent}:/usr/local/bin:/usr/bin:/bin"
    # The folders may be below root's home, which is closed to others.
    root = {"runAsUser": 0, "runAsNonRoot": False}
    variables = [{"name": "PATH", "value": path}, {"name": "LD_LIBRARY_PATH", "value": str(libraries)}]
    container = {"name": "engine", "volumeMounts": mounts, "env": variables, "securityContext": root}
    yield {"initContainers": small_containers(), "volumes": volumes, "containers": [container]}
    cluster.kubectl("delete", "persistentvolume", *(made["metadata"]["name"] for made in persistent), "--wait=false")


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


def fields(engine: Engine, files: Object, model: str) -> Object:
    """Return fields of a ModelServer."""
    return {
        "model": {"name": NAME, "uri": model, "secretRef": STORAGE_SECRET},
        "engine": {"type": engine.type, "image": QUICKSTART_IMAGE, "version": engine.version},
        "accelerator": {"count": 0},
        "resources": {"cpu": "500m", "memory": "3Gi", "sharedMemory": "256Mi"},
        "env": list(engine.env),
        "extraArgs": list(engine.flags),
        "weightTransfer": {"pull": {"secretRef": STORAGE_SECRET}},
        "podTemplate": {"spec": files},
    }


def talk(engine: Engine, name: str) -> Object:
    """Return a job that calls the model once in each turn of its rollouts."""
    task = {
        "name": "talk",
        "prompt": "{observation}",
        "files": [{"path": "talk.py", "content": (REPOSITORY / "tests/support/talk.py").read_text()}],
        "environment": {"id": "talk:Talk", "maxSteps": engine.turns, "runIn": "Sandbox"},
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
            "agent": {"type": "Environment", "maxTurns": engine.turns},
            "sandbox": {"image": QUICKSTART_IMAGE},
            "model": {"serverRef": NAME},
            "sampling": {"temperature": 1, "maxTokens": engine.tokens, "extra": {"ignore_eos": True}},
            "attempts": {"limit": 1},
        },
    }


def branches_of(engine: Engine, job: Job) -> list[Branch]:
    """Return each rollout's tokens, when all of them went well."""
    uri = job.manifest["spec"]["output"]["uri"]
    reader = asyncio.run(open_run(Store.open(uri, job.cluster.environ, patience_seconds=30), job.name))
    found = []
    for result in reader.results():
        assert (result.outcome, result.turns, result.failed_attempts) == ("Completed", engine.turns, []), result
        assert (result.token_capture, result.token_forks, result.branches) == ("Tokens", 0, 1), result
        found += asyncio.run(reader.tokens(result.index))
    assert len(found) == MEMBERS
    return found


def versions_of(engine: Engine, branch: Branch) -> list[int]:
    """Return the policy versions of the sampled tokens, in order."""
    sampled = [version for version, mask in zip(branch.policy_versions, branch.mask, strict=True) if mask]
    assert len(sampled) == engine.turns * engine.tokens
    return [int(version or -1) for version in sampled]


def assert_made_by(checkpoint: Path, branches: list[Branch]) -> None:
    """Check that the recorded log probabilities are those of the checkpoint's weights."""
    computed = forward_pass(str(checkpoint), [branch.token_ids for branch in branches])
    for branch, logprobs in zip(branches, computed, strict=True):
        assert branch.logprobs is not None
        recorded = zip(branch.logprobs, logprobs, branch.mask, strict=True)
        assert max(abs(mine - theirs) for mine, theirs, mask in recorded if mask) < TOLERANCE


def test_engine_serves_a_job_over_policy_updates_a_failed_load_and_a_rollback(
    cluster: Cluster,
    namespace: str,
    new_job: Callable[[Object], Job],
    engine: Engine,
    files: Object,
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    first, second = (upload(cluster, namespace, checkpoints / str(v), f"policy-{v}") for v in VERSIONS)
    server = Server(cluster, namespace).apply(**fields(engine, files, first)).wait_ready(1, seconds=900)
    [before] = server.ready

    def finished(name: str) -> list[Branch]:
        job = new_job(talk(engine, name)).apply()
        job.wait("Succeeded", seconds=900)
        return branches_of(engine, job)

    job = new_job(talk(engine, "updated")).apply()
    eventually(lambda: sampled_tokens(engine, server) > MEMBERS * engine.tokens or None, 240, server.describe)
    server.update(1, second)
    job.wait("Succeeded", seconds=900)
    over_the_update = [versions_of(engine, branch) for branch in branches_of(engine, job)]
    assert all(versions == sorted(versions) for versions in over_the_update)
    assert {0, 1} == {version for versions in over_the_update for version in versions}
    assert any({0, 1} <= set(versions) for versions in over_the_update), "it came under a rollout"

    bad = tmp_path / "broken"
    bad.mkdir()
    (bad / "config.json").write_bytes((checkpoints / "1" / "config.json").read_bytes())
    (bad / "model.safetensors").write_bytes(b"no weights")
    broken = upload(cluster, namespace, bad, "broken")
    server.patch(policy={"version": 2, "uri": broken})
    if engine.survives_malformed:
        eventually(lambda: True if server.policy.get("failed") == 2 else None, 240, server.describe)
    else:
        eventually(lambda: True if "is no safetensors file" in server.describe() else None, 240, server.describe)
    server.wait_policy(1)
    after_failure = finished("after-failure")
    assert {version for branch in after_failure for version in versions_of(engine, branch)} == {1}
    assert_made_by(checkpoints / "1", after_failure)

    # Version numbers only increase: the first weights are served again as a later version.
    server.update(3, first)
    back = finished("back")
    assert {version for branch in back for version in versions_of(engine, branch)} == {3}
    assert_made_by(checkpoints / "0", back)
    assert [(entry["uid"], entry["restarts"]) for entry in server.ready] == [(before["uid"], before["restarts"])]


def sampled_tokens(engine: Engine, server: Server) -> float:
    """Return how many tokens the engine has sampled."""

    def is_sampled(line: str) -> bool:
        return line.startswith(engine.sampled) and engine.sampled_label in line

    lines = server.engine_text(f"{NAME}-0", "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if is_sampled(line))
