"""Problems of a Sandbox, by field, found before any object is created for it. No side effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rollout_api.cluster import (
    JOB_LABEL,
    JOB_UID_LABEL,
    POOL_LABEL,
    POOL_UID_LABEL,
    ROLE_LABEL,
    RUNNER_ROLE,
    pool_secret_name,
    runner_name,
)
from rollout_api.manifest import explain
from rollout_api.on_cluster import template
from rollout_api.on_cluster.resolve import storage_problems
from rollout_api.sandbox import SandboxSpec, Security
from rollout_operator.sandbox import network


@dataclass(frozen=True)
class Owner:
    """The RolloutJob or SandboxPool of a Sandbox, as far as the Sandbox needs it."""

    kind: str
    name: str
    uid: str
    pod_template: Mapping[str, Any]
    security: Security
    executor_image: str | None = None
    """The executor's image of its sandboxes; None for that of the operator's configuration."""

    @property
    def is_pool(self) -> bool:
        return self.kind == "SandboxPool"

    @property
    def secret_name(self) -> str:
        """Name of the Secret with the key of its sandboxes."""
        return pool_secret_name(self.name) if self.is_pool else runner_name(self.name)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its pods and NetworkPolicies."""
        if self.is_pool:
            return {POOL_LABEL: self.name, POOL_UID_LABEL: self.uid}
        return {JOB_LABEL: self.name, JOB_UID_LABEL: self.uid}

    @property
    def pods(self) -> dict[str, str]:
        """Label selector of its pods."""
        return {POOL_UID_LABEL: self.uid} if self.is_pool else {JOB_UID_LABEL: self.uid}

    @property
    def clients(self) -> dict[str, str]:
        """Label selector of the runners that may connect: its own, or all of the namespace."""
        return {ROLE_LABEL: RUNNER_ROLE} if self.is_pool else {**self.pods, ROLE_LABEL: RUNNER_ROLE}


def parse_spec(spec: Mapping[str, Any]) -> SandboxSpec | list[str]:
    """Return the spec, or the problems that the API server's schema cannot detect."""
    try:
        return SandboxSpec.model_validate(spec)
    except ValidationError as error:
        return [*map(str, explain(error, SandboxSpec, dict(spec), within=("spec",)))]


def pod_template(spec: SandboxSpec, owner: Owner | None) -> Mapping[str, Any]:
    """Return the template that applies, without nulls: its owner's, or the Sandbox's own if it has none."""
    cleaned: Mapping[str, Any] = template.without_nulls(owner.pod_template if owner else spec.pod_template or {})
    return cleaned


def problems(spec: SandboxSpec, owner: Owner | None, namespace: str, privileged_namespaces: Sequence[str]) -> list[str]:
    """Return all problems; empty if a pod can be created."""
    found = []
    if not spec.image:
        found.append("spec.image: is missing; name the container image of the task's root file system")
    found += network.problems(spec.network)
    if spec.parking is not None:
        found += map(str, storage_problems("spec.parking.uri", spec.parking.uri, ""))
    if owner is None:
        where, security, security_field = "spec.podTemplate", spec.security, "spec.security"
    else:
        found += _fields_of_owner(spec, owner)
        where = f"{owner.kind} {owner.name} spec.sandbox.podTemplate"
        security_field = f"{owner.kind} {owner.name} spec.{'sandbox.' if owner.is_pool else ''}security"
        security = owner.security
    merged = pod_template(spec, owner)
    if security == Security.PRIVILEGED:
        if namespace not in privileged_namespaces:
            listed = ", ".join(privileged_namespaces) or "none is listed"
            found.append(
                f"{security_field}: Privileged is not allowed in namespace {namespace}, "
                f"only in the chart's privilegedNamespaces ({listed})"
            )
        return [*found, *map(str, template.merge_problems(merged, where))]
    refused = [*map(str, template.refusals(merged, where))]
    if refused:
        refused.append(f"({security_field}: Privileged allows it, in a namespace of the chart's privilegedNamespaces)")
    return found + refused


def _fields_of_owner(spec: SandboxSpec, owner: Owner) -> list[str]:
    """Return problems of fields that only the owner may set. Runners create Sandboxes; the job's author grants rights."""
    problem = f"a Sandbox takes it from its {owner.kind} {owner.name}; remove it"
    given = {
        "podTemplate": spec.pod_template is not None,
        "clients": spec.clients is not None,
        "security": spec.security != Security.STANDARD,
    }
    found = [f"spec.{field}: {problem}" for field, is_given in given.items() if is_given]
    if spec.parking is not None:
        found.append(f"spec.parking: a Sandbox of {owner.kind} {owner.name} cannot be parked; remove it")
    return found
