"""`rolloutctl sandbox`: use a Sandbox in the cluster through a port-forward."""

import asyncio
import base64
import contextlib
import io
import posixpath
import secrets
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from agent_runtime.recording.extraction import extract_all
from agent_runtime.sandboxes.base import Fence, SandboxFailure, WorkspaceSpec
from agent_runtime.sandboxes.executor_client.client import ExecutorClient, Hold
from agent_runtime.sandboxes.executor_client.workspace import ExecutorWorkspace
from agent_runtime.sandboxes.prepare import prepare
from rollout_api.cluster import EXECUTOR_PORT, KEY_FILE, by_hand_name, executor_token, runner_name
from rollout_api.sandbox import WORKING_DIR, Sandbox
from rolloutctl.cluster_access import connect
from rolloutctl.errors import EXIT_CODES, CommandError, Exit
from rolloutctl.ui.console import answer_stream, say

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run commands and copy files in a Sandbox of the cluster."
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the Sandbox.")]
NamespaceOption = Annotated[
    str | None, typer.Option("-n", "--namespace", help="Namespace; the kubeconfig's own when left out.")
]
WorkspaceOption = Annotated[
    str, typer.Option(help="Workspace to use. It is created at its first use and kept until the Sandbox ends.")
]

# All calls use the same holder, because a workspace refuses calls of any but its last holder.
HOLDER = Fence(epoch=1, holder="rolloutctl")
ANSWER_SECONDS = 20.0
"""Time limit for the executor's first response. A ready Sandbox's executor responds within a second."""
TRY_SECONDS = 4.0
"""Time limit of one attempt. A connection to an executor that did not listen yet may hang, because the client library
waits for bytes that it has already read from the TLS connection.
"""
MOST_OUTPUT_BYTES = 1 << 20
"""Most bytes shown of each stream: the executor's limit of `headBytes` (docs/executor.md)."""
REMEMBERED_SECONDS = 86_400
"""Time for which the executor keeps results of calls. The time of a call is used as its turn number."""


@app.command("exec", epilog=EXIT_CODES, context_settings={"ignore_unknown_options": True})
async def execute(
    name: NameArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="Program and arguments.")],
    namespace: NamespaceOption = None,
    workspace: WorkspaceOption = "main",
    deadline_seconds: Annotated[float, typer.Option(min=0.001, help="Time limit in seconds.")] = 600,
) -> None:
    """Run a command in a workspace of the Sandbox. Exits with the command's exit code."""
    async with _open_workspace(name, namespace, workspace) as place:
        result = await place.run(
            command, key=_key("exec"), deadline_seconds=deadline_seconds, head_bytes=MOST_OUTPUT_BYTES
        )
    answer_stream().buffer.write(result.stdout)
    sys.stderr.buffer.write(result.stderr)
    if result.stdout_omitted or result.stderr_omitted:
        say(f"{result.stdout_omitted + result.stderr_omitted} bytes of output are not shown.")
    if result.cause is not None:
        say(f"The command was ended: {result.cause}.")
    if result.exit_code is not None:
        raise typer.Exit(result.exit_code)
    raise typer.Exit(Exit.FAILED if result.signal is None else 128 + result.signal)


@app.command(epilog=EXIT_CODES)
async def cp(
    source: Annotated[str, typer.Argument(help="A local path, or NAME:PATH in the Sandbox.")],
    target: Annotated[str, typer.Argument(help="Destination: NAME:PATH for a local source, else a local path.")],
    namespace: NamespaceOption = None,
    workspace: WorkspaceOption = "main",
) -> None:
    """Copy a file or folder into a workspace of the Sandbox, or out of it."""
    inside = [_inside(path) for path in (source, target)]
    if (inside[0] is None) == (inside[1] is None):
        raise CommandError(
            f"{source} and {target}: one of them must be NAME:PATH in a Sandbox, the other a local path",
            hint="For example: rolloutctl sandbox cp ./data my-sandbox:/workspace/data",
        )
    if inside[1] is not None:
        name, path = inside[1]
        async with _open_workspace(name, namespace, workspace) as place:
            await _copy_in(Path(source), place, path)
    elif inside[0] is not None:
        name, path = inside[0]
        async with _open_workspace(name, namespace, workspace) as place:
            await _copy_out(place, path, Path(target))


@app.command(epilog=EXIT_CODES)
async def snapshot(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(help="Tar file to write.")],
    namespace: NamespaceOption = None,
    workspace: WorkspaceOption = "main",
) -> None:
    """Save the changes of a workspace of the Sandbox over its image, as a tar with OCI whiteouts."""
    async with _open_workspace(name, namespace, workspace) as place:
        with file.open("wb") as out:
            async for piece in place.snapshot():
                out.write(piece)
            size = out.tell()
    say(f"{size} bytes in {file}.")


async def _copy_in(source: Path, place: ExecutorWorkspace, path: str) -> None:
    if not source.exists():
        raise CommandError(f"{source}: no such file or folder")
    if source.is_dir():
        folder, name = path, "."
    else:
        existing = await place.stat(path)
        into = path.endswith("/") or (existing is not None and existing.type == "folder")
        folder, name = (path, source.name) if into else (posixpath.dirname(path) or ".", posixpath.basename(path))
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(source, arcname=name, filter=_without_owner)
        file.seek(0)
        await place.untar(folder, _pieces(file), key=_key("cp"))


