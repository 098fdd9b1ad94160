"""Images of tasks that bring a Dockerfile: what they are called, and what the Dockerfile says of working in them."""

import hashlib
import posixpath
import re
from dataclasses import dataclass

from agent_runtime.tasks.folders import Folder

DIGEST_CHARACTERS = 16


@dataclass(frozen=True)
class Build:
    """An image that a task needs and that is made from one of its folders."""

    task: str
    image: str
    folder: Folder
    context: str
    """The folder's path in the task: it has the Dockerfile, and is what is sent along."""
    seconds: float
    """Most time that the build may take."""


@dataclass(frozen=True)
class DockerfileFacts:
    """What the last stage of a Dockerfile says; None where it says nothing, or what only a build can tell."""

    working_dir: str | None = None
    user: str | None = None


def content_digest(folder: Folder, context: str) -> str:
    """Of all names, modes and bytes below a folder: another image exactly where the build would be another."""
    digest = hashlib.sha256()
    for path in folder.below(context):
        content = hashlib.sha256(folder.read(path)).hexdigest()
        digest.update(f"{path.removeprefix(context)} {folder.is_executable(path)} {content}\n".encode())
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def image_name(template: str, name: str, digest: str) -> str:
    """The template with `{name}` and `{digest}` filled in; what a name may not have becomes `-`."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")
    return template.replace("{name}", plain).replace("{digest}", digest)


def dockerfile_facts(text: str) -> DockerfileFacts:
    """What a Dockerfile's WORKDIR and USER come to."""
    working_dir: str | None = None
    user: str | None = None
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        value = rest.strip().strip("\"'")
        match word.upper():
            case "FROM":
                working_dir = user = None
            case "WORKDIR" if "$" in value:
                working_dir = None
            case "WORKDIR" if value.startswith("/"):
                working_dir = posixpath.normpath(value)
            case "WORKDIR" if working_dir is not None:
                working_dir = posixpath.normpath(posixpath.join(working_dir, value))
            case "USER":
                user = None if "$" in value else value
    return DockerfileFacts(working_dir, user)
