"""`rolloutctl submit`: upload a job's local tasks and apply the job to the cluster."""

import asyncio
import os
from typing import Annotated

import typer
import yaml

from agent_runtime.recording.store import Store
from agent_runtime.tasks import load_tasks
from rollout_api.base import API_GROUP, API_VERSION
from rollout_api.rollout_job import RolloutJob
from rollout_api.server_side_apply import APPLY_TYPE, apply_body
from rolloutctl.cluster_access import connect, refusal
from rolloutctl.commands.check import ManifestArgument
from rolloutctl.commands.sandbox import NamespaceOption
from rolloutctl.errors import CommandError, Exit
from rolloutctl.manifest import read_manifest
from rolloutctl.sources import LocalSource, local_source, upload, with_uri
from rolloutctl.ui.console import out, say

FIELD_MANAGER = "rolloutctl"


def submit(
    manifest: ManifestArgument,
    namespace: NamespaceOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Upload and apply nothing; print the manifest that would be applied.")
    ] = False,
) -> None:
    """Apply a job to the cluster. Tasks in a local file or folder are uploaded to the job's output first."""
    job = read_manifest(manifest)
    base_dir = manifest.resolve().parent
    source = local_source(job, base_dir)
    if source is not None:
        for warning in load_tasks(job.spec.tasks, base_dir, os.environ).warnings:
            say(f"Warning: {warning}", "yellow")
        job = _upload_tasks(job, source, dry_run=dry_run)
    if dry_run:
        out.print(yaml.safe_dump(job.wire(), sort_keys=False, allow_unicode=True), soft_wrap=True, end="")
        return
    say(f"rolloutjob/{job.metadata.name} applied in namespace {_apply(job, namespace)}.")


def _upload_tasks(job: RolloutJob, source: LocalSource, *, dry_run: bool) -> RolloutJob:
    uri = job.spec.output.uri.rstrip("/")
    if "://" not in uri or uri.startswith("file://"):
        raise CommandError(
            f"spec.output.uri is the local folder {uri!r}, but tasks are uploaded to the output; "
            "give s3://, gs:// or az:// with a bucket and a prefix",
            hint="Or put the tasks into object storage yourself and name them in spec.tasks.from.uri.",
        )
    target = f"{uri}/{source.key}"
    if not dry_run:
        count = asyncio.run(upload(source, Store.open(uri, os.environ)))
        result = f"Uploaded {count} of {len(source.files)} files" if count else "Already uploaded"
        say(f"{result}: {target}")
    return with_uri(job, target)


def _apply(job: RolloutJob, namespace: str | None) -> str:
    """Apply server-side, like `kubectl apply --server-side`. Returns the namespace. Raises CommandError."""
    namespace_of_context = connect()
    from kubernetes import client

    place = namespace or job.metadata.namespace or namespace_of_context
    document = job.wire()
    document["metadata"]["namespace"] = place
    with client.ApiClient() as api:
        # The client's own method would serialize the document, as JSON that YAML parsers may refuse.
        request = api.param_serialize(
            "PATCH",
            f"/apis/{API_VERSION}/namespaces/{{namespace}}/rolloutjobs/{{name}}",
            path_params={"namespace": place, "name": job.metadata.name},
            query_params=[("fieldManager", FIELD_MANAGER)],
            header_params={"Accept": "application/json", "Content-Type": APPLY_TYPE},
            body=apply_body(document),
            auth_settings=["BearerToken"],
        )
        try:
            answer = api.call_api(*request)
            answer.read()
            api.response_deserialize(answer, {"default": "object"})
        except client.ApiException as error:
            raise CommandError(
                f"the cluster refused rolloutjob/{job.metadata.name}: {refusal(error)}",
                # A refusal by the schema or by admission names the field and the solution.
                hint=""
                if error.status in (409, 422)
                else f"Check whether {API_GROUP} is installed and you may create rolloutjobs: rolloutctl doctor --cluster",
                code=Exit.FAILED,
            ) from error
    return place
