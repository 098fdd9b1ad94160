"""Labels, names, ports, paths and the token derivation that the operator and the runners share."""

import hashlib
import hmac
import re

from rollout_api.base import API_GROUP

JOB_LABEL = f"{API_GROUP}/job"
JOB_UID_LABEL = f"{API_GROUP}/job-uid"
"""Selectors use the uid, because a later job may reuse a name."""
ROLE_LABEL = f"{API_GROUP}/role"
RUNNER_ROLE, SANDBOX_ROLE, PARKING_ROLE = "runner", "sandbox", "parking"
SUSPEND_ANNOTATION = f"{API_GROUP}/suspend"
"""On the runners' Job: the value of spec.suspend that the operator last set. Another value comes from another manager."""
EXECUTOR_ANNOTATION = f"{API_GROUP}/executor-image"
"""On the runners' Job: the executor's image of all sandboxes of the job. After an upgrade the job's runners keep their own
image, and an executor of another version may not understand them.
"""
RUNNER_LABEL = f"{API_GROUP}/runner"
"""Index of the runner that requested a Sandbox."""
SANDBOX_LABEL = f"{API_GROUP}/sandbox"
POD_ANNOTATION = f"{API_GROUP}/pod-uid"
"""On a Job that parks a Sandbox: the uid of the Sandbox's pod for which it was created."""
PARKING_ANNOTATION = f"{API_GROUP}/parking"
"""On the same Job: the number of the parking, `status.parking` of the Sandbox."""
STORED_IN_PART = "stored in part: "
"""First words of such a Job that succeeded, but left out a workspace that is in use."""
PARKED_ANNOTATION = f"{API_GROUP}/parked-since"
"""On the pod of a parked Sandbox: since when it is parked. An older pod, whose files are stored, has another value."""
NETWORK_LABEL = f"{API_GROUP}/network"
"""Digest of a sandbox pod's allowed destinations. Pods with equal destinations share one NetworkPolicy."""
POOL_LABEL = f"{API_GROUP}/pool"
POOL_UID_LABEL = f"{API_GROUP}/pool-uid"
"""Labels of a SandboxPool's Sandboxes and pods. Selectors use the uid, because a later pool may reuse a name."""
POOL_SPEC_ANNOTATION = f"{API_GROUP}/pool-spec"
"""On a SandboxPool's Sandbox: digest of what it was made from. Sandboxes with another one are replaced."""
MEASURED_ANNOTATION = f"{API_GROUP}/memory-request"
"""On a Sandbox whose `resources.memoryRequest` was measured: the value that its job or pool has instead, `Measured`."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "agent-rollouts"}

EXECUTOR_PORT = 8470
EXECUTOR_PATH = "/.rollout/executor"
"""Mount path of the executor's bundle in a sandbox pod. Its launcher is the file `executor` in that folder."""
EXECUTOR_STATE = "/.rollout/state"
MOST_LAYER_BYTES = 20 << 30
"""Limit of the restored layers that a sandbox keeps for later workspaces: a tenth of an ordinary node's disk."""
"""The emptyDir with the writable layers."""
RUNNER_METRICS_PORT = 9090
MODEL_SERVER_LABEL = f"{API_GROUP}/model-server"
MODEL_SERVER_UID_LABEL = f"{API_GROUP}/model-server-uid"
"""Label on a ModelServer's pods. Selectors use the uid, because a later server may reuse a name."""
MODEL_SERVER_ROLE, MODEL_WORKER_ROLE, MODEL_DOWNLOAD_ROLE = "model-server", "model-worker", "model-download"
"""Roles of the serving pods, of the further pods of a multi-node server, and of the pod that downloads weights."""
MODEL_PORT = 8000
"""Port of a model server's pod with the routes that runners may call."""
MODEL_CONTROL_PORT = 8001
"""Control port of a model server's pod: pause, load, resume. Only the operator calls it, with the token of its Secret.
"""
MODEL_ENGINE_PORT = 8002
"""Loopback port of the inference engine in a model server's pod."""
POLICY_VERSION_HEADER = "X-Policy-Version"
"""Response header of a model server: the policy version that it served when it admitted the request. In a request that
names an adapter: the wanted version.
"""
ENGINE_PROCESS_HEADER = "X-Engine-Process"
"""Request header of the control port: the engine process for which the request is meant. Later processes refuse it."""
SERVER_NOT_READY = "server_not_ready"
"""Error type with which a model server refuses calls until it is verified to serve a policy."""
MODEL_TOKEN_FILE = "token"
"""Key, in the Secret `model_control_name`, of the control port's bearer token."""
POLICY_LOADED = f"{API_GROUP}/policy-loaded"
"""Readiness gate of a model server's pod. The operator sets it when the server reports the current policy."""
POLICY_FOLDER = "/policies"
"""Folder in a model server's pod. `VERSION/` in it holds the fetched files of that version, which the engine reads."""
RUNNER_FOLDER = "/var/run/rollout"
"""Secret volume of a runner pod: `key` is the job's key, and `job.json` is the resolved job."""
KEY_FILE, JOB_FILE = "key", "job.json"
POOLS_FOLDER = "/var/run/rollout-pools"
"""Volume of a runner pod with a folder for each SandboxPool of its namespace, which has the pool's key as `key`."""


def runner_name(job: str) -> str:
    """Name of a runner's objects: Job, ServiceAccount, Role, RoleBinding, Secret, NetworkPolicy."""
    return f"{job}-runner"


def shard_name(job: str, uid: str, index: int) -> str:
    """Name of the RolloutShard of one runner. It includes the start of the job's uid, because a later job may reuse a
    name.
    """
    return f"{job}-{uid[:8]}-{index}"


def own_model_server_name(job: str) -> str:
    """Name of the ModelServer that a job with `model.server` owns."""
    return f"{job}-model"


def model_control_name(server: str) -> str:
    """Name of the Secret with the control token of a ModelServer, key `token`."""
    return f"{server}-control"


def by_hand_name(sandbox: str) -> str:
    """Name of the key Secret and the NetworkPolicy of a Sandbox without an owning job."""
    return f"{sandbox}-sandbox"


def parking_labels(sandbox: str) -> dict[str, str]:
    """Return the labels of the pods that park a Sandbox, which its executor admits."""
    return {ROLE_LABEL: PARKING_ROLE, SANDBOX_LABEL: sandbox}


def pool_secret_name(pool: str) -> str:
    """Name of the Secret with a SandboxPool's key."""
    return f"{pool}-pool"


def job_tag(uid: str) -> str:
    """Return the prefix of the names of a job's attempts in executors, which several jobs may share."""
    return f"{uid[:8]}-"


def tag_of(attempt: str) -> str:
    """Return the `job_tag` of an attempt's name in an executor; empty for states that no job owns."""
    found = re.match(r"[0-9a-f]{8}-", attempt)
    return found[0] if found else ""


def executor_token(key: str, sandbox: str, uid: str) -> str:
    """Return the bearer token of a sandbox's executor, derived from the job's key. The pod has only its digest."""
    return hmac.new(key.encode(), f"{sandbox}/{uid}".encode(), hashlib.sha256).hexdigest()


def token_sha256(token: str) -> str:
    """Return the SHA-256 digest of a token. The executor's configuration contains it instead of the token."""
    return hashlib.sha256(token.encode()).hexdigest()
