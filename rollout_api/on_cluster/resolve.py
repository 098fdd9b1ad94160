"""Resolve the applied RolloutJob into the one that runners run, or into a list of problems.

The chart's defaults, if set, replace fields that work only on a laptop: a local folder, a key in the environment, a
model on localhost.
"""

import ipaddress
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from rollout_api.base import API_VERSION, OBJECT_NAME_LENGTH
from rollout_api.cluster import RUNNER_FOLDER, own_model_server_name
from rollout_api.conditions import Metadata
from rollout_api.manifest import Problem, explain, validate
from rollout_api.model import ApiKeySource, ModelSpec
from rollout_api.model_server import ModelServer
from rollout_api.nesting import too_deep
from rollout_api.on_cluster import template
from rollout_api.on_cluster.model_server_problems import problems_of
from rollout_api.on_cluster.objects import TOO_DEEP, Manifest, size_problem
from rollout_api.on_cluster.operator_config import Defaults, OperatorConfig
from rollout_api.rollout_job import FINISHED_JOB_SECONDS, RolloutJob, RolloutJobSpec
from rollout_api.sandbox import Security

STORES: Final = ("s3", "gs", "az")
"""Object stores that runners can reach (agent_runtime/recording/store.py)."""

SECRET_BYTES: Final = 1_000_000
"""Most bytes of job.json. A Secret holds 1 MiB, including the key and the names."""

RUNNER_PARTS: Final = template.OwnParts("runner", ("job", "tmp"), RUNNER_FOLDER)
"""What `runners.podTemplate` may not replace."""

_OR_DEFAULT_MODEL: Final = ", or have `defaults.model` set in the chart"

RUN_ID_CHARACTERS: Final = 8
"""Characters of the uid in a run's folder name, which recording/job_record.py builds."""


@dataclass(frozen=True)
class Resolved:
    """A job that can be started, or its problems; one of the two is empty."""

    job: RolloutJob | None
    problems: tuple[Problem, ...] = ()

    @property
    def result_uri(self) -> str | None:
        if self.job is None:
            return None
        metadata, uri = self.job.metadata, self.job.spec.output.uri.rstrip("/")
        return f"{uri}/{metadata.name}-{(metadata.uid or '')[:RUN_ID_CHARACTERS]}"


def resolve(manifest: Manifest, config: OperatorConfig, server: Manifest | None = None) -> Resolved:
    """Return the job with the chart's defaults, or its problems. `suspend` and `ttlSecondsAfterFinished` get their
    defaults.

    `server` is the ModelServer that `model.serverRef` names, if it exists.
    """
    if too_deep(manifest.get("spec")):
        return Resolved(None, (Problem("spec", TOO_DEEP),))
    try:
        job = validate(RolloutJob, {field: value for field, value in manifest.items() if field != "status"})
    except ValidationError as error:
        return Resolved(None, explain(error, RolloutJob, manifest))
    metadata = job.metadata
    spec = _with_defaults(job.spec, config.defaults)
    if problems := [*_problems(spec, metadata.namespace or "", config), *_server_problems(job, config, server)]:
        return Resolved(None, tuple(problems))
    resolved = RolloutJob(
        api_version=API_VERSION,
        kind="RolloutJob",
        metadata=Metadata(name=metadata.name, namespace=metadata.namespace, uid=metadata.uid),
        spec=spec,
    )
    if (size := len(job_file(resolved).encode())) > SECRET_BYTES:
        message = f"takes {size} bytes, expected at most {SECRET_BYTES}; put the tasks into a file and use tasks.from"
        return Resolved(None, (Problem("spec", message),))
    return Resolved(resolved)


def job_file(job: RolloutJob) -> str:
    """Return the resolved job as JSON, for the runners."""
    return json.dumps(job.wire(), ensure_ascii=False, separators=(",", ":"))


def _with_defaults(spec: RolloutJobSpec, defaults: Defaults) -> RolloutJobSpec:
    changes: dict[str, Any] = {"suspend": False, "ttl_seconds_after_finished": FINISHED_JOB_SECONDS}
    if defaults.output is not None and _is_local(spec.output.uri):
        changes["output"] = defaults.output
    if defaults.model is not None and spec.model is not None and _model_problems(spec.model):
        kept = {
            "allow_text_only": spec.model.allow_text_only or defaults.model.allow_text_only,
            "max_policy_lag": spec.model.max_policy_lag,
            "on_stale": spec.model.on_stale,
        }
        changes["model"] = defaults.model.model_copy(update=kept)
    return spec.model_copy(update=changes)


def _problems(spec: RolloutJobSpec, namespace: str, config: OperatorConfig) -> list[Problem]:
    problems = [
        *storage_problems("spec.output.uri", spec.output.uri, ", or have `defaults.output` set in the chart"),
        *(_model_problems(spec.model) if spec.model else ()),
        *_mcp_problems(spec),
        *_image_problems(spec),
        *_template_problems(spec),
    ]
    if spec.tasks.from_ is not None:
        remedy = ", or put the tasks into the manifest as tasks.inline"
        problems += storage_problems("spec.tasks.from.uri", spec.tasks.from_.uri, remedy)
    for number, entry in enumerate(spec.tasks.branch or ()):
        problems += storage_problems(f"spec.tasks.branch[{number}].job", entry.job, " that runners can read")
    if spec.security is Security.PRIVILEGED and namespace not in config.privileged_namespaces:
        message = (
            f"is Privileged, which is not allowed in namespace {namespace}; leave it out, or have the namespace added to "
            f"the chart's `privilegedNamespaces` ({', '.join(config.privileged_namespaces) or 'none is listed'})"
        )
        problems.append(Problem("spec.security", message))
    return problems


