"""`ModelServer`: an inference engine that a cluster runs for its jobs."""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from rollout_api.base import API_VERSION, ApiModel, ObjectName, Quantity, Seconds, ShortText, exactly_one
from rollout_api.conditions import Condition, Metadata, Timestamp
from rollout_api.sandbox import DISTINCT_VARIABLES, EnvVar
from rollout_api.selectors import LabelSelector, NetworkPeer

OLDEST: Final = (0, 14)
"""Oldest vLLM that is started: the first one known to have `/pause` and `/is_paused` (its documentation of that version);
the flags of several nodes are older (vLLM pull request 23691)."""
SUPPORTS_UPDATES: Final = (0, 26)
"""First vLLM whose weights have a version that can be set and asked for: `/finish_weight_update` with `weight_version`,
`/weight_info` (vLLM pull request 49040)."""

RESERVED_SUFFIXES: Final = ("-api", "-download", "-runner", "-sandbox")
"""Ends of the names of Services and NetworkPolicies that are made beside those that have an object's own name."""
NAME_RULE: Final = (
    f"must begin with a letter and not end in {', '.join(RESERVED_SUFFIXES)}: "
    "Services and NetworkPolicies are named after it"
)

_FIELDS_OF_FLAGS: Final = {
    "model.name": ("--model", "--served-model-name"),
    "model.uri": ("--download-dir", "--tokenizer"),
    "model.revision": ("--revision", "--tokenizer-revision", "--code-revision"),
    "parallelism.tensor": ("--tensor-parallel-size", "-tp"),
    "parallelism.pipeline": ("--pipeline-parallel-size", "-pp"),
    "parallelism.data": ("--data-parallel-size", "-dp"),
    "parallelism.nodes": ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
    "sleep": ("--enable-sleep-mode",),
    "lora": ("--enable-lora", "--max-lora-rank", "--max-loras"),
    "toolCallParser": ("--tool-call-parser", "--enable-auto-tool-choice"),
    "weightTransfer": ("--weight-transfer-config",),
}
_OPERATORS_OWN: Final = (
    *("--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile", "--root-path"),
    *("--config", "--scheduling-policy", "--shutdown-timeout"),
)
OWNED_FLAGS = {flag: f"use {field}" for field, flags in _FIELDS_OF_FLAGS.items() for flag in flags}
OWNED_FLAGS |= dict.fromkeys(_OPERATORS_OWN, "the operator decides it")
"""Flags of vLLM that `extraArgs` may not have, and what to do instead."""


class ModelSource(ApiModel):
    """What is served."""

    name: ShortText
    """Name under which clients know it."""
    uri: (
        Annotated[str, StringConstraints(pattern=r"^(hf|s3|gs|az|pvc)://[^/\s]+(/[^\s]*)?$", max_length=2048)] | None
    ) = None
    """Its weights: `hf://ORG/NAME`, `s3://`, `gs://`, `az://` with a prefix, or `pvc://CLAIM/FOLDER`, which is not copied.
    Left out: `hf://` and the name."""
    revision: Annotated[str, StringConstraints(pattern=r"^[\w./-]+$", max_length=256)] | None = None
    """Commit, branch or tag of a hub's repository."""
    secret_ref: ObjectName | None = None
    """Secret whose keys are environment variables of downloads: HF_TOKEN, AWS_ACCESS_KEY_ID and so on."""


class Engine(ApiModel):
    """The inference engine: vLLM."""

    image: ShortText
    """Image of vLLM's server; its entry point is `vllm serve`."""
    version: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}(\.[0-9]{1,4})?$", max_length=16)]
    """vLLM's version in that image, `0.26.0`: it decides which flags there are."""

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)


Ways = Annotated[int, Field(ge=1, le=1024)]


class Parallelism(ApiModel):
    """How one server is spread over accelerators."""

    tensor: Ways = 1
    """Each layer over so many."""
    pipeline: Ways = 1
    """Layers over so many."""
    data: Ways = 1
    """So many copies behind one address."""
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Pods of one server; more than one needs LeaderWorkerSet in the cluster."""

    @property
    def accelerators(self) -> int:
        """Of one server."""
        return self.tensor * self.pipeline * self.data


class Accelerator(ApiModel):
    """What one server computes on."""

    count: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Of one server: tensor × pipeline × data, as when left out; 0: an engine that runs on CPUs."""
    resource_name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=253)] = (
        "nvidia.com/gpu"
    )
    """Extended resource of the device plugin."""
    product: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=63)] | None
    ) = None
    """Nodes whose label RESOURCE.product has this value, such as `NVIDIA-H100-80GB-HBM3`."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as `nvidia`, where the device plugin needs one."""
    claim_template: ObjectName | None = None
    """ResourceClaimTemplate with all accelerators of one pod (dynamic resource allocation), in place of the resource."""


