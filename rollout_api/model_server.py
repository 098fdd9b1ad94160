"""`ModelServer`: an inference engine that a cluster runs for its jobs."""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from rollout_api.base import API_VERSION, ApiModel, ObjectName, Quantity, Seconds, ShortText, exactly_one
from rollout_api.conditions import Condition, Metadata, Timestamp
from rollout_api.inference.description import Description, EngineType, Release, version_text
from rollout_api.inference.engines import DESCRIPTIONS
from rollout_api.sandbox import DISTINCT_VARIABLES, EnvVar
from rollout_api.selectors import LabelSelector, NetworkPeer

RESERVED_SUFFIXES: Final = ("-api", "-download", "-runner", "-sandbox")
"""Suffixes of the names of Services and NetworkPolicies that are derived from an object's name. A ModelServer's name may
not end in one, so that names cannot collide.
"""
NAME_RULE: Final = (
    f"must begin with a letter and not end in {', '.join(RESERVED_SUFFIXES)}: "
    "Services and NetworkPolicies are named after it"
)


class ModelSource(ApiModel):
    """The model to serve."""

    name: ShortText
    """Name that clients use for the model."""
    uri: (
        Annotated[str, StringConstraints(pattern=r"^(hf|s3|gs|az|pvc)://[^/\s]+(/[^\s]*)?$", max_length=2048)] | None
    ) = None
    """Weights of the model: `hf://ORG/NAME`, `s3://`, `gs://`, `az://` with a prefix, or `pvc://CLAIM/FOLDER`, which is
    used in place. Default: `hf://` followed by the name.
    """
    revision: Annotated[str, StringConstraints(pattern=r"^[\w./-]+$", max_length=256)] | None = None
    """Commit, branch or tag of a hub repository."""
    secret_ref: ObjectName | None = None
    """Secret whose keys are environment variables of downloads: HF_TOKEN, AWS_ACCESS_KEY_ID and so on."""


class Engine(ApiModel):
    """The inference engine: vLLM or SGLang."""

    type: EngineType = EngineType.VLLM
    """Inference server in the image."""
    image: ShortText
    """Image with `vllm serve`, or with `python3 -m sglang.launch_server`."""
    version: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}(\.[0-9]{1,4})?$", max_length=16)]
    """Its version in that image, such as `0.32.0`. It determines which flags exist."""

    @property
    def release(self) -> Release:
        """Return the version, for comparisons."""
        return tuple(map(int, self.version.split(".")))

    @property
    def description(self) -> Description:
        """Return what this inference server understands and can do."""
        return DESCRIPTIONS[self.type]


ParallelDegree = Annotated[int, Field(ge=1, le=1024)]


class Parallelism(ApiModel):
    """How one server is distributed over accelerators."""

    tensor: ParallelDegree = 1
    """Accelerators over which each layer is split."""
    pipeline: ParallelDegree = 1
    """Stages over which the layers are distributed."""
    data: ParallelDegree = 1
    """Copies of the model behind one address (data parallelism)."""
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Pods of one server. More than one needs LeaderWorkerSet in the cluster."""

    @property
    def accelerators(self) -> int:
        """Return the accelerators of one server."""
        return self.tensor * self.pipeline * self.data


class Accelerator(ApiModel):
    """Accelerators of a server."""

    count: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Accelerators of one server: tensor × pipeline × data, which is also the default. 0 runs the engine on CPUs."""
    resource_name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=253)] = (
        "nvidia.com/gpu"
    )
    """Extended resource of the device plugin."""
    product: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=63)] | None
    ) = None
    """Selects nodes whose label RESOURCE.product has this value, such as `NVIDIA-H100-80GB-HBM3`."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as `nvidia`, if the device plugin needs one."""
    claim_template: ObjectName | None = None
    """ResourceClaimTemplate with all accelerators of one pod (dynamic resource allocation), instead of the resource."""


