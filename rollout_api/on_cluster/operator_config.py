"""The operator's configuration: one YAML file, written by the chart."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rollout_api.base import ApiModel, Namespace, ObjectName, Quantity, ShortText
from rollout_api.model import ModelSpec
from rollout_api.rollout_job import Output

Port = Annotated[int, Field(ge=1, le=65_535)]
Rate = Annotated[float, Field(gt=0, le=10_000)]


class Images(ApiModel):
    """Images of this product that pods use."""

    runtime: ShortText
    """Of runner pods, unless a job brings its own."""
    executor: ShortText
    """Of the executor's bundle: an image volume of every sandbox pod, or its init container."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """For both; the images of tasks are always IfNotPresent."""


class Defaults(ApiModel):
    """What fills in for a job that was written for a laptop."""

    output: Output | None = None
    """Where results go when `output.uri` is a local folder; the job's own name is the last part of the path."""
    model: ModelSpec | None = None
    """What answers when `model` points to localhost or takes its key from the environment."""


class RunnerDefaults(ApiModel):
    """What runner pods get unless their job says otherwise."""

    cpu: Quantity = "250m"
    memory: Quantity = "256Mi"
    """Requests, before what the concurrency adds."""
    service_account_annotations: dict[str, str] = {}
    """Of the ServiceAccount that the operator creates for a job, as workload identity wants them."""


class DnsServer(ApiModel):
    """Where sandboxes that may reach names look them up."""

    peer: dict[str, Any]
    """A peer of a NetworkPolicy."""
    port: Port = 53
    """Of the pods behind the DNS service, UDP and TCP."""


KUBE_DNS = DnsServer(
    peer={
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
)
"""CoreDNS and kube-dns alike have this label, but not on OpenShift."""


class Watch(ApiModel):
    """Where the operator looks."""

    namespaces: Annotated[list[Namespace], Field(max_length=256)] = []
    """Only these; all when empty."""


class Budgets(ApiModel):
    """How fast the operator writes. Creates and deletes have separate budgets: a full cluster must be able to shrink."""

    creates_per_second: Rate = 50
    deletes_per_second: Rate = 50
    writes_in_flight: Annotated[int, Field(ge=1, le=1000)] = 16
    """Creates that wait for the API server at once; deletes have as many for themselves."""


class LeaseSettings(ApiModel):
    """Who works, when several replicas run. Defaults of the three times are those of Kubernetes' own controllers."""

    namespace: Namespace
    name: ObjectName = "rollout-operator"
    duration_seconds: Annotated[int, Field(ge=7, le=600)] = 15
    """Others may take over when the holder has not renewed for so long."""
    renew_deadline_seconds: Annotated[int, Field(ge=2, le=599)] = 10
    """A holder that could not renew for so long stops writing."""
    retry_seconds: Annotated[float, Field(gt=0, le=60)] = 2
    """Between two looks at the lease."""


class Admission(ApiModel):
    """Where the API server asks whether an object may be created or changed."""

    port: Port = 9443
    certificates: Path
    """Folder with `tls.crt`, `tls.key` and `ca.crt`. They are read again when they change."""


class OperatorConfig(ApiModel):
    """The operator's configuration."""

    images: Images
    lease: LeaseSettings
    defaults: Defaults = Defaults()
    runner: RunnerDefaults = RunnerDefaults()
    dns: Annotated[list[DnsServer], Field(min_length=1, max_length=16)] = [KUBE_DNS]
    privileged_namespaces: Annotated[list[Namespace], Field(max_length=256)] = []
    """Where `security: Privileged` may be asked for."""
    watch: Watch = Watch()
    admission: Admission | None = None
    """None: the operator serves no webhook."""
    budgets: Budgets = Budgets()
    workers: Annotated[int, Field(ge=1, le=256)] = 16
    """Objects of one kind that are worked on at once."""
    resync_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    """Every object is looked at again so often, even if nothing seems to happen."""
    metrics_port: Port = 8080
    health_port: Port = 8081
