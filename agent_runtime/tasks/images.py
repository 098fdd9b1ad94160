"""Images of tasks that bring a Dockerfile: what they are called, and what the Dockerfile says of working in them."""

import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass

from agent_runtime.tasks.folders import Build, Folder, Notes

DIGEST_CHARACTERS = 16


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


def built_image(
    folder: Folder, notes: Notes, template: str | None, *, context: str, name: str, seconds: float, instead: str
) -> str | None:
    """The image that is made from the Dockerfile in a folder of the task; None without such a file.

    Also None where the job has no `tasks.imageTemplate`: then it is reported what is used `instead`.
    """
    file = posixpath.join(context, "Dockerfile")
    if file not in folder.files:
        return None
    if template is None:
        notes.report(file, f"is not built: {instead} is used; set tasks.imageTemplate and run rolloutctl images")
        return None
    image = image_name(template, name, content_digest(folder, context))
    notes.builds.append(Build(image, folder, context, seconds))
    return image


def with_other_bases(dockerfile: str, bases: Mapping[str, str]) -> str:
    """A Dockerfile in which the images of FROM and of COPY --from are taken from elsewhere.

    A base is named in full (`ubuntu:24.04`) or by a beginning that ends with `/` or `:` and is replaced there.
    """

    def other(match: re.Match[str]) -> str:
        return match[1] + rewritten(match[2], bases)

    pattern = r"^(\s*FROM\s+(?:--\S+\s+)*|\s*COPY\s+(?:--\S+\s+)*?--from=)(\S+)"
    return re.sub(pattern, other, dockerfile, flags=re.IGNORECASE | re.MULTILINE)


def rewritten(image: str, bases: Mapping[str, str]) -> str:
    """An image by the table of bases: its own entry, else that of the longest beginning."""
    if image in bases:
        return bases[image]
    beginnings = [key for key in bases if key.endswith(("/", ":")) and image.startswith(key)]
    longest = max(beginnings, key=len, default="")
    return bases[longest] + image[len(longest) :] if longest else image


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
