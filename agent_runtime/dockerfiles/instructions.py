"""Instructions of a Dockerfile, as written: variables are not replaced.

Reference: https://docs.docker.com/reference/dockerfile/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Command = str | tuple[str, ...]
"""Shell form or exec form."""


@dataclass(frozen=True)
class Problem:
    """An error of a Dockerfile. `line` is counted from 1."""

    line: int
    message: str


@dataclass(frozen=True)
class Heredoc:
    """A text that follows an instruction, up to a line with its name."""

    name: str
    content: str
    expands: bool
    """Whether variables in it are replaced."""


@dataclass(frozen=True)
class Mount:
    """A `RUN --mount`."""

    type: Literal["bind", "cache", "secret", "tmpfs", "ssh"]
    target: str | None = None
    source: str | None = None
    from_: str | None = None
    id: str | None = None
    required: bool = False
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    env: str | None = None
    """For secrets: the variable that gets the value."""


@dataclass(frozen=True)
class From:
    line: int
    image: str
    name: str | None = None
    platform: str | None = None


@dataclass(frozen=True)
class Arg:
    line: int
    items: tuple[tuple[str, str | None], ...]
    """Names and defaults."""


@dataclass(frozen=True)
class Env:
    line: int
    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Run:
    line: int
    command: Command
    heredocs: tuple[Heredoc, ...] = ()
    mounts: tuple[Mount, ...] = ()
    network: str | None = None
    security: str | None = None


@dataclass(frozen=True)
class Copy:
    """COPY or ADD."""

    line: int
    kind: Literal["COPY", "ADD"]
    sources: tuple[str, ...]
    destination: str
    inline: tuple[Heredoc, ...] = ()
    """Files whose contents are in the Dockerfile."""
    from_: str | None = None
    chown: str | None = None
    chmod: str | None = None
    parents: bool = False
    excludes: tuple[str, ...] = ()
    unpack: bool | None = None


@dataclass(frozen=True)
class Workdir:
    line: int
    path: str


@dataclass(frozen=True)
class User:
    line: int
    user: str


@dataclass(frozen=True)
class Shell:
    line: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Entrypoint:
    line: int
    command: Command


@dataclass(frozen=True)
class Cmd:
    line: int
    command: Command


@dataclass(frozen=True)
class Healthcheck:
    """`command` is None for HEALTHCHECK NONE; durations are in seconds."""

    line: int
    command: Command | None
    interval: float | None = None
    timeout: float | None = None
    start_period: float | None = None
    start_interval: float | None = None
    retries: int | None = None


@dataclass(frozen=True)
class OnBuild:
    line: int
    instruction: str


@dataclass(frozen=True)
class Other:
    """LABEL, EXPOSE, VOLUME, STOPSIGNAL or MAINTAINER, which change nothing in a workspace."""

    line: int
    name: str
    text: str


Instruction = (
    Arg | Env | Run | Copy | Workdir | User | Shell | Entrypoint | Cmd | Healthcheck | OnBuild | Other
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A FROM and the instructions after it."""

    start: From
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Dockerfile:
    """A parsed Dockerfile. With `problems`, the rest is incomplete."""

    global_args: tuple[Arg, ...]
    stages: tuple[Stage, ...]
    escape: str
    problems: tuple[Problem, ...]
