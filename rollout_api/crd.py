"""The CustomResourceDefinitions, generated from the models: `python -m rollout_api.crd` writes them into `crds/`.

An API server accepts only structural schemas: no references, a type on every node, no unions of types. This module
converts pydantic's schemas into structural ones. Constraints that JSON schema cannot express, such as "exactly one of"
and "cannot be changed", become CEL rules.

Two kinds of fields stay untyped because they are unions: the entries of `network` and the `arguments` of a scripted tool
call. Their bounds are kept. The runner checks the rest when it loads the job.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rollout_api.base import API_GROUP, API_VERSION
from rollout_api.inference.description import Description, Release, version_text
from rollout_api.inference.engines import DESCRIPTIONS
from rollout_api.json_schema import json_schema
from rollout_api.model import MODEL_SOURCES
from rollout_api.model_server import ADAPTER_NAME, NAME_RULE, RESERVED_SUFFIXES, ModelServer
from rollout_api.rollout_job import (
    MUTABLE_FIELDS,
    PROGRAM_AGENTS,
    TOOL_CALLING_AGENTS,
    RolloutJob,
    RolloutJobSpec,
    RolloutShard,
)
from rollout_api.sandbox import Sandbox, SandboxSpec
from rollout_api.sandbox_pool import SandboxPool
from rollout_api.tasks import TASK_SOURCES

Schema = dict[str, Any]

FOLDER = Path(__file__).parent.parent / "crds"


def _exactly_one(*names: str) -> Schema:
    given = ", ".join(f"has(self.{name})" for name in names)
    return {
        "rule": f"[{given}].filter(given, given).size() == 1",
        "message": f"exactly one of {', '.join(names)} is needed",
    }


def _immutable_but(model: type[BaseModel], *mutable: str, what: str) -> list[Schema]:
    """Return one rule for each field except those named, so that the message can name the changed field."""
    fields = [info.alias or name for name, info in model.model_fields.items()]
    return [_immutable(field, f"delete the {what} and create another") for field in fields if field not in mutable]


def _immutable(field: str, remedy: str) -> Schema:
    return {"rule": _unchanged(field), "message": f"cannot be changed; {remedy}", "fieldPath": f".{field}"}


def _unchanged(field: str) -> str:
    return f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"


def _at_least(release: Release) -> str:
    """Return a CEL expression that compares an engine's version with the first one that has a feature."""
    parts = "self.engine.version.split('.')"
    major, minor = f"int({parts}[0])", f"int({parts}[1])"
    last = f"{minor} >= {release[1]}"
    if len(release) > 2:
        patch = f"{parts}.size() > 2 && int({parts}[2]) >= {release[2]}"
        last = f"({minor} > {release[1]} || {minor} == {release[1]} && {patch})"
    return f"({major} > {release[0]} || {major} == {release[0]} && {last})"


def _engine_rules(described: Description) -> Iterator[Schema]:
    """Yield the rules for ModelServers with this inference server."""
    other = f"self.engine.type != '{described.type}' || "
    oldest, updates = described.oldest, described.supports_updates
    too_old = f"engine.version is too old, expected {version_text(oldest)} or newer"
    yield {"rule": other + _at_least(oldest), "message": too_old}
    if updates != oldest:
        needless = "self.policy.version == 0 && !self.asleep && self.weightTransfer.mode == 'Pull'"
        yield {
            "rule": f"{other}{needless} || {_at_least(updates)}",
            "message": f"policy updates and asleep need engine.version {version_text(updates)} or newer",
        }
    owned = "|".join(sorted(flag.replace("-", "[-_]") for flag in described.owned_flags))
    yield {
        "rule": f"{other}!self.extraArgs.exists(argument, argument.matches('^({owned})(=.*)?$'))",
        "message": "extraArgs has a flag that another field or the operator sets; remove it",
        "fieldPath": ".extraArgs",
    }
    for choice, why in described.unsupported.items():
        field, value = choice.split(" ")
        literal = value if value == "true" else f"'{value}'"
        yield {"rule": f"{other}self.{field} != {literal}", "message": f"{choice} is refused: {described.type} {why}"}