class ServerResources(ApiModel):
    """Resources of one pod's engine besides accelerators."""

    cpu: Quantity | None = None
    """Requested cores."""
    memory: Quantity | None = None
    """Requested memory and its limit, including shared memory."""
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm."""


class CacheAccess(StrEnum):
    """`ReadWriteMany`: pods on any node share the volume. `ReadWriteOnce`: pods on one node share it."""

    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE = "ReadWriteOnce"


class WeightCache(ApiModel):
    """A volume that all servers share. Weights are downloaded once, before accelerators are allocated."""

    claim_name: ObjectName | None = None
    """Name of an existing PersistentVolumeClaim."""
    size: Quantity | None = None
    """Size of a PersistentVolumeClaim to create. It is deleted with the server."""
    storage_class_name: ObjectName | None = None
    """Storage class of the created claim; the cluster's default when left out."""
    access_mode: CacheAccess = CacheAccess.READ_WRITE_MANY
    """How pods share the volume."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        exactly_one({"claimName": self.claim_name, "size": self.size})
        return self


class Lora(ApiModel):
    """LoRA adapters that the engine may load."""

    max_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Highest rank, one of the values that vLLM supports."""
    max_adapters: Annotated[int, Field(ge=1, le=1024)] = 1
    """Most adapters in one batch."""


class TransferMode(StrEnum):
    """`Pull`: each server fetches `policy.uri`. `Push`: the trainer sends the tensors."""

    PULL = "Pull"
    PUSH = "Push"


class Pull(ApiModel):
    """How servers fetch weights in mode Pull."""

    secret_ref: ObjectName | None = None
    """Secret whose keys are environment variables of the store, such as AWS_ACCESS_KEY_ID."""
    timeout_seconds: Seconds = 720
    """Time limit of one fetch."""


class Push(ApiModel):
    """How the trainer sends a policy in mode Push."""

    hook: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+(/[^\s]*)?$", max_length=2048)]
    """URL of the trainer. It is called when all servers are paused, returns the contents of the update, then sends it.
    """
    timeout_seconds: Seconds = 720
    """Time limit from the call of the hook until the last server has the weights."""
    backend: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=64)] = "nccl"
    """vLLM's weight transfer backend."""
    peers: LabelSelector | None = None
    """Label selector of the trainer's pods, which exchange tensors with the engines."""
    ports: Annotated[list[Annotated[int, Field(ge=1024, le=65_535)]], Field(max_length=64)] = []
    """Ports of the engines that are open to these peers. Empty: all except the pod's own three."""


class WeightTransfer(ApiModel):
    """How a new policy is transferred to the servers."""

    mode: TransferMode = TransferMode.PULL
    """Whether servers fetch the weights or the trainer sends them."""
    pull: Pull = Pull()
    """Settings of mode Pull."""
    push: Push | None = None
    """Settings of mode Push."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (self.mode is TransferMode.PUSH) != (self.push is not None):
            raise ValueError("push is needed for mode Push, and for no other mode")
        return self


class Policy(ApiModel):
    """The weights that servers should have."""

    version: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Version of the policy. It must grow with every change. 0 stands for the model's own weights."""
    uri: Annotated[str, StringConstraints(pattern=r"^(s3|gs|az|file)://[^\s]+$", max_length=2048)] | None = None
    """Folder of the weights in mode Pull, and of an adapter. In mode Push it is passed to the trainer."""
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$", max_length=71)] | None = None
    """SHA-256 of the folder's file SHA256SUMS, which lists all other files. Files are checked against SHA256SUMS even
    without this field.
    """
    min_ready: Annotated[int, Field(ge=1, le=256)] | None = None
    """Servers that must have the version before the gate opens again; half of the servers when left out."""


ADAPTER_NAME: Final = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
AdapterName = Annotated[str, StringConstraints(pattern=ADAPTER_NAME, max_length=63)]
MOST_ADAPTERS: Final = 16


class DisruptionBudget(ApiModel):
    """Limit on servers that node drains may evict at once."""

    max_unavailable: Annotated[int, Field(ge=0, le=256)] = 1
    """Most unavailable servers, or pods if a server spans several nodes. With 0, drains evict none."""


class EndpointPicker(ApiModel):
    """The Service of an endpoint picker, in the namespace of the servers."""

    name: ObjectName
    """Name of the Service."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 9002
    """Its port for Envoy's external processing."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"
    """What the Gateway does if the picker does not answer. `FailOpen`: it chooses a server itself. `FailClose`: it
    refuses the request.
    """


