"""Images of tasks with a Dockerfile, and Dockerfiles that a job builds."""

import hashlib
import math
import posixpath
import re
from collections.abc import Mapping
from types import MappingProxyType

from agent_runtime.dockerfiles.parse import parse
from agent_runtime.dockerfiles.problems import problems_of
from agent_runtime.tasks.folders import Build, Folder, Notes
from rollout_api.files import ContextFile, Dockerfile
from rollout_api.tasks import Dockerfiles

DIGEST_CHARACTERS = 16
_IGNORE = ".dockerignore"
_IMAGE = re.compile(r"^(\s*FROM\s+(?:--\S+\s+)*|\s*COPY\s+(?:--\S+\s+)*?--from=)(\S+)", re.IGNORECASE)


def content_digest(folder: Folder, context: str) -> str:
    """Return a digest of all names, modes and bytes below a folder, which differs exactly if the build would differ."""
    digest = hashlib.sha256()
    for path in folder.below(context):
        content = hashlib.sha256(folder.read(path)).hexdigest()
        digest.update(f"{path.removeprefix(context)} {folder.is_executable(path)} {content}\n".encode())
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def image_name(template: str, name: str, digest: str) -> str:
    """Return the template with `{name}` and `{digest}` filled in; invalid characters become `-`."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")
    return template.replace("{name}", plain).replace("{digest}", digest)


def built_image(
    folder: Folder, notes: Notes, template: str | None, *, context: str, name: str, seconds: float, instead: str
) -> str | None:
    """Return the image built from the Dockerfile in a folder of the task; None without such a file.

    Also None if the job has no `tasks.imageTemplate`: then a report says what is used `instead`.
    """
    file = posixpath.join(context, "Dockerfile")
    if file not in folder.files:
        return None
    if template is None:
        notes.report(file, f"is not built: {instead} is used; set tasks.imageTemplate and run rolloutctl images")
        return None
    digest = content_digest(folder, context)
    image = image_name(template, name, digest)
    notes.builds.append(Build(image, folder, context, seconds, digest))
    return image


def job_dockerfile(
    folder: Folder,
    notes: Notes,
    dockerfiles: Dockerfiles,
    *,
    context: str,
    seconds: float,
    name: str = "Dockerfile",
    args: Mapping[str, str] = MappingProxyType({}),
    target: str | None = None,
) -> Dockerfile | None:
    """Return the Dockerfile `name` in a folder of the task, which the job builds; None without such a file.

    What is not supported in it becomes a problem with its line.
    """
    file = posixpath.normpath(posixpath.join(context, name))
    if file not in folder.files:
        return None
    text = folder.text(file)
    for problem in problems_of(text, {**dockerfiles.args, **args}):
        notes.refuse(file, problem.message, problem.line)
    notes.contexts.append(context)
    files = folder.as_context(context)
    if posixpath.normpath(name) != "Dockerfile":
        files = _with_ignore_file(files, folder, f"{file}{_IGNORE}")
    return Dockerfile(text=text, context=files, args=dict(args), target=target, seconds=math.ceil(seconds))


def _with_ignore_file(files: list[ContextFile], folder: Folder, path: str) -> list[ContextFile]:
    """Return a context whose `Dockerfile.dockerignore`, which a build reads, is that of a Dockerfile of another name."""
    kept = [file for file in files if file.path != f"Dockerfile{_IGNORE}"]
    if path not in folder.files:
        return kept
    return [*kept, ContextFile(path=f"Dockerfile{_IGNORE}", content=folder.text(path))]


def with_other_bases(dockerfile: str, bases: Mapping[str, str]) -> str:
    """Return a Dockerfile in which the images of FROM and of COPY --from are replaced.

    A base is named in full (`ubuntu:24.04`) or by a prefix that ends with `/` or `:`.
    """
    lines = dockerfile.split("\n")
    stages = parse(dockerfile).stages
    # Lines of a heredoc may look the same.
    for line in (part.line for stage in stages for part in (stage.start, *stage.instructions)):
        lines[line - 1] = _IMAGE.sub(lambda match: match[1] + rewritten(match[2], bases), lines[line - 1])
    return "\n".join(lines)


def rewritten(image: str, bases: Mapping[str, str]) -> str:
    """Return an image replaced by the table of bases: by its own entry, else by that without its digest, else by that of
    the longest prefix.
    """
    for name in (image, image.partition("@")[0]):
        if name in bases:
            return bases[name]
    beginnings = [key for key in bases if key.endswith(("/", ":")) and image.startswith(key)]
    longest = max(beginnings, key=len, default="")
    return bases[longest] + image[len(longest) :] if longest else image
