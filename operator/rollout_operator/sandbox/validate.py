"""What makes a Sandbox invalid: found before anything is made for it, told by field. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rollout_api.manifest import explain, path_of
from rollout_api.sandbox import SandboxSpec, Security
from rollout_operator.sandbox import network, template


@dataclass(frozen=True)
class Job:
    """The RolloutJob that a Sandbox belongs to, as far as it matters here."""

    name: str
    uid: str
    pod_template: Mapping[str, Any]
    security: Security


def parse_spec(spec: Mapping[str, Any]) -> SandboxSpec | list[str]:
    """The spec, or what is wrong with it: what the API server's schema cannot check."""
    try:
        return SandboxSpec.model_validate(spec)
    except ValidationError as error:
        found = explain(error, SandboxSpec, dict(spec))
        return [f"{path_of(('spec', *location))}: {words}" for location, words in found]


def pod_template(spec: SandboxSpec, job: Job | None) -> Mapping[str, Any]:
    """The template that counts, without nulls: the job's, or that of a Sandbox made by hand."""
    cleaned: Mapping[str, Any] = template.without_nulls(job.pod_template if job else spec.pod_template or {})
    return cleaned


def problems(spec: SandboxSpec, job: Job | None, namespace: str, privileged_namespaces: Sequence[str]) -> list[str]:
    """Everything that is wrong; empty when a pod can be made."""
    found = []
    if not spec.image:
        found.append("spec.image: is missing; name the container image of the task's root file system")
    found += network.problems(spec.network)
    if job is None:
        where, security, security_field = "spec.podTemplate", spec.security, "spec.security"
    else:
        found += _lent_by_job(spec, job)
        where = f"RolloutJob {job.name} spec.sandbox.podTemplate"
        security, security_field = job.security, f"RolloutJob {job.name} spec.security"
    merged = pod_template(spec, job)
    if security == Security.PRIVILEGED:
        if namespace not in privileged_namespaces:
            listed = ", ".join(privileged_namespaces) or "none is listed"
            found.append(
                f"{security_field}: Privileged is not allowed in namespace {namespace}; "
                f"the chart's privilegedNamespaces say where it is ({listed})"
            )
        return found + template.well_formed(merged, where)
    refused = template.refusals(merged, where)
    if refused:
        refused.append(f"({security_field}: Privileged allows it, in a namespace of the chart's privilegedNamespaces)")
    return found + refused


def _lent_by_job(spec: SandboxSpec, job: Job) -> list[str]:
    """A runner asks for Sandboxes; what rights they have is said by the job's author alone."""
    says = f"a Sandbox of a job takes it from RolloutJob {job.name}; remove it"
    given = {
        "podTemplate": spec.pod_template is not None,
        "clients": spec.clients is not None,
        "security": spec.security != Security.STANDARD,
    }
    return [f"spec.{field}: {says}" for field, is_given in given.items() if is_given]