class ServerResources(ApiModel):
    """What the engine of one pod asks for beside accelerators."""

    cpu: Quantity | None = None
    """Requested cores."""
    memory: Quantity | None = None
    """Requested memory, and its limit; the shared memory counts."""
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm."""


class CacheAccess(StrEnum):
    """`ReadWriteMany`: pods on any node share the volume. `ReadWriteOnce`: pods on one node share it."""

    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE = "ReadWriteOnce"


class WeightCache(ApiModel):
    """A volume that all servers share: weights are downloaded once, before accelerators are taken."""

    claim_name: ObjectName | None = None
    """A PersistentVolumeClaim of yours."""
    size: Quantity | None = None
    """Or the size of one that is made, and goes with the server."""
    storage_class_name: ObjectName | None = None
    """Its storage class; the cluster's default when left out."""
    access_mode: CacheAccess = CacheAccess.READ_WRITE_MANY
    """How the volume is shared."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        exactly_one({"claimName": self.claim_name, "size": self.size})
        return self


class Lora(ApiModel):
    """Adapters that the engine may load."""

    max_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Highest rank; vLLM knows these."""
    max_adapters: Annotated[int, Field(ge=1, le=1024)] = 1
    """Adapters in one batch."""


class TransferMode(StrEnum):
    """`Pull`: each server fetches `policy.uri`. `Push`: the trainer sends the tensors."""

    PULL = "Pull"
    PUSH = "Push"


class PullForm(StrEnum):
    """`Weights`: `policy.uri` has all weights of the model. `Adapter`: it has a LoRA adapter."""

    WEIGHTS = "Weights"
    ADAPTER = "Adapter"


class Pull(ApiModel):
    """How servers fetch a policy."""

    form: PullForm = PullForm.WEIGHTS
    """What `policy.uri` contains."""
    secret_ref: ObjectName | None = None
    """Secret whose keys are the store's own environment variables, such as AWS_ACCESS_KEY_ID."""
    timeout_seconds: Seconds = 720
    """Of one fetch."""


class Push(ApiModel):
    """How the trainer sends a policy."""

    hook: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+(/[^\s]*)?$", max_length=2048)]
    """URL of the trainer: called when all servers are paused, answers what the update consists of, then sends it."""
    timeout_seconds: Seconds = 720
    """From the call of the hook to the last server's having the weights."""
    backend: Annotated[str, StringConstraints(pattern=r"^[a-z_]+$", max_length=64)] = "nccl"
    """vLLM's backend of weight transfer."""
    peers: LabelSelector | None = None
    """Label selector of the trainer's pods, which exchange tensors with the engines."""
    ports: Annotated[list[Annotated[int, Field(ge=1024, le=65_535)]], Field(max_length=64)] = []
    """Ports of the engines that are open to these peers; all but the pod's own three when empty."""


class WeightTransfer(ApiModel):
    """How a new policy gets into the servers."""

    mode: TransferMode = TransferMode.PULL
    """Who moves the bytes."""
    pull: Pull = Pull()
    """For mode Pull."""
    push: Push | None = None
    """For mode Push."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (self.mode is TransferMode.PUSH) != (self.push is not None):
            raise ValueError("push is needed for mode Push, and for no other mode")
        return self


class Policy(ApiModel):
    """The weights that servers are to have."""

    version: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Grows with every change; 0: the model's own weights."""
    uri: Annotated[str, StringConstraints(pattern=r"^(s3|gs|az|file)://[^\s]+$", max_length=2048)] | None = None
    """Folder of the weights or the adapter, for mode Pull; in Push it is handed to the trainer."""
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$", max_length=71)] | None = None
    """SHA-256 of the folder's file SHA256SUMS, which lists all others. That file is obeyed also without this."""
    min_ready: Annotated[int, Field(ge=1, le=256)] | None = None
    """Servers that must have the version before the gate opens again; half of them when left out."""


