"""`rolloutctl doctor`: check whether this machine or a cluster has everything that a job needs, with a remedy for each
problem.
"""

import asyncio
import json
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from agent_runtime.sandboxes.base import SandboxFailure
from agent_runtime.sandboxes.local.provider import LocalProvider
from rollout_api.keys import named_keys
from rollout_api.on_cluster.operator_config import Images, LeaseSettings, OperatorConfig
from rollout_api.on_cluster.resolve import resolve
from rollout_api.on_cluster.sandbox_pod import Choice, Identity, pod_for
from rollout_api.rollout_job import RolloutJob
from rollout_api.sandbox import SandboxSpec, SandboxTemplate, WorkspaceMode
from rolloutctl.cluster_access import connect
from rolloutctl.commands import doctor_checks as checks
from rolloutctl.commands.doctor_checks import Answer, Finding, Refusal, State
from rolloutctl.errors import CommandError, Exit
from rolloutctl.manifest import read_manifest
from rolloutctl.ui.console import Form, FormOption, answer_json, answer_table, say

OPERATOR_LABELS = "app.kubernetes.io/name=agent-rollouts,app.kubernetes.io/component=operator"
"""The chart's labels, which cannot change between versions."""

ISOLATE_MORE = "set sandbox.image, use --provider Container, or run the job in a cluster"
"""What a task needs if it must not see or use what a warning names."""

ANSWER_SECONDS = 15
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Only the metadata of a Secret is read, never its contents."""

UNKNOWN_IMAGES = Images(runtime="runtime", executor="executor")
"""Placeholder for users who may not read the operator's configuration. Image names do not affect these checks."""

COLOURS = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}


def doctor(
    manifest: Annotated[
        Path | None, typer.Argument(help="File with a RolloutJob, whose Secrets and settings are checked too.")
    ] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Check the cluster instead of this machine.")] = False,
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", help="Namespace for jobs; the kubeconfig's own when left out.")
    ] = None,
    form: FormOption = Form.TEXT,
) -> None:
    """Report whether jobs can run here, line by line, with a remedy for each problem. Changes nothing."""
    job = read_manifest(manifest) if manifest else None
    if cluster:
        findings = list(_examine_cluster(namespace, job))
    elif namespace or job:
        raise CommandError("a manifest and --namespace are only for --cluster; add --cluster")
    else:
        findings = asyncio.run(_examine_machine())
    failed = any(finding.state is State.FAIL for finding in findings)
    if form is Form.JSON:
        answer_json([asdict(finding) for finding in findings])
    else:
        answer_table("", ["", "what", "found", "what to do"], [_row(finding) for finding in findings])
        say("Fix the problems above first." if failed else "Jobs can run here.")
    raise typer.Exit(Exit.FAILED if failed else Exit.OK)


def _row(finding: Finding) -> list[str | Text]:
    return [Text(finding.state, COLOURS[finding.state]), finding.subject, finding.message, finding.advice]


async def _examine_machine() -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        provider = LocalProvider(Path(folder), SandboxTemplate(), places=1)
        try:
            await provider.open()
        except SandboxFailure as failure:
            return [
                Finding(
                    State.FAIL,
                    "sandbox",
                    str(failure),
                    "use --provider Container, or correct this (docs/workspaces.md)",
                )
            ]
        finally:
            await provider.close()
    kept = [Finding(State.WARN, "isolation", warning, ISOLATE_MORE) for warning in provider.warnings]
    return [Finding(State.OK, "sandbox", "the executor starts and creates workspaces"), *kept]


def _examine_cluster(namespace: str | None, job: RolloutJob | None) -> Iterator[Finding]:
    api = _Api()
    namespace = namespace or (job.metadata.namespace if job else None) or api.namespace
    answer = api.get("/version")
    yield checks.version(answer)
    if isinstance(answer, Refusal):
        return
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    yield checks.definitions({plural: api.get(f"{crds}/{plural}.rollout.dev") for plural in checks.RESOURCES})
    deployments = api.get("/apis/apps/v1/deployments", labelSelector=OPERATOR_LABELS)
    config = _config(api, deployments)
    yield from checks.operator(deployments, config, _lease(api, config), namespace, datetime.now(UTC))
    yield from checks.nodes(api.get("/api/v1/nodes"))
    place = f"/api/v1/namespaces/{namespace}"
    user = job.spec.sandbox.user if job is not None else None
    kinds = ((WorkspaceMode.OVERLAY, user), (WorkspaceMode.PLAIN, user), (WorkspaceMode.PLAIN, checks.PLAIN_USER))
    answers = [api.create(f"{place}/pods", _pod(mode, user, namespace, config), dryRun="All") for mode, user in kinds]
    yield from checks.admission(api.get(place), *answers)
    yield checks.isolation(api.get("/apis/apps/v1/daemonsets"))
    resolved = None
    if job is not None:
        known = config or OperatorConfig(images=UNKNOWN_IMAGES, lease=LeaseSettings(namespace=namespace))
        manifest = job.model_copy(update={"metadata": job.metadata.model_copy(update={"namespace": namespace})})
        resolved = resolve(manifest.wire(), known)
        yield from checks.job(resolved.problems, is_config_known=config is not None)
    needed = _secrets(job, resolved.job if resolved else None, config)
    found = {name: (field, api.get(f"{place}/secrets/{name}", accept=METADATA_ONLY)) for name, field in needed.items()}
    yield from checks.secrets(found, namespace)
    yield from checks.rights({right: api.may(namespace, right) for right in checks.RIGHTS})
    yield from checks.running(api.get(f"/apis/rollout.dev/v1alpha1/namespaces/{namespace}/sandboxes"))


