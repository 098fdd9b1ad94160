"""Problems of a SandboxPool, by field, found before any object is created for it. No side effects."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rollout_api.base import quantity_value
from rollout_api.manifest import explain
from rollout_api.on_cluster.operator_config import OperatorConfig
from rollout_api.sandbox_pool import SandboxPoolSpec, pooled_sandbox
from rollout_operator.sandbox.validate import Owner
from rollout_operator.sandbox.validate import problems as sandbox_problems


def checked(
    spec: Mapping[str, Any], metadata: Mapping[str, Any], config: OperatorConfig
) -> SandboxPoolSpec | list[str]:
    """Return the spec, or all problems that the API server's schema cannot detect."""
    try:
        parsed = SandboxPoolSpec.model_validate(spec)
    except ValidationError as error:
        return [*map(str, explain(error, SandboxPoolSpec, dict(spec), within=("spec",)))]
    return _problems(parsed, metadata, config) or parsed


def _problems(parsed: SandboxPoolSpec, metadata: Mapping[str, Any], config: OperatorConfig) -> list[str]:
    name, namespace = metadata.get("name", ""), metadata.get("namespace", "")
    pool = parsed.sandbox
    owner = Owner("SandboxPool", name, metadata.get("uid", ""), pool.pod_template or {}, pool.security)
    found = sandbox_problems(pooled_sandbox(pool), owner, namespace, config.privileged_namespaces)
    if parsed.recycle.age_seconds >= pool.lifetime_seconds:
        found.append(
            f"spec.recycle.ageSeconds: {parsed.recycle.age_seconds} is not below spec.sandbox.lifetimeSeconds "
            f"({pool.lifetime_seconds}), at which workspaces are lost; lower it, or raise the lifetime"
        )
    if pool.resources.disk is not None and parsed.recycle.disk is not None:
        most = quantity_value(pool.resources.disk) * pool.per_sandbox
        if quantity_value(parsed.recycle.disk) > most:
            found.append(
                f"spec.recycle.disk: {parsed.recycle.disk} is more than all workspaces of a sandbox may write "
                f"({pool.per_sandbox} × {pool.resources.disk}); lower it"
            )
    return found
