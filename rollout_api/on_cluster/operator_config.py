"""The operator's configuration: one YAML file, written by the chart."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rollout_api.base import ApiModel, Namespace, ObjectName, Quantity, ShortText
from rollout_api.model import ModelSpec
from rollout_api.storage import Storage

Port = Annotated[int, Field(ge=1, le=65_535)]
Rate = Annotated[float, Field(gt=0, le=10_000)]


class Images(ApiModel):
    """Images of agent-rollouts that pods use."""

    runtime: ShortText
    """Image of runner pods whose job sets no `runners.image`."""
    executor: ShortText
    """Image of the executor's bundle. Sandbox pods mount it as an image volume, or copy it in an init container."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy of both images. The images of tasks always have IfNotPresent."""


class Defaults(ApiModel):
    """Values that replace fields of a job that work only on a laptop."""

    output: Storage | None = None
    """Destination of results if `output.uri` is a local folder. The job's name and uid are appended to the path."""
    model: ModelSpec | None = None
    """Model to use if `model` points to localhost or takes its key from the environment."""


class RunnerDefaults(ApiModel):
    """Defaults of runner pods."""

    cpu: Quantity = "250m"
    memory: Quantity = "256Mi"
    """Requests of `cpu` and `memory`, to which the operator adds an amount for the concurrency."""
    service_account_annotations: dict[str, str] = {}
    """Annotations of the ServiceAccount that the operator creates for a job, as workload identity needs them."""


class DnsServer(ApiModel):
    """A DNS server for sandboxes that may connect to host names."""

    peer: dict[str, Any]
    """A peer of a NetworkPolicy."""
    port: Port = 53
    """Port of the pods behind the DNS service, UDP and TCP."""


KUBE_DNS = DnsServer(
    peer={
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
)
"""CoreDNS and kube-dns have this label, except on OpenShift."""


class Watch(ApiModel):
    """Scope of the operator."""

    namespaces: Annotated[list[Namespace], Field(max_length=256)] = []
    """Namespaces to watch; all when empty."""


class Budgets(ApiModel):
    """Rate limits of the operator's writes. Creates and deletes have separate budgets, so that a full cluster can shrink."""

    creates_per_second: Rate = 50
    deletes_per_second: Rate = 50
    writes_in_flight: Annotated[int, Field(ge=1, le=1000)] = 16
    """Most concurrent creates, and separately most concurrent deletes."""


class LeaseSettings(ApiModel):
    """Leader election among replicas. The defaults of the three times are those of Kubernetes' own controllers."""

    namespace: Namespace
    name: ObjectName = "rollout-operator"
    duration_seconds: Annotated[int, Field(ge=7, le=600)] = 15
    """Time without a renewal after which another replica may take the lease."""
    renew_deadline_seconds: Annotated[int, Field(ge=2, le=599)] = 10
    """Time without a renewal after which the holder stops writing."""
    retry_seconds: Annotated[float, Field(gt=0, le=60)] = 2
    """Interval between attempts to acquire or renew the lease."""


class Admission(ApiModel):
    """The validating admission webhook."""

    port: Port = 9443
    certificates: Path
    """Folder with `tls.crt`, `tls.key` and `ca.crt`. Changed files are read again."""


class OperatorConfig(ApiModel):
    """The operator's configuration."""

    images: Images
    lease: LeaseSettings
    defaults: Defaults = Defaults()
    runner: RunnerDefaults = RunnerDefaults()
    dns: Annotated[list[DnsServer], Field(min_length=1, max_length=16)] = [KUBE_DNS]
    privileged_namespaces: Annotated[list[Namespace], Field(max_length=256)] = []
    """Namespaces in which `security: Privileged` is allowed."""
    watch: Watch = Watch()
    admission: Admission | None = None
    """Settings of the webhook; without them the operator serves none."""
    budgets: Budgets = Budgets()
    workers: Annotated[int, Field(ge=1, le=256)] = 16
    """Objects of one kind that are reconciled concurrently."""
    resync_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    """Interval at which every object is reconciled even if nothing changes."""
    metrics_port: Port = 8080
    health_port: Port = 8081