class InferencePool(ApiModel):
    """A pool of the servers for Gateways: `InferencePool` in version v1 of the Gateway API Inference Extension."""

    endpoint_picker: EndpointPicker
    """The program that chooses a server for each request of a Gateway."""


class ModelServerSpec(ApiModel):
    """The model to serve, and its resources."""

    model: ModelSource
    """The model to serve."""
    engine: Engine
    """The inference engine."""
    replicas: Annotated[int, Field(ge=0, le=256)] = 1
    """Number of servers."""
    parallelism: Parallelism = Parallelism()
    """How one server is distributed over accelerators."""
    accelerator: Accelerator = Accelerator()
    """Accelerators of a server."""
    resources: ServerResources = ServerResources()
    """Other resources of a server."""
    cache: WeightCache | None = None
    """Volume for weights. Left out, each pod downloads them itself."""
    sleep: bool = False
    """Allow the engine to release its accelerators' memory."""
    asleep: bool = False
    """Release the memory until this is false again, for a trainer on the same accelerators. Running calls wait.

    Needs `sleep`.
    """
    lora: Lora | None = None
    """LoRA adapters."""
    tool_call_parser: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)] | None = None
    """The engine's parser for the model's tool calls, such as `hermes`. Jobs whose agent calls tools need it."""
    extra_args: Annotated[list[ShortText], Field(max_length=64)] = []
    """Further arguments of the engine. Arguments that other fields determine are refused."""
    env: Annotated[list[EnvVar], Field(max_length=64), DISTINCT_VARIABLES] = []
    """Environment of the engine."""
    weight_transfer: WeightTransfer = WeightTransfer()
    """How a new policy is transferred to the servers."""
    policy: Policy = Policy()
    """The weights that servers should have."""
    adapters: Annotated[dict[AdapterName, Policy], Field(max_length=MOST_ADAPTERS)] = {}
    """LoRA adapters of the model, by name. Each is a separate policy with its own versions. Calls choose one by giving
    its name as model. Version 0 is the model without an adapter. They need `lora`, mode Pull, and `policy.version` 0.
    """
    clients: Annotated[list[NetworkPeer], Field(max_length=16)] = []
    """Further clients besides runners of the same namespace: peers as in a NetworkPolicy. Sandboxes can never connect.
    """
    inference_pool: InferencePool | None = None
    """Lets a Gateway forward requests of further clients to the servers. Runners do not use it."""
    pod_disruption_budget: DisruptionBudget | None = None
    """Protection from node drains; none when left out."""
    pod_template: dict[str, Any] | None = None
    """Merged into the pods that the operator builds, containers by name: `engine`, `gateway`."""

    @field_validator("extra_args")
    @classmethod
    def _no_owned_flag(cls, arguments: list[str], info: ValidationInfo) -> list[str]:
        engine = info.data.get("engine")
        owned = engine.description.owned_flags if isinstance(engine, Engine) else {}
        for argument in arguments:
            flag = argument.partition("=")[0].replace("_", "-")
            if flag in owned:
                raise ValueError(f"{argument} is refused: {owned[flag]}")
        return arguments

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        wanted, given = self.parallelism.accelerators, self.accelerator.count
        if given is not None and given not in (0, wanted):
            raise ValueError(
                f"accelerator.count is {given}, expected tensor × pipeline × data of parallelism = {wanted}; "
                "leave count out, or make the two equal"
            )
        if wanted % self.parallelism.nodes:
            raise ValueError(
                f"parallelism.nodes is {self.parallelism.nodes}, which does not divide tensor × pipeline × data = {wanted}"
            )
        if self.weight_transfer.mode is TransferMode.PULL and self.policy.version > 0 and self.policy.uri is None:
            raise ValueError("policy.uri is needed for mode Pull; only version 0, the model's own weights, needs none")
        if self.asleep and not self.sleep:
            raise ValueError("sleep is needed for asleep; set sleep: true")
        self._check_adapters()
        version, engine = self.engine.version, self.engine.description
        asked = (f"asleep {str(self.asleep).lower()}", f"weightTransfer.mode {self.weight_transfer.mode}")
        for choice in asked:
            if choice in engine.unsupported:
                raise ValueError(f"{choice} is refused: {engine.type} {engine.unsupported[choice]}")
        if self.engine.release < engine.oldest:
            raise ValueError(f"engine.version is {version}, expected {version_text(engine.oldest)} or newer")
        updates = self.policy.version > 0 or self.asleep or self.weight_transfer.mode is TransferMode.PUSH
        if updates and self.engine.release < engine.supports_updates:
            raise ValueError(
                f"engine.version is {version}; policy updates and asleep need {engine.type} "
                f"{version_text(engine.supports_updates)} or newer: use a newer image, or leave policy, asleep and "
                "weightTransfer out"
            )
        return self

    def _check_adapters(self) -> None:
        if not self.adapters:
            return
        if self.lora is None:
            raise ValueError("lora is needed for adapters; set lora.maxRank")
        if self.engine.type is EngineType.SGLANG and self.parallelism.data > 1:
            # srt/managers/tokenizer_control_mixin.py:672 (0.5.23)
            raise ValueError(
                "parallelism.data must be 1 with adapters: SGLang loads them only in one copy of the model"
            )
        if self.engine.type is EngineType.VLLM and self.accelerator.count == 0:
            # vllm/lora/ops/torch_ops/lora_ops.py (0.32) indexes with -1, which is the last adapter.
            raise ValueError("adapters need accelerators: on CPUs vLLM uses an adapter in calls that name none")
        if self.weight_transfer.mode is not TransferMode.PULL or self.policy.version > 0:
            raise ValueError(
                "adapters need weightTransfer.mode Pull and policy.version 0: they are changes to the model's own weights"
            )
        for name, adapter in self.adapters.items():
            if adapter.version > 0 and adapter.uri is None:
                raise ValueError(
                    f"adapters.{name}.uri is needed; only version 0, the model without an adapter, needs none"
                )
            if name == self.model.name:
                raise ValueError(f"adapters.{name} has the name of the model; choose another one")
        if self.lora.max_adapters <= len(self.adapters):
            raise ValueError(
                f"lora.maxAdapters is {self.lora.max_adapters}, expected {len(self.adapters) + 1} or more: one more than "
                "adapters, because an update runs two versions of one"
            )

    @property
    def weights_uri(self) -> str:
        """Return the URI of the model's weights."""
        return self.model.uri or f"hf://{self.model.name}"

    @property
    def min_ready(self) -> int:
        """Return how many servers must have a policy's version before the gate opens again."""
        return self.min_ready_of(self.policy)

    def min_ready_of(self, policy: Policy) -> int:
        """Return how many servers must have that version before calls use it."""
        return min(policy.min_ready or (self.replicas + 1) // 2, self.replicas)


class Gate(StrEnum):
    """`Open`: runners may call the servers. `Shut`: runners start no calls, and servers pause the running ones."""

    OPEN = "Open"
    SHUT = "Shut"


class PolicyStep(StrEnum):
    """Steps of a policy update, in this order: `Fetching`, `Pausing`, `Acknowledging`, `Loading`, `Resuming`.

    With `spec.asleep`, `Sleeping`, `Asleep` (all servers have released their memory) and `Waking` come before `Loading`.
    """

    FETCHING = "Fetching"
    PAUSING = "Pausing"
    ACKNOWLEDGING = "Acknowledging"
    SLEEPING = "Sleeping"
    ASLEEP = "Asleep"
    WAKING = "Waking"
    LOADING = "Loading"
    RESUMING = "Resuming"


class PolicySource(ApiModel):
    """Where the weights of one version are: a copy of part of `spec.policy`, which may name a newer version by now."""

    version: Annotated[int, Field(ge=0)]
    """Version."""
    uri: Annotated[str, StringConstraints(max_length=2048)] | None = None
    """As in the spec."""
    digest: Annotated[str, StringConstraints(max_length=71)] | None = None
    """As in the spec."""


class PolicyStatus(ApiModel):
    """The current policy update, or the last one."""

    current: Annotated[int, Field(ge=0)] = 0
    """Version that ready servers serve."""
    target: Annotated[int, Field(ge=0)] = 0
    """Version that the update loads; equal to `current` if there is no update."""
    gate: Gate = Gate.OPEN
    """`Shut`: runners start no calls, and servers pause the running ones."""
    update: Annotated[int, Field(ge=0)] = 0
    """Number of the update, which runners acknowledge."""
    paused: bool = False
    """All servers are paused. A stream that is silent from now on has delivered all its tokens of version `current`."""
    mixed: Annotated[list[Annotated[str, StringConstraints(max_length=128)]], Field(max_length=1024)] = []
    """Runners (`<job uid>/<index>`) that did not acknowledge in time. For tokens of their running calls the version is
    unknown.
    """
    step: PolicyStep | None = None
    """The current step; None if there is no update."""
    since: Timestamp | None = None
    """When this step began, RFC 3339."""
    needed: Annotated[int, Field(ge=0)] = 0
    """Servers that must have `target` before the gate opens."""
    failed: Annotated[int, Field(ge=0)] | None = None
    """Version that too few servers could load. It is not retried."""
    failed_because: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Why servers could not load that version."""
    sources: Annotated[list[PolicySource], Field(max_length=2)] = []
    """Sources of the weights of `current` and `target`."""


class AdapterStatus(ApiModel):
    """One LoRA adapter."""

    current: Annotated[int, Field(ge=0)] = 0
    """Version that new calls get."""
    failed: Annotated[int, Field(ge=0)] | None = None
    """Version that too few servers could load. It is not retried."""
    failed_because: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Why servers could not load that version."""
    source: PolicySource | None = None
    """Source of `current`; None for version 0."""


class ServerState(StrEnum):
    """`Starting`: no response yet. `PendingWeights`: lacks the current policy. `Ready`: accepts calls.

    `Evicted`: it failed to load the policy and takes no calls.
    """

    STARTING = "Starting"
    PENDING_WEIGHTS = "PendingWeights"
    READY = "Ready"
    EVICTED = "Evicted"


class ServerStatus(ApiModel):
    """One server."""

    name: Annotated[str, StringConstraints(max_length=253)]
    """Name of its pod."""
    url: Annotated[str, StringConstraints(max_length=2048)]
    """URL for runners."""
    uid: Annotated[str, StringConstraints(max_length=64)] = ""
    """Uid of its pod. A pod with another uid is another server."""
    policy_version: Annotated[int, Field(ge=0)] | None = None
    """Version that it was last verified to serve; None if it has not been ready since it started."""
    ready: bool = False
    """Verified to serve `policy.current`. Runners call no other server."""
    state: ServerState = ServerState.STARTING
    """State of the server."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts of its engine when it was verified. A restarted engine has lost its weights."""
    weights_digest: Annotated[str, StringConstraints(max_length=64)] | None = None
    """SHA-256 over the engine's own checksums of its weights; None if the engine provides none."""
    adapters: Annotated[dict[AdapterName, int], Field(max_length=MOST_ADAPTERS)] = {}
    """Adapters whose current version it has loaded, with that version."""


class ModelServerStatus(ApiModel):
    """Observed state of a ModelServer."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = []
    """Ready, and the conditions that lead to it."""
    url: Annotated[str, StringConstraints(max_length=2048)] | None = None
    """Service in front of all servers, for clients that do not select one."""
    servers: Annotated[list[ServerStatus], Field(max_length=256)] = []
    """The servers, by name."""
    policy: PolicyStatus = PolicyStatus()
    """Policy version, and the gate that runners watch."""
    adapters: Annotated[dict[AdapterName, AdapterStatus], Field(max_length=MOST_ADAPTERS)] = {}
    """The LoRA adapters by name."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Number of pods, for the scale subresource."""
    selector: Annotated[str, StringConstraints(max_length=1024)] = ""
    """Label selector of the pods, for the scale subresource."""


class ModelServer(ApiModel):
    """An inference engine that a cluster runs for its jobs."""

    api_version: Literal["rollout.dev/v1alpha1"] = API_VERSION
    kind: Literal["ModelServer"] = "ModelServer"
    metadata: Metadata
    spec: ModelServerSpec
    """Desired state."""
    status: ModelServerStatus | None = None
    """Observed state."""
