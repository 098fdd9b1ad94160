"""`rolloutctl images`: build the images of a job's task folders from their Dockerfiles, with buildah, podman or docker."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from agent_runtime.tasks.folders import Build
from agent_runtime.tasks.images import with_other_bases
from agent_runtime.tasks.source import needed_images
from rolloutctl.commands.check import ManifestArgument
from rolloutctl.errors import CommandError, Exit
from rolloutctl.manifest import read_manifest
from rolloutctl.ui.console import Form, FormOption, answer_json, err, out, say

TOOLS = ("buildah", "podman", "docker")
SHOWN_OUTPUT = 4000
"""Most characters shown of a failed program's output. The end is shown, because the error is there."""


@dataclass(frozen=True)
class Target:
    """Destination of an image: a registry, or a path on this machine."""

    image: str
    path: Path | None

    @classmethod
    def of(cls, image: str, base_dir: Path) -> "Target":
        """Return the destination that `sandbox.image` names; a relative path starts at the manifest's folder."""
        is_path = image.startswith(("/", "./", "../", "~/"))
        return cls(image, base_dir / Path(image).expanduser() if is_path else None)


def find_tool(wanted: str | None) -> str:
    """Return a build program that works: `wanted`, or the first of TOOLS. Raises CommandError if none works."""
    for tool in [wanted] if wanted else TOOLS:
        if shutil.which(tool) and _succeeds([tool, "info"]):
            return tool
    what = f"`{wanted} info` fails" if wanted else f"`info` fails with each of {', '.join(TOOLS)}"
    raise CommandError(f"{what}; install or repair one of {', '.join(TOOLS)}")


def image_exists(tool: str, target: Target) -> bool:
    """Whether the image exists at its destination. Its name includes the digest of its inputs, so it is then up to date.

    The registry is queried with the settings and credentials of the build program. If that program cannot query a
    manifest, the image is pulled. Without a response the image counts as missing, and the later push reports the error.
    """
    image = target.image
    if target.path is not None:
        return target.path.exists()
    if tool == "docker":
        # `docker manifest` fails for registries that only the daemon trusts, and before version 23 for OCI images.
        return _succeeds(["docker", "manifest", "inspect", image]) or _succeeds(["docker", "pull", "--quiet", image])
    # buildah and podman can inspect only image lists in a registry. skopeo uses the same configuration and can do it.
    if shutil.which("skopeo"):
        return _succeeds(["skopeo", "inspect", "--raw", f"docker://{image}"])
    # Without the policy buildah would find an image that was built locally and never pushed.
    policy = ["--policy", "always"] if tool == "buildah" else []
    return _succeeds([tool, "pull", "--quiet", *policy, f"docker://{image}"])


def build(tool: str, wanted: Build, target: Target, bases: Mapping[str, str]) -> None:
    """Build an image and store it completely at its destination. Raises CommandError with the builder's message."""
    name = target.image if target.path is None else f"localhost/agent-rollouts-task:{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="agent-rollouts-image-") as folder:
        context = Path(folder) / "context"
        _write_context(wanted, context, bases)
        # chroot isolation also works in containers that may not create namespaces.
        isolation = ["--isolation", "chroot"] if tool == "buildah" else []
        _run([tool, "build", *isolation, "-t", name, "-f", str(context / "Dockerfile"), str(context)], wanted)
        if target.path is None:
            _run([tool, "push", name, *([] if tool == "docker" else [f"docker://{name}"])], wanted)
            return
        target.path.parent.mkdir(parents=True, exist_ok=True)
        partial = target.path.with_name(f".{target.path.name}.{os.getpid()}")
        if tool == "docker":
            _run(["docker", "save", "-o", str(partial), name], wanted)
        else:
            _run([tool, "push", name, f"oci:{partial}:latest"], wanted)
        partial.rename(target.path)
        _run([tool, "rmi", name], wanted)


def _write_context(wanted: Build, context: Path, bases: Mapping[str, str]) -> None:
    for path in wanted.folder.below(wanted.context):
        file = context / path.removeprefix(f"{wanted.context}/" if wanted.context else "")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(wanted.folder.read(path))
        file.chmod(0o755 if wanted.folder.is_executable(path) else 0o644)
    dockerfile = context / "Dockerfile"
    dockerfile.write_text(with_other_bases(dockerfile.read_text(), bases))


def _run(command: Sequence[str], wanted: Build) -> None:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=wanted.seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"{wanted.folder.where}: {command[0]} took more than {wanted.seconds:g} s (build_timeout_sec)"
        raise CommandError(message) from error
    if done.returncode:
        output = done.stdout.decode(errors="replace").strip()[-SHOWN_OUTPUT:]
        raise CommandError(
            f"{wanted.folder.where}: {' '.join(command[:2])} failed with exit code {done.returncode}:\n{output}"
        )


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def images(
    manifest: ManifestArgument,
    base: Annotated[
        list[str] | None,
        typer.Option(
            "--base", help="OLD=NEW: replace a base image. If OLD ends in / or :, replace this prefix of base images."
        ),
    ] = None,
    tool: Annotated[
        str | None, typer.Option("--tool", help="buildah, podman or docker; by default the first that works.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the needed images without building them.")] = False,
    form: FormOption = Form.TEXT,
) -> None:
    """Build the missing images of task folders with a Dockerfile, under the names given by tasks.imageTemplate.

    If the template is a path, such as ./images/{name}-{digest}, images are stored on this machine; else they are pushed.
    """
    job = read_manifest(manifest)
    base_dir = manifest.resolve().parent
    bases = _bases(base or [])
    if job.spec.tasks.image_template is None:
        raise CommandError(f"{manifest}: spec.tasks.imageTemplate is missing; it names the images")
    needed = needed_images(job.spec.tasks, base_dir, os.environ)
    builder = "" if dry_run else find_tool(tool)
    answers: list[dict[str, object]] = []
    failed = False
    for wanted in needed:
        target = Target.of(wanted.image, base_dir)
        state = "needed"
        if not dry_run and image_exists(builder, target):
            state = "exists"
        elif not dry_run:
            try:
                with err.status(f"Building {wanted.image}…"):
                    build(builder, wanted, target, bases)
                state = "built"
            except CommandError as error:
                say(str(error), "red")
                state, failed = "failed", True
        answers.append(
            {"image": wanted.image, "from": f"{wanted.folder.where}/{wanted.context}".rstrip("/"), "state": state}
        )
        if form is Form.TEXT:
            out.print(f"{state:7} {wanted.image}", soft_wrap=True)
    if form is Form.JSON:
        answer_json(answers)
    elif not needed:
        say("No image has to be built: each task names an image or has no Dockerfile.")
    raise typer.Exit(Exit.FAILED if failed else Exit.OK)


def _bases(options: list[str]) -> dict[str, str]:
    pairs = [option.partition("=") for option in options]
    if wrong := [old for old, equals, new in pairs if not (old and equals and new)]:
        raise CommandError(f"--base {wrong[0]}: expected OLD=NEW, such as ubuntu:24.04=registry.example/ubuntu:24.04")
    return {old: new for old, _, new in pairs}