def _config(api: "_Api", deployments: Answer) -> OperatorConfig | None:
    if isinstance(deployments, Refusal) or not deployments["items"]:
        return None
    deployment = deployments["items"][0]
    volumes = deployment["spec"]["template"]["spec"].get("volumes", ())
    names = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    place = f"/api/v1/namespaces/{deployment['metadata']['namespace']}/configmaps"
    found = (checks.config_of(api.get(f"{place}/{name}")) for name in names)
    return next((config for config in found if config is not None), None)


def _lease(api: "_Api", config: OperatorConfig | None) -> Answer:
    if config is None:
        return Refusal(0, "the operator's configuration, which names the lease, cannot be read")
    lease = config.lease
    return api.get(f"/apis/coordination.k8s.io/v1/namespaces/{lease.namespace}/leases/{lease.name}")


def _pod(mode: WorkspaceMode, user: str | None, namespace: str, config: OperatorConfig | None) -> dict[str, Any]:
    """Return a sandbox pod as the operator would create it, without an owner."""
    name = f"rolloutctl-doctor-{uuid.uuid4().hex[:8]}"
    who = Identity(name, namespace, uid=str(uuid.uuid4()), key="", owner_labels={}, network="")
    images = config.images if config else UNKNOWN_IMAGES
    spec = SandboxSpec(image="doctor", user=user)
    pod = pod_for(who, spec, Choice(mode, "Doctor", ""), images, {}, image_volume=False)
    del pod["metadata"]["ownerReferences"]
    return pod


def _secrets(applied: RolloutJob | None, resolved: RolloutJob | None, config: OperatorConfig | None) -> dict[str, str]:
    """Return the names of the required Secrets, each with the field that names it. `resolved` includes the chart's
    defaults.
    """
    named: dict[str, str] = {}
    job = resolved or applied
    if job is None or applied is None:
        if config and config.defaults.output and config.defaults.output.secret_ref:
            named[config.defaults.output.secret_ref] = "the chart's defaults.output.secretRef"
        return named
    for name in job.spec.runners.image_pull_secrets:
        named[name] = "spec.runners.imagePullSecrets"
    for key in named_keys(job):
        if key.source.secret_key_ref is not None:
            named[key.source.secret_key_ref.name] = key.field
    if job.spec.output.secret_ref:
        own = job.spec.output == applied.spec.output
        named[job.spec.output.secret_ref] = "spec.output.secretRef" if own else "the chart's defaults.output.secretRef"
    return named


class _Api:
    """Client of the API server by path, with the user's rights. Errors are returned, not raised."""

    def __init__(self) -> None:
        self.namespace = connect()
        from kubernetes import client

        self._client = client.ApiClient()

    def may(self, namespace: str, right: checks.Right) -> bool:
        attributes = dict(zip(("verb", "group", "resource", "subresource"), right, strict=False))
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"namespace": namespace, **attributes}},
        }
        answer = self.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return not isinstance(answer, Refusal) and bool(answer["status"]["allowed"])

    def create(self, path: str, body: Mapping[str, Any], **query: str) -> Answer:
        """Create an object; with `dryRun`, only check whether it could be created."""
        return self.get(path, body=body, **query)

    def get(
        self, path: str, accept: str = "application/json", body: Mapping[str, Any] | None = None, **query: str
    ) -> Answer:
        request = self._client.param_serialize(
            "GET" if body is None else "POST",
            path,
            query_params=list(query.items()),
            header_params={"Accept": accept, "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._client.call_api(*request, _request_timeout=ANSWER_SECONDS)
            data = json.loads(response.read())
        except Exception as error:  # noqa: BLE001 errors of urllib3, TLS and login plugins all mean: no response
            return Refusal(0, " ".join(str(error).split()))
        if response.status >= 400:
            return Refusal(response.status, data.get("message", response.reason))
        found: Mapping[str, Any] = data
        return found