def _adapter_rules() -> Iterator[Schema]:
    """Yield the rules for the field `adapters`."""
    each = "self.adapters.all(name, "
    for rule, message in (
        (f"{each}name.matches('{ADAPTER_NAME}'))", f"each name must match {ADAPTER_NAME}"),
        ("has(self.lora)", "lora is needed for adapters; set lora.maxRank"),
        (
            "self.engine.type != 'SGLang' || self.parallelism.data == 1",
            "parallelism.data must be 1 with adapters: SGLang loads them only in one copy of the model",
        ),
        (
            "self.engine.type != 'vLLM' || !has(self.accelerator.count) || self.accelerator.count > 0",
            "adapters need accelerators: on CPUs vLLM uses an adapter in calls that name none",
        ),
        (
            "self.weightTransfer.mode == 'Pull' && self.policy.version == 0",
            "adapters need weightTransfer.mode Pull and policy.version 0: they are changes to the model's own weights",
        ),
        (
            f"{each}self.adapters[name].version == 0 || has(self.adapters[name].uri))",
            "each adapter needs uri; only version 0, the model without an adapter, needs none",
        ),
        (f"{each}name != self.model.name)", "an adapter has the name of the model; choose another one"),
        (
            "!has(self.lora) || self.lora.maxAdapters > self.adapters.size()",
            "lora.maxAdapters must be one more than adapters, because an update runs two versions of one",
        ),
        (
            f"{each}!(name in oldSelf.adapters) || self.adapters[name] == oldSelf.adapters[name] || "
            "self.adapters[name].version > oldSelf.adapters[name].version)",
            "an adapter's version must grow with every change: versions identify sampled tokens",
        ),
    ):
        yield {"rule": f"self.adapters.size() == 0 || {rule}", "message": message, "fieldPath": ".adapters"}


_ACCELERATORS = "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data"

_MODEL_SERVER_RULES: list[Schema] = [
    {
        "rule": f"!has(self.accelerator.count) || self.accelerator.count in [0, {_ACCELERATORS}]",
        "message": "accelerator.count must equal tensor × pipeline × data of parallelism, or 0; leave it out",
    },
    {
        "rule": f"({_ACCELERATORS}) % self.parallelism.nodes == 0",
        "message": "parallelism.nodes does not divide tensor × pipeline × data",
    },
    {
        "rule": "self.weightTransfer.mode != 'Pull' || self.policy.version == 0 || has(self.policy.uri)",
        "message": "policy.uri is needed for mode Pull; only version 0, the model's own weights, needs none",
    },
    *_adapter_rules(),
    *(rule for described in DESCRIPTIONS.values() for rule in _engine_rules(described)),
    {"rule": "!self.asleep || self.sleep", "message": "sleep is needed for asleep; set sleep: true"},
    {
        "rule": "(self.weightTransfer.mode == 'Push') == has(self.weightTransfer.push)",
        "message": "weightTransfer.push is needed for mode Push, and for no other mode",
    },
    {
        "rule": "self.policy.version >= oldSelf.policy.version",
        "message": "cannot decrease: versions identify sampled tokens; to go back, give the old weights a new version",
        "fieldPath": ".policy.version",
    },
    {
        "rule": "self.policy.version > oldSelf.policy.version || "
        + " && ".join(map(_unchanged, ("policy.uri", "policy.digest"))),
        "message": "policy.uri and policy.digest belong to a version: raise policy.version to change them",
    },
    *(_immutable(field, "create another ModelServer") for field in ("model", "cache")),
    {
        "rule": "self.parallelism.nodes == oldSelf.parallelism.nodes",
        "message": "cannot be changed; create another ModelServer",
        "fieldPath": ".parallelism.nodes",
    },
]