async def _copy_out(place: ExecutorWorkspace, path: str, target: Path) -> None:
    found = await place.stat(path)
    if found is None:
        raise CommandError(f"{path}: does not exist in the workspace")
    with tempfile.TemporaryFile() as file:
        async for piece in place.tar(path):
            file.write(piece)
        file.seek(0)
        if found.type == "folder":
            target.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=file) as archive:
                for refused in extract_all(archive, target):
                    say(f"Not copied: {refused}.", "yellow")
            return
        to = target / found.name if target.is_dir() else target
        with tarfile.open(fileobj=file) as archive:
            member = archive.extractfile(archive.next() or tarfile.TarInfo())
            if member is None:
                raise CommandError(f"{path}: is neither a regular file nor a folder")
            with to.open("wb") as out:
                shutil.copyfileobj(member, out)


@contextlib.asynccontextmanager
async def _open_workspace(name: str, namespace: str | None, workspace: str) -> AsyncIterator[ExecutorWorkspace]:
    namespace_of_context = connect()
    from kubernetes import client

    from rolloutctl.cluster_access import forwarded_port

    namespace = namespace or namespace_of_context
    with client.ApiClient() as api:
        sandbox = _ready_sandbox(client.CustomObjectsApi(api), namespace, name)
        core = client.CoreV1Api(api)
        token = _token(core, namespace, sandbox)
        pod = sandbox["status"]["podName"]
        async with forwarded_port(core, namespace, pod, EXECUTOR_PORT) as port:
            executor = ExecutorClient(f"tcp:127.0.0.1:{port}", token)
            try:
                await _first_answer(executor, name)
                applied = {field: value for field, value in sandbox.items() if field != "status"}
                yield await _workspace(executor, Sandbox.model_validate(applied), workspace)
            finally:
                await executor.close()


async def _workspace(executor: ExecutorClient, sandbox: Sandbox, name: str) -> ExecutorWorkspace:
    spec = WorkspaceSpec(
        group="by-hand",
        working_dir=sandbox.spec.working_dir or WORKING_DIR,
        image=sandbox.spec.image,
        user=sandbox.spec.user,
        env={variable.name: variable.value for variable in sandbox.spec.env},
        resources=sandbox.spec.resources,
        network={"agent": sandbox.spec.network.agent},
    )
    place = ExecutorWorkspace(executor, Hold(name, HOLDER), spec, handle={}, description={})
    await place.fence()
    try:
        await place.require_live()
    except SandboxFailure:
        await place.create(None, {})
        await prepare(place, spec)
        await place.enter("agent", key=_key("enter"))
    await place.acknowledge(max(0, int(time.time()) - REMEMBERED_SECONDS))
    return place


async def _first_answer(executor: ExecutorClient, name: str) -> None:
    until = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            async with asyncio.timeout(TRY_SECONDS):
                await executor.health()
            return
        except (SandboxFailure, TimeoutError) as error:
            if time.monotonic() > until:
                raise CommandError(
                    f"the executor of Sandbox {name} does not respond through a port-forward. {error}".rstrip(),
                    hint="You need the right to create pods/portforward, and the Sandbox's pod must run: kubectl get pods",
                    code=Exit.FAILED,
                ) from error
            await asyncio.sleep(0.2)


def _ready_sandbox(api: Any, namespace: str, name: str) -> dict[str, Any]:
    from kubernetes.client import ApiException

    try:
        found: dict[str, Any] = api.get_namespaced_custom_object(
            "rollout.dev", "v1alpha1", namespace, "sandboxes", name
        )
    except ApiException as error:
        raise CommandError(
            f"Sandbox {name} in namespace {namespace}: {error.reason} ({error.status})",
            hint=f"List them: kubectl get sandboxes -n {namespace}",
        ) from error
    conditions = {condition["type"]: condition for condition in found.get("status", {}).get("conditions", [])}
    ready = conditions.get("Ready", {})
    if ready.get("status") != "True" and not found["spec"].get("running", True):
        patch = """'{"spec":{"running":true}}'"""
        raise CommandError(
            f"Sandbox {name} is parked. {ready.get('reason', '')}: {ready.get('message', '')}",
            hint=f"Bring it back: kubectl patch sandbox {name} -n {namespace} --type merge -p {patch}",
        )
    if ready.get("status") != "True":
        causes = [conditions[kind] for kind in ("Finished", "ImagePulled", "Scheduled", "Ready") if kind in conditions]
        why = (
            f"{causes[0]['reason']}: {causes[0].get('message', '')}"
            if causes
            else "the operator has not processed it yet"
        )
        raise CommandError(
            f"Sandbox {name} is not ready. {why}", hint=f"kubectl describe sandbox {name} -n {namespace}"
        )
    return found


def _token(core: Any, namespace: str, sandbox: dict[str, Any]) -> str:
    from kubernetes.client import ApiException

    metadata = sandbox["metadata"]
    owner = next((o for o in metadata.get("ownerReferences", []) if o["kind"] == "RolloutJob"), None)
    secret = runner_name(owner["name"]) if owner else by_hand_name(metadata["name"])
    try:
        data = core.read_namespaced_secret(secret, namespace).data
    except ApiException as error:
        raise CommandError(
            f"the key of Sandbox {metadata['name']}, Secret {secret}, cannot be read: {error.reason} ({error.status})",
            hint="You need the right to get that Secret.",
        ) from error
    return executor_token(base64.b64decode(data[KEY_FILE]).decode(), metadata["name"], metadata["uid"])


def _inside(path: str) -> tuple[str, str] | None:
    """Return name and path of NAME:PATH; None for a local path, as in `kubectl cp`."""
    name, colon, inside = path.partition(":")
    return (name, inside) if colon and name and "/" not in name else None


def _key(what: str) -> str:
    return f"{int(time.time())}:{what}-{secrets.token_hex(8)}"


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    # The workspace's user unpacks it. Users of this machine do not exist there.
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


async def _pieces(file: BinaryIO | io.BufferedRandom) -> AsyncIterator[bytes]:
    while piece := file.read(1 << 20):
        yield piece