class DisruptionBudget(ApiModel):
    """What a node's drain may take away at once."""

    max_unavailable: Annotated[int, Field(ge=0, le=256)] = 1
    """Servers (pods, where one spans several nodes); 0: no drain goes past them."""


class ModelServerSpec(ApiModel):
    """What is served, and on what."""

    model: ModelSource
    """What is served."""
    engine: Engine
    """By what."""
    replicas: Annotated[int, Field(ge=0, le=256)] = 1
    """Servers."""
    parallelism: Parallelism = Parallelism()
    """Spread of one server over accelerators."""
    accelerator: Accelerator = Accelerator()
    """What one server computes on."""
    resources: ServerResources = ServerResources()
    """What else it asks for."""
    cache: WeightCache | None = None
    """Where weights are kept; left out, each pod downloads them for itself."""
    sleep: bool = False
    """Let the engine give its accelerators' memory back."""
    lora: Lora | None = None
    """Adapters."""
    tool_call_parser: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)] | None = None
    """vLLM's parser of the model's tool calls, such as `hermes`; jobs whose agent calls tools need it."""
    extra_args: Annotated[list[ShortText], Field(max_length=64)] = []
    """Further arguments of `vllm serve`; what the fields here decide is refused."""
    env: Annotated[list[EnvVar], Field(max_length=64), DISTINCT_VARIABLES] = []
    """Environment of the engine."""
    weight_transfer: WeightTransfer = WeightTransfer()
    """How a new policy gets into the servers."""
    policy: Policy = Policy()
    """The weights that servers are to have."""
    clients: Annotated[list[NetworkPeer], Field(max_length=16)] = []
    """Who may call beside runners of the same namespace: peers as in a NetworkPolicy; sandboxes never."""
    pod_disruption_budget: DisruptionBudget | None = None
    """Protection from drains of nodes; none when left out."""
    pod_template: dict[str, Any] | None = None
    """Merged over the pods that the operator builds, containers by name: `engine`, `gateway`."""

    @field_validator("extra_args")
    @classmethod
    def _no_owned_flag(cls, arguments: list[str]) -> list[str]:
        for argument in arguments:
            flag = argument.partition("=")[0].replace("_", "-")
            if flag in OWNED_FLAGS:
                raise ValueError(f"{argument} is refused: {OWNED_FLAGS[flag]}")
        return arguments

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        wanted, given = self.parallelism.accelerators, self.accelerator.count
        if given is not None and given not in (0, wanted):
            raise ValueError(
                f"accelerator.count is {given}, and parallelism needs tensor × pipeline × data = {wanted}; "
                "leave count out, or make the two equal"
            )
        if wanted % self.parallelism.nodes:
            raise ValueError(
                f"parallelism.nodes is {self.parallelism.nodes}, which does not divide tensor × pipeline × data = {wanted}"
            )
        if self.weight_transfer.mode is TransferMode.PULL:
            if self.policy.version > 0 and self.policy.uri is None:
                raise ValueError(
                    "policy.uri is needed for mode Pull; only version 0, the model's own weights, has none"
                )
            if self.weight_transfer.pull.form is PullForm.ADAPTER and self.lora is None:
                raise ValueError("lora is needed for weightTransfer.pull.form Adapter; set lora.maxRank")
        if self.engine.release < OLDEST:
            raise ValueError(f"engine.version is {self.engine.version}, expected {_dotted(OLDEST)} or newer")
        updates = self.policy.version > 0 or self.weight_transfer.mode is TransferMode.PUSH
        if updates and self.engine.release < SUPPORTS_UPDATES:
            raise ValueError(
                f"engine.version is {self.engine.version}; vLLM can be given new weights, and asked which it has, from "
                f"{_dotted(SUPPORTS_UPDATES)} on: take a newer image, or leave policy and weightTransfer out"
            )
        return self

    @property
    def weights_uri(self) -> str:
        """Where the model's weights are."""
        return self.model.uri or f"hf://{self.model.name}"

    @property
    def min_ready(self) -> int:
        """Servers that must have a policy's version before the gate opens again."""
        return min(self.policy.min_ready or (self.replicas + 1) // 2, self.replicas)


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


class Gate(StrEnum):
    """`Open`: runners may call the servers. `Shut`: runners start no call, and servers hold those that run."""

    OPEN = "Open"
    SHUT = "Shut"


class PolicyStep(StrEnum):
    """Steps of a policy update, in this order: `Fetching`, `Pausing`, `Acknowledging`, `Loading`, `Resuming`."""

    FETCHING = "Fetching"
    PAUSING = "Pausing"
    ACKNOWLEDGING = "Acknowledging"
    LOADING = "Loading"
    RESUMING = "Resuming"


class PolicySource(ApiModel):
    """Where the weights of one version are: a part of `spec.policy`, which may name a newer one by then."""

    version: Annotated[int, Field(ge=0)]
    """Version."""
    uri: Annotated[str, StringConstraints(max_length=2048)] | None = None
    """As in the spec."""
    digest: Annotated[str, StringConstraints(max_length=71)] | None = None
    """As in the spec."""


class PolicyStatus(ApiModel):
    """The policy update that is under way, or the last one."""

    current: Annotated[int, Field(ge=0)] = 0
    """Version that ready servers serve."""
    target: Annotated[int, Field(ge=0)] = 0
    """Version that the update leads to; equal to `current` when none is under way."""
    gate: Gate = Gate.OPEN
    """`Shut`: runners start no call, and those that run are held by the servers."""
    update: Annotated[int, Field(ge=0)] = 0
    """Counts the updates; runners acknowledge this number."""
    paused: bool = False
    """All servers are paused: a stream that falls silent from now on has no more tokens of `current` to come."""
    mixed: Annotated[list[Annotated[str, StringConstraints(max_length=128)]], Field(max_length=1024)] = []
    """Runners (`<job uid>/<index>`) that were not waited for any longer: where their calls change version is unknown."""
    step: PolicyStep | None = None
    """What is being done; None when no update is under way."""
    since: Timestamp | None = None
    """When this step began, RFC 3339."""
    needed: Annotated[int, Field(ge=0)] = 0
    """Servers that must have `target` before the gate opens."""
    failed: Annotated[int, Field(ge=0)] | None = None
    """Version that too few servers could load; it is not tried again."""
    failed_because: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """How they failed."""
    sources: Annotated[list[PolicySource], Field(max_length=2)] = []
    """Where the weights of `current` and of `target` are."""


class ServerState(StrEnum):
    """`Starting`: no answer yet. `PendingWeights`: it lacks the current policy. `Ready`: it takes calls.

    `Evicted`: it failed to load the policy and takes no calls.
    """

    STARTING = "Starting"
    PENDING_WEIGHTS = "PendingWeights"
    READY = "Ready"
    EVICTED = "Evicted"


class ServerStatus(ApiModel):
    """One server."""

    name: Annotated[str, StringConstraints(max_length=253)]
    """Its pod."""
    url: Annotated[str, StringConstraints(max_length=2048)]
    """Where runners reach it."""
    uid: Annotated[str, StringConstraints(max_length=64)] = ""
    """Uid of its pod: another one is another server."""
    policy_version: Annotated[int, Field(ge=0)] | None = None
    """Version that it was last verified to serve; None: it has had no traffic since it started."""
    ready: bool = False
    """Serves `policy.current`, verified; runners call no other."""
    state: ServerState = ServerState.STARTING
    """What it is good for."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Of its engine, when it was verified: an engine that has started again has lost its weights."""
    weights_digest: Annotated[str, StringConstraints(max_length=64)] | None = None
    """SHA-256 over the engine's own checksums of its weights; None where the engine makes none."""


class ModelServerStatus(ApiModel):
    """What the operator has seen."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Ready and what leads there."""
    url: Annotated[str, StringConstraints(max_length=2048)] | None = None
    """Service in front of all servers, for clients that do not choose among them."""
    servers: Annotated[list[ServerStatus], Field(max_length=256)] = []
    """The servers, by name."""
    policy: PolicyStatus = PolicyStatus()
    """Version, and the gate that runners watch."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Pods; for the scale subresource."""
    selector: Annotated[str, StringConstraints(max_length=1024)] = ""
    """Label selector of the pods; for the scale subresource."""


class ModelServer(ApiModel):
    """An inference engine that a cluster runs for its jobs."""

    api_version: Literal["rollout.dev/v1alpha1"] = API_VERSION
    kind: Literal["ModelServer"] = "ModelServer"
    metadata: Metadata
    spec: ModelServerSpec
    """What is asked for."""
    status: ModelServerStatus | None = None
    """What is there."""