RULES: dict[str, list[Schema]] = {
    "RolloutJobSpec": [
        *_immutable_but(RolloutJobSpec, *MUTABLE_FIELDS, what="job"),
        {
            "rule": "!has(self.completion.minCompletedPerGroup) || self.completion.minCompletedPerGroup <= self.groupSize",
            "message": "completion.minCompletedPerGroup is more than groupSize",
        },
        {
            "rule": "has(self.model) || self.agent.type in ['Oracle', 'Nop']",
            "message": "model is needed for this agent; only Oracle and Nop need none",
        },
        {
            "rule": "!has(self.model) || !has(self.model.server) || has(self.model.server.toolCallParser) "
            f"|| !(self.agent.type in {list(TOOL_CALLING_AGENTS)}) || !has(self.tasks.environments) "
            "&& self.agent.tools.size() == 0 && self.agent.mcpServers.size() == 0",
            "message": "model.server.toolCallParser is missing: this agent calls tools; set it, such as hermes",
        },
        {
            "rule": f"!(self.agent.type in {list(PROGRAM_AGENTS)}) || !has(self.tasks.environments)",
            "message": "an agent that is a program cannot act in tasks.environments",
        },
        {
            "rule": "(self.agent.type == 'Command') == (self.agent.command.size() > 0)",
            "message": "agent.command is needed for type Command, and for no other type",
        },
        {
            "rule": "self.agent.type == 'Command' || self.agent.install.size() == 0",
            "message": "agent.install is allowed only for type Command",
        },
        {
            "rule": f"!(self.agent.type in {list(PROGRAM_AGENTS)}) || !has(self.agent.systemPrompt)",
            "message": "agent.systemPrompt is not allowed for an agent that is a program",
        },
    ],
    "SandboxSpec": [
        *_immutable_but(SandboxSpec, "drain", "running", what="Sandbox"),
        {
            "rule": "self.running || has(self.parking)",
            "message": "false needs parking, where the files are stored; create a Sandbox with parking",
            "fieldPath": ".running",
        },
        {"rule": "self.drain || !oldSelf.drain", "message": "cannot be undone", "fieldPath": ".drain"},
    ],
    "SandboxTemplate": [
        {
            "rule": "!has(self.storeSetup) || !self.storeSetup || self.workspaces.mode != 'Plain'",
            "message": "storeSetup needs workspaces in Overlay; leave it out for workspaces.mode Plain",
            "fieldPath": ".storeSetup",
        }
    ],
    "Tasks": [_exactly_one(*TASK_SOURCES)],
    "ModelSpec": [
        _exactly_one(*MODEL_SOURCES),
        {
            "rule": "!has(self.adapter) || has(self.serverRef) || has(self.server) && self.adapter in self.server.adapters",
            "message": "adapter must be a name of server.adapters, or of the ModelServer in serverRef",
        },
        {
            "rule": "!has(self.routedExperts) || has(self.server) || has(self.serverRef) || has(self.endpoint) && "
            "self.endpoint.api == 'OpenAI'",
            "message": "routedExperts is allowed only with server, serverRef, or an endpoint with api OpenAI",
        },
    ],
    "LabelRequirement": [
        {
            "rule": "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
            "message": "values are needed for operators In and NotIn, and for no other",
        }
    ],
    "ApiKeySource": [_exactly_one("env", "secretKeyRef")],
    "ModelServer": [
        {
            "rule": "!has(self.metadata.name) || self.metadata.name.matches('^[a-z]') && "
            f"!self.metadata.name.matches('({'|'.join(RESERVED_SUFFIXES)})$')",
            "message": f"metadata.name {NAME_RULE}",
        }
    ],
    "ModelServerSpec": _MODEL_SERVER_RULES,
    "WeightCache": [_exactly_one("claimName", "size")],
    "RunnerReport": [
        {
            # An earlier runner, cut off by its node's network, may report after its successor has completed the shard.
            "rule": "oldSelf.state != 'Completed' || self.state == 'Completed'",
            "message": "cannot be changed any more: this shard is completed",
            "fieldPath": ".state",
        }
    ],
    "TaskVerifier": [
        {
            "rule": "(self.kind == 'junit') == has(self.report)",
            "message": "report is needed for kind junit, and for no other kind",
        },
        {
            "rule": "self.kind in ['pytest', 'junit'] || self.tests.size() == 0",
            "message": "tests can be named for kinds pytest and junit only",
        },
        {
            "rule": "self.kind in ['pytest', 'junit'] || self.alsoPassed.size() == 0",
            "message": "alsoPassed is for kinds pytest and junit only",
        },
    ],
}
"""CEL rules by model."""

ONE_OF: dict[str, tuple[str, ...]] = {
    "TaskFile": ("content", "contentBase64"),
    "ContextFile": ("content", "contentBase64", "link"),
}
"""Unions expressed in plain schema. There may be millions of these objects, which would exceed the API server's cost
limit for CEL.
"""

LIST_KEYS: dict[tuple[str, str], str] = {
    ("RolloutJobStatus", "conditions"): "type",
    ("SandboxStatus", "conditions"): "type",
    ("SandboxPoolStatus", "conditions"): "type",
    ("ModelServerStatus", "conditions"): "type",
    ("ModelServerStatus", "servers"): "name",
    ("ModelServerSpec", "env"): "name",
    ("SandboxTemplate", "env"): "name",
    ("SandboxSpec", "env"): "name",
    ("SandboxOverrides", "env"): "name",
    ("Tasks", "inline"): "name",
    ("Task", "files"): "path",
    ("RolloutJobSpec", "plugins"): "name",
}
"""Lists whose entries are identified by a field: the name of that field, by model and name of the list. Kubernetes treats
all other lists as a single value when it merges changes.
"""


