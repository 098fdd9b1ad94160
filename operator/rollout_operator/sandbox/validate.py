"""Problems of a Sandbox, by field, found before any object is created for it. No side effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rollout_api.manifest import explain, path_of
from rollout_api.on_cluster import template
from rollout_api.sandbox import SandboxSpec, Security
from rollout_operator.sandbox import network


@dataclass(frozen=True)
class Job:
    """The RolloutJob of a Sandbox, as far as the Sandbox needs it."""

    name: str
    uid: str
    pod_template: Mapping[str, Any]
    security: Security
    executor_image: str | None = None
    """The executor's image of its sandboxes; None for that of the operator's configuration."""


def parse_spec(spec: Mapping[str, Any]) -> SandboxSpec | list[str]:
    """Return the spec, or the problems that the API server's schema cannot detect."""
    try:
        return SandboxSpec.model_validate(spec)
    except ValidationError as error:
        found = explain(error, SandboxSpec, dict(spec))
        return [f"{path_of(('spec', *location))}: {words}" for location, words in found]


def pod_template(spec: SandboxSpec, job: Job | None) -> Mapping[str, Any]:
    """Return the template that applies, without nulls: the job's, or the Sandbox's own if it has no job."""
    cleaned: Mapping[str, Any] = template.without_nulls(job.pod_template if job else spec.pod_template or {})
    return cleaned


def problems(spec: SandboxSpec, job: Job | None, namespace: str, privileged_namespaces: Sequence[str]) -> list[str]:
    """Return all problems; empty if a pod can be created."""
    found = []
    if not spec.image:
        found.append("spec.image: is missing; name the container image of the task's root file system")
    found += network.problems(spec.network)
    if job is None:
        where, security, security_field = "spec.podTemplate", spec.security, "spec.security"
    else:
        found += _fields_of_job(spec, job)
        where = f"RolloutJob {job.name} spec.sandbox.podTemplate"
        security, security_field = job.security, f"RolloutJob {job.name} spec.security"
    merged = pod_template(spec, job)
    if security == Security.PRIVILEGED:
        if namespace not in privileged_namespaces:
            listed = ", ".join(privileged_namespaces) or "none is listed"
            found.append(
                f"{security_field}: Privileged is not allowed in namespace {namespace}, "
                f"only in the chart's privilegedNamespaces ({listed})"
            )
        return found + template.merge_problems(merged, where)
    refused = template.refusals(merged, where)
    if refused:
        refused.append(f"({security_field}: Privileged allows it, in a namespace of the chart's privilegedNamespaces)")
    return found + refused


def _fields_of_job(spec: SandboxSpec, job: Job) -> list[str]:
    """Return problems of fields that only the job may set. Runners create Sandboxes, but the job's author grants rights."""
    problem = f"a Sandbox of a job takes it from RolloutJob {job.name}; remove it"
    given = {
        "podTemplate": spec.pod_template is not None,
        "clients": spec.clients is not None,
        "security": spec.security != Security.STANDARD,
    }
    return [f"spec.{field}: {problem}" for field, is_given in given.items() if is_given]
