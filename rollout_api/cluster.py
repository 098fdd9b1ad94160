"""What operator and runners agree on beyond the resources themselves: labels, names, ports, paths and the token rule."""

import hashlib
import hmac

from rollout_api.base import API_GROUP

JOB_LABEL = f"{API_GROUP}/job"
JOB_UID_LABEL = f"{API_GROUP}/job-uid"
"""Selectors use the uid: two jobs may have the same name over time."""
ROLE_LABEL = f"{API_GROUP}/role"
RUNNER_ROLE, SANDBOX_ROLE = "runner", "sandbox"
SUSPEND_ANNOTATION = f"{API_GROUP}/suspend"
"""On the runners' Job: the value of spec.suspend that the operator last set. Another value comes from another manager."""
RUNNER_LABEL = f"{API_GROUP}/runner"
"""Index of the runner that asked for a Sandbox."""
SANDBOX_LABEL = f"{API_GROUP}/sandbox"
NETWORK_LABEL = f"{API_GROUP}/network"
"""Digest of what a sandbox pod may reach: one NetworkPolicy serves all pods that need the same."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "agent-rollouts"}

EXECUTOR_PORT = 8470
EXECUTOR_PATH = "/.rollout/executor"
"""Where the executor's bundle is mounted in a sandbox pod; its launcher is the file `executor` in it."""
EXECUTOR_STATE = "/.rollout/state"
"""The emptyDir with the writable layers."""
RUNNER_METRICS_PORT = 9090
MODEL_SERVER_LABEL = f"{API_GROUP}/model-server"
MODEL_SERVER_UID_LABEL = f"{API_GROUP}/model-server-uid"
"""On its pods: two servers may have the same name over time."""
MODEL_SERVER_ROLE, MODEL_WORKER_ROLE, MODEL_DOWNLOAD_ROLE = "model-server", "model-worker", "model-download"
"""Of pods that answer, of the further pods of a server that spans several nodes, and of the one that fetches weights."""
MODEL_PORT = 8000
"""Of a model server's pod: the routes that runners may call."""
MODEL_CONTROL_PORT = 8001
"""Of a model server's pod: pause, load, resume; the operator alone, with the token of its Secret."""
MODEL_ENGINE_PORT = 8002
"""Of a model server's pod, on its loopback: the engine itself."""
POLICY_VERSION_HEADER = "X-Policy-Version"
"""Of a model server's answers: the policy that it served when the request was let in."""
ENGINE_PROCESS_HEADER = "X-Engine-Process"
"""Of a request to the control port: it is meant for this process of the engine, and for none that came after it."""
SERVER_NOT_READY = "server_not_ready"
"""Type of the error with which a model server refuses calls while it was not verified to serve a policy."""
MODEL_TOKEN_FILE = "token"
"""Key, in the Secret `model_control_name`, of the bearer token that the control port wants."""
POLICY_LOADED = f"{API_GROUP}/policy-loaded"
"""Readiness gate of a model server's pod, set by the operator: it serves the current policy, and was asked."""
POLICY_FOLDER = "/policies"
"""In a model server's pod: VERSION/ below it holds what was fetched for that version; the engine reads it there."""
RUNNER_FOLDER = "/var/run/rollout"
"""Secret volume of a runner pod: `key`, the job's key, and `job.json`, the job as it is to be run."""
KEY_FILE, JOB_FILE = "key", "job.json"


def runner_name(job: str) -> str:
    """Name of what belongs to a job's runners: Job, ServiceAccount, Role, RoleBinding, Secret, NetworkPolicy."""
    return f"{job}-runner"


def shard_name(job: str, uid: str, index: int) -> str:
    """Name of the RolloutShard of one runner. With the start of the job's uid: a later job may have the same name."""
    return f"{job}-{uid[:8]}-{index}"


def own_model_server_name(job: str) -> str:
    """Name of the ModelServer that a job with `model.server` owns."""
    return f"{job}-model"


def model_control_name(server: str) -> str:
    """Name of the Secret with the control token of a ModelServer, key `token`."""
    return f"{server}-control"


def by_hand_name(sandbox: str) -> str:
    """Name of what belongs to a Sandbox without an owning job: its key Secret and its NetworkPolicy."""
    return f"{sandbox}-sandbox"


def executor_token(key: str, sandbox: str, uid: str) -> str:
    """The bearer token of a sandbox's executor. Only who has the job's key can make it; the pod carries its digest."""
    return hmac.new(key.encode(), f"{sandbox}/{uid}".encode(), hashlib.sha256).hexdigest()


def token_sha256(token: str) -> str:
    """What an executor is told about its token."""
    return hashlib.sha256(token.encode()).hexdigest()