def structural(model: type[BaseModel]) -> Schema:
    """Return the structural schema of a resource."""
    source = json_schema(model)
    definitions = source.get("$defs", {})
    schema = _node({**source, "title": model.__name__}, definitions)
    # The API server has its own schema for metadata, and accepts only these two fields here.
    rules = {}
    if "Metadata" in definitions:
        name = definitions["Metadata"]["properties"]["name"]
        rules["name"] = {key: name[key] for key in ("type", "pattern", "maxLength")}
    schema["properties"]["metadata"] = {"type": "object", "properties": rules}
    for field in ("apiVersion", "kind"):
        schema["properties"][field] = {"type": "string"}
    schema["required"] = [field for field in ("metadata", "spec") if field in schema["properties"]]
    return schema


_KEPT = (
    "type",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minimum",
    "maximum",
    "maxProperties",
)


def _node(source: Schema, definitions: Schema) -> Schema:
    """Convert one node of pydantic's schema, and all nodes below it, into a structural one."""
    nullable = False
    description = source.get("description")
    default = source.get("default")
    if "anyOf" in source:
        members = [member for member in source["anyOf"] if member != {"type": "null"}]
        nullable = len(members) < len(source["anyOf"])
        source = members[0] if len(members) == 1 else {"anyOf": members}
    if "$ref" in source:
        source = definitions[source["$ref"].removeprefix("#/$defs/")]
        values = source.get("enum", ())
        if not description or any(f"`{value}`" not in description for value in values):
            # The docstring of an enumeration says what each value means.
            texts = (description, source.get("description") if values or not description else None)
            description = " ".join(filter(None, dict.fromkeys(texts)))
    schema = _untyped_schema(source["anyOf"]) if "anyOf" in source else _typed_schema(source, definitions)
    if description:
        schema = {"description": " ".join(description.split())} | schema
    if nullable:
        schema["nullable"] = True
    if default is not None:
        # The fields of an object have their own defaults, which the API server fills in one level after the other.
        schema["default"] = {} if isinstance(default, dict) else default
    return schema


def _typed_schema(source: Schema, definitions: Schema) -> Schema:
    schema = {key: source[key] for key in _KEPT if key in source}
    if "const" in source:
        schema["enum"] = [source["const"]]
    for limit, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if limit in source:
            schema |= {bound: source[limit], limit: True}
    if source.get("type") == "array":
        schema["items"] = _node(source["items"], definitions)
        schema.setdefault("x-kubernetes-list-type", "atomic")
    if source.get("type") == "object":
        schema |= _object(source, definitions)
    return schema


def _object(source: Schema, definitions: Schema) -> Schema:
    # Pydantic writes keys with a pattern as patternProperties, which structural schemas do not support.
    values = source.get("additionalProperties") or next(iter(source.get("patternProperties", {}).values()), None)
    if "properties" not in source:
        if isinstance(values, dict):
            return {"additionalProperties": _node(values, definitions)}
        return {"x-kubernetes-preserve-unknown-fields": True}
    name = source["title"]
    fields = {field: _node(inner, definitions) for field, inner in source["properties"].items()}
    for (owner, field), key in LIST_KEYS.items():
        if owner == name:
            fields[field] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    schema: Schema = {"properties": fields}
    if required := source.get("required"):
        schema["required"] = required
    if name in RULES:
        schema["x-kubernetes-validations"] = RULES[name]
    if name in ONE_OF:
        schema["oneOf"] = [{"required": [field]} for field in ONE_OF[name]]
        for field in ONE_OF[name]:
            del fields[field]["nullable"]
    return schema


def _untyped_schema(members: list[Schema]) -> Schema:
    """Convert a union of different types into an untyped node that keeps the bounds of each type."""
    schema: Schema = {"x-kubernetes-preserve-unknown-fields": True}
    for member in members:
        if "enum" in member:
            schema["pattern"] = f"^({'|'.join(member['enum'])})$"
        schema |= {key: member[key] for key in _KEPT if key in member and key not in ("type", "enum")}
    return schema


