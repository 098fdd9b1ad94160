"""The instructions of a Dockerfile, as `parse` returns them.

Every value is as written: variables are not expanded, and quotes and escapes are kept where BuildKit expands a value
later. Expand such a value with `words.expand`. `line` is the 1-based line in which an instruction starts.
"""

from dataclasses import dataclass
from typing import Literal

SHEBANG = "#!"

Command = str | tuple[str, ...]
"""The shell form is a text, the exec form its words."""


@dataclass(frozen=True)
class Problem:
    """A line that BuildKit refuses, or that cannot be replayed."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


@dataclass(frozen=True)
class Heredoc:
    """An inline document: the lines between `<<NAME` and `NAME`."""

    name: str
    content: str
    """The lines, without leading tabs if `<<-` starts the heredoc."""
    expands: bool
    """Whether variables are expanded: not if a part of the name is quoted. RUN leaves expansion to the shell."""
    written: str
    """The lines with their leading tabs, for a shell that reads the heredoc itself."""


@dataclass(frozen=True)
class Mount:
    """A `--mount` of a RUN instruction.

    `parse` reads each option as written. A number or boolean that contains a variable has its default until
    `mounts.read_mount(mount.written, expand)` reads the mount again with the values of the variables.
    """

    written: str
    type: Literal["bind", "cache", "secret", "tmpfs", "ssh"] = "bind"
    target: str | None = None
    source: str | None = None
    from_: str | None = None
    id: str | None = None
    read_only: bool = True
    required: bool = False
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    """Limit of a tmpfs in bytes."""
    sharing: Literal["shared", "private", "locked"] | None = None
    env: str | None = None
    """Environment variable of a secret."""


@dataclass(frozen=True)
class From:
    """Start of a stage."""

    line: int
    image: str
    name: str | None = None
    """Name of the stage in lower case; stages are found by name regardless of case."""
    platform: str | None = None


@dataclass(frozen=True)
class Arg:
    """Build arguments with their defaults."""

    line: int
    items: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Env:
    """Environment variables."""

    line: int
    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Run:
    """A command that changes the file system."""

    line: int
    command: Command
    """The text after the flags, without the content of heredocs; see `script`."""
    heredocs: tuple[Heredoc, ...] = ()
    mounts: tuple[Mount, ...] = ()
    network: str | None = None
    """"default", "none" or "host"."""
    security: str | None = None
    """"sandbox" or "insecure"."""
    devices: tuple[str, ...] = ()
    script_is_heredoc: bool = False
    """Whether the command is one heredoc and nothing else, so that its content is the script."""

    @property
    def script(self) -> str | None:
        """Return the text for the shell, with the heredocs; None for the exec form."""
        if isinstance(self.command, tuple):
            return None
        if self.script_is_heredoc:
            return self.heredocs[0].content
        return self.command + "".join(f"\n{heredoc.written}{heredoc.name}" for heredoc in self.heredocs)

    @property
    def executable(self) -> Heredoc | None:
        """Return the heredoc that starts with `#!`, so that its own interpreter runs it and not the shell; else None.

        BuildKit writes it to `/dev/pipes/<name>` (mode 0755) and passes that path to the shell.
        """
        if self.script_is_heredoc and self.heredocs[0].content.startswith(SHEBANG):
            return self.heredocs[0]
        return None


@dataclass(frozen=True)
class Copy:
    """COPY or ADD: files of the build context, of a stage, of an image, of the network or of the Dockerfile itself."""

    line: int
    kind: Literal["COPY", "ADD"]
    sources: tuple[str, ...]
    destination: str
    inline: tuple[Heredoc, ...] = ()
    """Sources that are heredocs; a file gets the name of its heredoc."""
    from_: str | None = None
    chown: str | None = None
    chmod: str | None = None
    parents: bool = False
    excludes: tuple[str, ...] = ()
    """Patterns for `patterns.Ignore.of`."""
    unpack: bool | None = None


@dataclass(frozen=True)
class Workdir:
    """Working directory of later instructions."""

    line: int
    path: str


@dataclass(frozen=True)
class User:
    """User of later instructions."""

    line: int
    user: str


@dataclass(frozen=True)
class Shell:
    """Shell for later instructions in shell form."""

    line: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Entrypoint:
    """Program that a container starts; an empty tuple unsets that of the base image."""

    line: int
    command: Command


@dataclass(frozen=True)
class Cmd:
    """Arguments or program that a container starts by default; an empty tuple unsets that of the base image."""

    line: int
    command: Command


@dataclass(frozen=True)
class Healthcheck:
    """Check of a running container; times are seconds, and None means Docker's default."""

    line: int
    command: Command | None
    """None for `HEALTHCHECK NONE`, which removes the check of the base image."""
    interval: float | None = None
    timeout: float | None = None
    start_period: float | None = None
    retries: int | None = None


@dataclass(frozen=True)
class OnBuild:
    """An instruction for builds on top of this stage. `parse` reads it when it follows a FROM."""

    line: int
    instruction: str


@dataclass(frozen=True)
class Checked:
    """LABEL, EXPOSE, VOLUME, STOPSIGNAL or MAINTAINER: its syntax is checked, and it changes nothing in a workspace."""

    line: int
    keyword: str


Instruction = Arg | Env | Run | Copy | Workdir | User | Shell | Entrypoint | Cmd | Healthcheck | OnBuild | Checked
"""An instruction within a stage."""


@dataclass(frozen=True)
class Stage:
    """A FROM, and the instructions up to the next one."""

    start: From
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Dockerfile:
    """A parsed Dockerfile. If it has problems, its stages are incomplete."""

    global_args: tuple[Arg, ...]
    """Arguments before the first FROM. Stages see one only after they repeat its name."""
    stages: tuple[Stage, ...]
    escape: str
    problems: tuple[Problem, ...]

    def stage(self, name: str, before: int | None = None) -> int | None:
        """Return the index of the stage with this name or number, looking only at the first `before` stages; else None.

        The last stage of a name counts, as in BuildKit. A stage's own instructions see the stages before it.
        """
        limit = len(self.stages) if before is None else before
        for index in reversed(range(limit)):
            stage_name = self.stages[index].start.name
            if stage_name is not None and stage_name == name.lower():
                return index
        if name.isascii() and name.isdigit() and int(name) < limit:
            return int(name)
        return None