def _is_local(uri: str) -> bool:
    return "://" not in uri or uri.startswith("file://")


def storage_problems(path: str, uri: str, remedy: str) -> list[Problem]:
    """Return why pods cannot use storage at this URI."""
    scheme, _, place = uri.partition("://")
    if _is_local(uri):
        what = "is a local folder, which runner pods do not share"
    elif scheme not in STORES:
        what = f"has scheme {scheme!r}, which runners cannot read or write"
    elif not urlsplit(uri).netloc or not place:
        what = "names no bucket"
    else:
        return []
    return [Problem(path, f"{uri!r} {what}; give s3://, gs:// or az:// with a bucket and a prefix{remedy}")]


def _image_problems(spec: RolloutJobSpec) -> Iterator[Problem]:
    without = [task.name for task in spec.tasks.inline or () if not task.sandbox.image and task.dockerfile is None]
    if without and not spec.sandbox.image:
        message = (
            f"is missing, and task {without[0]!r} names none either; in a cluster every task needs a container image, "
            "here or in its own sandbox.image"
        )
        yield Problem("spec.sandbox.image", message)


def _template_problems(spec: RolloutJobSpec) -> list[Problem]:
    """Return why the API server or the operator would refuse the job's pods."""
    given = {"sandbox": spec.sandbox.pod_template, "runners": spec.runners.pod_template}
    if too_large := [
        Problem(f"spec.{where}.podTemplate", why) for where in given if (why := size_problem(given[where]))
    ]:
        return too_large
    pod_template = template.without_nulls(spec.sandbox.pod_template or {})
    check = template.merge_problems if spec.security is Security.PRIVILEGED else template.refusals
    runners = template.without_nulls(spec.runners.pod_template or {})
    return [
        *check(pod_template, "spec.sandbox.podTemplate"),
        *template.refusals(runners, "spec.runners.podTemplate", RUNNER_PARTS),
    ]


def _model_problems(model: ModelSpec) -> list[Problem]:
    if (found := model.endpoint) is None:
        return []
    return _address_problems("spec.model.endpoint", "baseURL", found.base_url, found.api_key_from, _OR_DEFAULT_MODEL)


def _server_problems(job: RolloutJob, config: OperatorConfig, server: Manifest | None) -> list[Problem]:
    """Return the problems of the job's own or named ModelServer that affect the job."""
    model, problems = job.spec.model, list[Problem]()
    if model is None:
        return problems
    if model.server is not None:
        if (excess := len(own_model_server_name(job.metadata.name)) - OBJECT_NAME_LENGTH) > 0:
            message = (
                f"is {excess} characters too long: the job's own ModelServer has a longer name, made from this one"
            )
            problems.append(Problem("metadata.name", message))
        named = job.metadata.model_copy(update={"name": own_model_server_name(job.metadata.name)})
        own = ModelServer.model_construct(metadata=named, spec=model.server)
        for found in problems_of(own, config.privileged_namespaces):
            problems.append(Problem(found.path.replace("spec.", "spec.model.server.", 1), found.message))
    # RolloutJobSpec checks the parser of a job's own server. A server that does not exist yet cannot be checked.
    may_parse = model.server is not None or server is None or bool(server.get("spec", {}).get("toolCallParser"))
    if not may_parse and job.spec.calls_tools:
        needs = f"agent {job.spec.agent.type} calls tools, and the engine finds calls in answers with a parser for the model"
        where = f"ModelServer {model.server_ref} has no spec.toolCallParser"
        problems.append(Problem("spec.model.serverRef", f"{where}: {needs}; set it there, such as hermes"))
    return problems


def _mcp_problems(spec: RolloutJobSpec) -> list[Problem]:
    return [
        problem
        for number, server in enumerate(spec.agent.mcp_servers)
        if server.url is not None
        for problem in _address_problems(f"spec.agent.mcpServers[{number}]", "url", server.url, server.api_key_from)
    ]


def _address_problems(path: str, field: str, url: str, key: ApiKeySource | None, otherwise: str = "") -> list[Problem]:
    """Return problems of an address or a key that works only on a laptop."""
    problems = []
    if _is_this_machine(urlsplit(url).hostname or ""):
        message = f"{url!r} is, in a cluster, the runner pod itself; give an address that pods can reach{otherwise}"
        problems.append(Problem(f"{path}.{field}", message))
    if key is not None and key.env is not None:
        message = (
            f"{key.env!r} is a variable of a laptop's environment; put the key into a Secret and use "
            f"apiKeyFrom.secretKeyRef{otherwise}"
        )
        problems.append(Problem(f"{path}.apiKeyFrom.env", message))
    return problems


def _is_this_machine(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost") or host == "host.docker.internal":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