def _condition(kind: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


_AGE: Schema = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def _column(name: str, path: str, kind: str = "string", *, wide: bool = False) -> Schema:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": 1} if wide else {})


def _definition(
    model: type[BaseModel], plural: str, short: str, columns: list[Schema], scale: Schema | None = None
) -> tuple[str, Schema]:
    """Return a definition and its file name."""
    kind = model.__name__
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    version = {
        "name": API_VERSION.partition("/")[2],
        "served": True,
        "storage": True,
        "subresources": {"status": {}} | ({"scale": scale} if scale else {}),
        "additionalPrinterColumns": [*columns, _AGE],
        "schema": {"openAPIV3Schema": structural(model)},
    }
    return f"{plural}.yaml", {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{API_GROUP}"},
        "spec": {
            "group": API_GROUP,
            "scope": "Namespaced",
            "names": {**names, "shortNames": [short], "categories": ["rollouts"]},
            "versions": [version],
        },
    }


_JOB_COLUMNS = [
    _column("Mode", ".spec.mode"),
    _column("State", _condition("Progressing", "reason")),
    _column("Sealed", ".status.sealed", "integer"),
    _column("Total", ".status.total", "integer"),
    _column("Completed", ".status.outcomes.Completed", "integer"),
    _column("Lost", ".status.outcomes.InfraFailed", "integer"),
    _column("Reward", ".status.meanReward", "number"),
    _column("Ungraded", ".status.outcomes.VerifierFailed", "integer", wide=True),
    _column("Cancelled", ".status.outcomes.Cancelled", "integer", wide=True),
    _column("Results", ".status.resultURI", wide=True),
]
_SHARD_COLUMNS = [
    _column("Runner", ".status.index", "integer"),
    _column("State", ".status.state"),
    _column("Sealed", ".status.sealed", "integer"),
    _column("Total", ".status.total", "integer"),
    _column("Running", ".status.running", "integer"),
    _column("Message", ".status.message", wide=True),
]
_SANDBOX_COLUMNS = [
    _column("Ready", _condition("Ready")),
    _column("Reason", _condition("Ready", "reason")),
    _column("Mode", ".status.mode"),
    _column("Places", ".status.places.total", "integer"),
    _column("Image", ".spec.image", wide=True),
    _column("Node", ".status.nodeName", wide=True),
]
_SERVER_COLUMNS = [
    _column("Model", ".spec.model.name"),
    _column("Replicas", ".spec.replicas", "integer"),
    _column("Ready", _condition("Ready")),
    _column("Reason", _condition("Ready", "reason")),
    _column("Policy", ".status.policy.current", "integer"),
    _column("Gate", ".status.policy.gate"),
    _column("URL", ".status.url", wide=True),
]
_POOL_COLUMNS = [
    _column("Ready", ".status.readyReplicas", "integer"),
    _column("Desired", ".status.desiredReplicas", "integer"),
    _column("Used", ".status.places.used", "integer"),
    _column("Places", ".status.places.total", "integer"),
    _column("Reason", _condition("Ready", "reason")),
    _column("Draining", ".status.draining", "integer", wide=True),
    _column("Wanted", ".status.places.wanted", "integer", wide=True),
    _column("Memory", ".status.memory.request", wide=True),
    _column("Image", ".spec.sandbox.image", wide=True),
]
_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def definitions() -> dict[str, Schema]:
    """Return the CustomResourceDefinitions by file name."""
    return dict(
        [
            _definition(RolloutJob, "rolloutjobs", "roj", _JOB_COLUMNS),
            _definition(RolloutShard, "rolloutshards", "rosh", _SHARD_COLUMNS),
            _definition(Sandbox, "sandboxes", "rosb", _SANDBOX_COLUMNS),
            _definition(ModelServer, "modelservers", "roms", _SERVER_COLUMNS, _SCALE),
            _definition(SandboxPool, "sandboxpools", "ropool", _POOL_COLUMNS, _SCALE),
        ]
    )


class _Dumper(yaml.SafeDumper):
    """Writes repeated values in full, because an API server reads no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render(definition: Schema) -> str:
    """Return the text of a definition's file."""
    head = "# Generated from the models by `python -m rollout_api.crd`; edit those.\n"
    return head + yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def main(folder: Path = FOLDER) -> None:
    """Write the definitions into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, definition in definitions().items():
        (folder / name).write_text(render(definition), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
