"""Problems of a ModelServer that the API server's schema does not detect, by field. No side effects."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from rollout_api.base import quantity_value
from rollout_api.manifest import Problem, explain, validate
from rollout_api.model_server import NAME_RULE, RESERVED_SUFFIXES, ModelServer, TransferMode
from rollout_api.nesting import too_deep
from rollout_api.on_cluster import template
from rollout_api.on_cluster.objects import EXCESS, Manifest

GROUP_NAME_CHARACTERS: Final = 39
"""Longest name of a LeaderWorkerSet. The names of its pods, revisions and labels derive from it."""

PRIVILEGED_FIELDS: Final = frozenset(
    (
        *("hostNetwork", "hostPID", "hostIPC", "hostUsers", "hostPath", "hostPort", "privileged", "procMount"),
        "hostProcess",
        *("allowPrivilegeEscalation", "capabilities", "sysctls", "seLinuxOptions", "appArmorProfile", "seccompProfile"),
    )
)
"""Pod fields that grant rights beyond the namespace, on the node or its kernel."""
NETWORK_HANDLERS: Final = frozenset(("httpGet", "tcpSocket"))
"""Probe and lifecycle handlers that send requests. With the field `host`, the kubelet sends them from the node to any
address, such as the node's loopback.
"""


class Parsed(NamedTuple):
    """The result of `parse`: a ModelServer and its problems."""

    server: ModelServer | None
    """None if a field is malformed."""
    problems: tuple[Problem, ...] = ()


def parse(manifest: Manifest, privileged_namespaces: Sequence[str]) -> Parsed:
    """Parse a ModelServer's manifest and collect its problems. Invalid fields are problems, not exceptions."""
    why = manifest.get(EXCESS)
    if why and (not manifest["spec"] or too_deep(manifest["spec"])):
        return Parsed(None, (Problem("spec", why),))
    try:
        server = validate(
            ModelServer, {field: value for field, value in manifest.items() if field not in ("status", EXCESS)}
        )
    except ValidationError as error:
        return Parsed(None, explain(error, ModelServer, dict(manifest)))
    excess = [Problem("spec", why)] if why else []
    return Parsed(server, (*excess, *problems_of(server, privileged_namespaces)))


def problems_of(server: ModelServer, privileged_namespaces: Sequence[str]) -> Iterator[Problem]:
    """Return the problems of a ModelServer whose fields are each well-formed."""
    spec = server.spec
    name = server.metadata.name
    if not name[0].isalpha() or name.endswith(RESERVED_SUFFIXES):
        yield Problem("metadata.name", f"is {name!r}; it {NAME_RULE}")
    if spec.parallelism.nodes > 1:
        yield from _group_problems(server)
    memory, shared = spec.resources.memory, spec.resources.shared_memory
    if memory is not None and quantity_value(memory) <= quantity_value(shared):
        message = (
            f"is {memory}, which must include sharedMemory ({shared}) and more; "
            "raise it, or lower resources.sharedMemory"
        )
        yield Problem("spec.resources.memory", message)
    pod_template = template.without_nulls(spec.pod_template or {})
    yield from template.merge_problems(pod_template, "spec.podTemplate")
    if server.metadata.namespace not in privileged_namespaces:
        annotations = _mapping(_mapping(pod_template.get("metadata")).get("annotations"))
        yield from template.refused_keys(annotations, "spec.podTemplate.metadata.annotations", template.NODE_KEYS)
        for path in _privileged_paths(pod_template, "spec.podTemplate"):
            message = (
                "is refused: it grants rights on the node; leave it out, or have the namespace added to the chart's "
                "`privilegedNamespaces`"
            )
            yield Problem(path, message)


def _group_problems(server: ModelServer) -> Iterator[Problem]:
    spec, name = server.spec, server.metadata.name
    if len(name) > GROUP_NAME_CHARACTERS:
        message = (
            f"has {len(name)} characters; with parallelism.nodes above 1 at most {GROUP_NAME_CHARACTERS} fit into "
            "the names that a LeaderWorkerSet makes"
        )
        yield Problem("metadata.name", message)
    shared = spec.cache is not None or spec.weights_uri.startswith("pvc://")
    if spec.weight_transfer.mode is TransferMode.PULL and spec.policy.version > 0 and not shared:
        message = "is missing: all nodes of a server read a fetched policy from one volume; set cache, or use mode Push"
        yield Problem("spec.cache", message)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _privileged_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in PRIVILEGED_FIELDS:
                yield f"{path}.{key}"
            elif key in NETWORK_HANDLERS and "host" in _mapping(inner):
                yield f"{path}.{key}.host"
            else:
                yield from _privileged_paths(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _privileged_paths(inner, f"{path}[{index}]")
