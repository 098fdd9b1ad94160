"""Files of tasks, and Dockerfiles."""

import base64
from typing import Annotated, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from rollout_api.base import ApiModel, LongText, Path, Seconds, ShortText, exactly_one

FILE_CHARACTERS = 90_000_000
"""Longest base64 of one file: 64 MiB. Files of a task folder are held in memory and sent in one request."""

CONTEXT_FILES = 20_000
"""Most files of a build context, which are held in memory."""

TASK_FILES = 1024
"""Most files of one kind in a task, because each takes one request. Larger sets belong in the image."""


def without_parents(path: str) -> str:
    """Return a path as it is. Raises ValueError if it leaves its folder."""
    if ".." in path.split("/") or "\x00" in path:
        raise ValueError(f"{path!r} leaves the working directory; '..' is not allowed")
    return path


class TaskFile(ApiModel):
    """A file that is written into the workspace."""

    path: Path
    """Path, absolute or relative to the working directory."""
    content: LongText | None = None
    """Contents as text."""
    content_base64: Annotated[str, StringConstraints(max_length=FILE_CHARACTERS)] | None = None
    """Contents as base64. Exactly one of `content` and `contentBase64`."""
    mode: Annotated[str, StringConstraints(pattern=r"^0?[0-7]{3}$", max_length=4)] = "644"
    """Permission bits, octal."""

    @model_validator(mode="after")
    def _exactly_one_content(self) -> Self:
        try:
            exactly_one({"content": self.content, "contentBase64": self.content_base64})
        except ValueError as error:
            raise ValueError(f"file {self.path!r}: {error}") from None
        return self

    @field_validator("path")
    @classmethod
    def _path_stays_inside(cls, path: str) -> str:
        return without_parents(path)

    @field_validator("content_base64")
    @classmethod
    def _base64_decodes(cls, text: str | None) -> str | None:
        if text is not None:
            base64.b64decode(text, validate=True)
        return text

    def data(self) -> bytes:
        """Return the contents as bytes."""
        if self.content is not None:
            return self.content.encode()
        return base64.b64decode(self.content_base64 or "")


class ContextFile(TaskFile):
    """A file of a build context."""

    link: Path | None = None
    """Target of a symbolic link, instead of contents."""

    @model_validator(mode="after")
    def _exactly_one_content(self) -> Self:
        try:
            exactly_one({"content": self.content, "contentBase64": self.content_base64, "link": self.link})
        except ValueError as error:
            raise ValueError(f"file {self.path!r}: {error}") from None
        return self


class Dockerfile(ApiModel):
    """A Dockerfile with its build context. The job builds it as layers over its base image, without a registry."""

    text: Annotated[str, StringConstraints(min_length=1, max_length=1 << 20)]
    """Contents of the Dockerfile."""
    context: Annotated[list[ContextFile], Field(max_length=CONTEXT_FILES)] = []
    """Files of the build context, with paths relative to it."""
    args: Annotated[dict[str, Annotated[str, StringConstraints(max_length=32_768)]], Field(max_length=256)] = {}
    """Values of ARG, which replace those of `tasks.dockerfiles.args`."""
    bases: Annotated[dict[ShortText, ShortText], Field(max_length=256)] = {}
    """Images that replace those named in it, before those of `tasks.dockerfiles.bases`."""
    target: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """Stage that is used; the last one when left out."""
    seconds: Seconds = 600
    """Time limit for each of its commands."""
