"""Plans the stages of a Dockerfile: what each instruction does, with all variables replaced. Pure.

Instructions that change only settings (ENV, USER, …) become part of the steps after them. So a stage is a list of steps
that change files, and the settings at its end.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent_runtime.dockerfiles.instructions import (
    Arg,
    Cmd,
    Copy,
    Dockerfile,
    Entrypoint,
    Env,
    From,
    Healthcheck,
    Heredoc,
    Instruction,
    Mount,
    OnBuild,
    Problem,
    Run,
    Shell,
    User,
    Workdir,
)
from agent_runtime.dockerfiles.mounts import MountError, read_mount
from agent_runtime.dockerfiles.words import WordError, expand, expand_heredoc

SHELL = ("/bin/sh", "-c")
SCRATCH = "scratch"
"""Name of the empty image."""
_REMOTE = ("http://", "https://", "git@", "ssh://")
_SHOWN_CHARACTERS = 120
STAGES = 100
"""Limit of stages; each that starts from, or copies from, the one before takes a part of Python's stack."""
SCRIPT = "/tmp/.dockerfile-script"
"""Where a RUN whose only argument is a script with an interpreter is written while it runs."""


class PlanFailed(Exception):
    """A Dockerfile that cannot be built here; `problems` has all reasons by line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"line {problem.line}: {problem.message}" for problem in problems))
        self.problems = problems


@dataclass(frozen=True)
class Settings:
    """Settings of a stage, for its next instruction and for programs in the finished image."""

    arguments: Mapping[str, str] = field(default_factory=dict)
    """Values of ARG. Stages that start from this one have them too."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the base image and of ENV."""
    own_env: Mapping[str, str] = field(default_factory=dict)
    """Only those of ENV."""
    working_dir: str = "/"
    user: str | None = None
    """None: the base image's."""
    shell: tuple[str, ...] = SHELL
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    healthcheck: Healthcheck | None = None
    on_build: tuple[OnBuild, ...] = ()


@dataclass(frozen=True)
class Folder:
    """A folder that WORKDIR creates if it is missing."""

    path: str
    user: str | None = None
    """Its owner; None: the base image's user."""


@dataclass(frozen=True)
class RunStep:
    """A command. `mounts` are present only while it runs."""

    line: int
    text: str
    """The instruction, for people."""
    folders: tuple[Folder, ...]
    command: tuple[str, ...]
    script: str | None
    """Content of the file SCRIPT that the command is."""
    env: Mapping[str, str]
    working_dir: str
    user: str | None
    mounts: tuple[Mount, ...]
    has_network: bool


@dataclass(frozen=True)
class CopyStep:
    """Files of the build context, of another stage or of an image."""

    line: int
    text: str
    folders: tuple[Folder, ...]
    sources: tuple[str, ...]
    inline: tuple[tuple[str, bytes], ...]
    """Names and contents of the files that the Dockerfile itself contains."""
    destination: str
    """Absolute; ends with `/` if it is a folder."""
    source: int | str | None
    """As `Input.source`."""
    owner: str | None
    mode: int | None
    excludes: tuple[str, ...]
    keeps_parents: bool
    unpacks: bool


@dataclass(frozen=True)
class FoldersStep:
    """Folders of WORKDIR at the end of a stage."""

    line: int
    text: str
    folders: tuple[Folder, ...]


Step = RunStep | CopyStep | FoldersStep


@dataclass(frozen=True)
class Input:
    """What a step copies or mounts."""

    source: int | str | None
    """A stage's number or an image; None: the build context."""
    paths: tuple[str, ...]


@dataclass(frozen=True)
class StagePlan:
    """A stage."""

    steps: tuple[Step, ...]
    settings: Settings


def bases(dockerfile: Dockerfile, arguments: Mapping[str, str], machine: str) -> list[int | str]:
    """Return the base of each stage: an earlier stage's number, or an image. Raises PlanFailed."""
    found, problems = read_bases(dockerfile, arguments, machine)
    if problems:
        raise PlanFailed(_unique(problems))
    return found


def read_bases(
    dockerfile: Dockerfile, arguments: Mapping[str, str], machine: str
) -> tuple[list[int | str], list[Problem]]:
    """Return the base of each stage as far as it is known, and what is wrong. Raises PlanFailed for too many stages."""
    problems = list(dockerfile.problems)
    if len(dockerfile.stages) > STAGES:
        line = dockerfile.stages[STAGES].start.line
        raise PlanFailed([Problem(line, f"{len(dockerfile.stages)} stages; at most {STAGES} are supported")])
    known = _global_arguments(dockerfile, arguments, machine, problems)
    found: list[int | str] = []
    for number, stage in enumerate(dockerfile.stages):
        start = stage.start
        image = _expanded(start.image, known, dockerfile, start.line, problems)
        if not image:
            problems.append(Problem(start.line, f"FROM {start.image}: no image; give the ARG before it a default"))
        problems += _platform_problems(start, _expanded(start.platform or "", known, dockerfile, start.line, problems))
        # By name only: a number is an image's name here.
        below = None if image.isdigit() else dockerfile.stage(image, before=number)
        found.append(image if below is None else below)
    return found, problems


def _platform_problems(start: From, platform: str) -> list[Problem]:
    # `--platform=$BUILDPLATFORM` and the like are this machine's.
    if platform and not platform.startswith("linux"):
        return [Problem(start.line, f"--platform={platform} is not supported; only linux is")]
    return []


def _platform_arguments(machine: str) -> dict[str, str]:
    platform = f"linux/{machine}"
    return {
        f"{kind}{what}": value
        for kind in ("TARGET", "BUILD")
        for what, value in (("PLATFORM", platform), ("OS", "linux"), ("ARCH", machine), ("VARIANT", ""))
    }


def _global_arguments(
    dockerfile: Dockerfile, arguments: Mapping[str, str], machine: str, problems: list[Problem]
) -> dict[str, str]:
    known = _platform_arguments(machine)
    for arg in dockerfile.global_args:
        for name, default in arg.items:
            if name in arguments:
                known[name] = arguments[name]
            elif default is not None:
                known[name] = _expanded(default, known, dockerfile, arg.line, problems)
    return known


def _expanded(
    word: str, variables: Mapping[str, str], dockerfile: Dockerfile, line: int, problems: list[Problem]
) -> str:
    try:
        return expand(word, variables, dockerfile.escape)
    except WordError as error:
        problems.append(Problem(line, f"{word!r}: {error}"))
        return ""


def _unique(problems: Sequence[Problem]) -> list[Problem]:
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.line)


def plan_stage(
    dockerfile: Dockerfile, number: int, start: Settings, arguments: Mapping[str, str], machine: str
) -> StagePlan:
    """Return the plan of one stage that begins with the settings of its base. Raises PlanFailed."""
    planner = _Planner(dockerfile, number, start, arguments, machine)
    for instruction in dockerfile.stages[number].instructions:
        planner.add(instruction)
    return planner.finish()


class _Planner:
    def __init__(
        self, dockerfile: Dockerfile, number: int, start: Settings, arguments: Mapping[str, str], machine: str
    ) -> None:
        self._dockerfile, self._number, self._given = dockerfile, number, arguments
        self._problems: list[Problem] = []
        self._settings = replace(start, on_build=())
        self._globals = _global_arguments(dockerfile, arguments, machine, self._problems)
        self._has_command = False
        self._folders: list[Folder] = []
        self._steps: list[Step] = []
        self._line = dockerfile.stages[number].start.line

    def finish(self) -> StagePlan:
        if self._folders:
            paths = " ".join(folder.path for folder in self._folders)
            self._steps.append(FoldersStep(self._line, f"WORKDIR {paths}", self._taken_folders()))
        if self._problems:
            raise PlanFailed(_unique(self._problems))
        return StagePlan(tuple(self._steps), self._settings)

    def add(self, instruction: Instruction) -> None:
        self._line = instruction.line
        settings = self._settings
        match instruction:
            case Arg():
                self._declare(instruction)
            case Env():
                # All of its values see the variables before it.
                new = {name: self._expand(value) for name, value in instruction.items}
                self._settings = replace(settings, env={**settings.env, **new}, own_env={**settings.own_env, **new})
            case Workdir():
                path = posixpath.join(settings.working_dir, self._expand(instruction.path) or "/")
                self._settings = replace(settings, working_dir=posixpath.normpath(path))
                self._folders.append(Folder(self._settings.working_dir, settings.user))
            case User():
                self._settings = replace(settings, user=self._expand(instruction.user) or None)
            case Shell():
                self._settings = replace(settings, shell=instruction.words)
            case Entrypoint():
                # As in Docker: ENTRYPOINT removes the CMD of the base image. A CMD of this stage stays.
                command = settings.command if self._has_command else None
                self._settings = replace(settings, entrypoint=self._argv(instruction.command), command=command)
            case Cmd():
                self._has_command = True
                self._settings = replace(settings, command=self._argv(instruction.command))
            case Healthcheck():
                self._settings = replace(settings, healthcheck=instruction)
            case OnBuild():
                self._settings = replace(settings, on_build=(*settings.on_build, instruction))
            case Run():
                self._run(instruction)
            case Copy():
                self._copy(instruction)

    def _variables(self) -> dict[str, str]:
        return {**self._settings.arguments, **self._settings.env}

    def _expand(self, word: str) -> str:
        return _expanded(word, self._variables(), self._dockerfile, self._line, self._problems)

    def _refuse(self, message: str) -> None:
        self._problems.append(Problem(self._line, message))

    def _declare(self, instruction: Arg) -> None:
        for name, default in instruction.items:
            value = self._globals.get(name) if default is None else self._expand(default)
            value = self._given.get(name, value)
            if value is not None:
                arguments = {**self._settings.arguments, name: value}
                self._settings = replace(self._settings, arguments=arguments)

    def _argv(self, command: str | tuple[str, ...]) -> tuple[str, ...]:
        return (*self._settings.shell, command) if isinstance(command, str) else command

    def _taken_folders(self) -> tuple[Folder, ...]:
        folders, self._folders = tuple(self._folders), []
        return folders

    def _run(self, run: Run) -> None:
        if run.security not in (None, "sandbox"):
            self._refuse(f"RUN --security={run.security} is not supported; remove it")
        if run.network not in (None, "default", "none"):
            self._refuse(f"RUN --network={run.network} is not supported; remove it, or use none")
        if run.devices:
            self._refuse("RUN --device is not supported; remove it")
        command, script = run.command if run.script is None else run.script, None
        if run.executable is not None:
            command, script = SCRIPT, run.executable.content
        settings = self._settings
        self._steps.append(
            RunStep(
                line=run.line,
                text=f"RUN {_shown(run.command, run.heredocs)}",
                folders=self._taken_folders(),
                command=self._argv(command),
                script=script,
                env={**settings.arguments, **settings.own_env},
                working_dir=settings.working_dir,
                user=settings.user,
                mounts=tuple(found for mount in run.mounts if (found := self._mount(mount)) is not None),
                has_network=run.network != "none",
            )
        )

    def _mount(self, mount: Mount) -> Mount | None:
        if mount.type == "ssh":
            if mount.required:
                self._refuse("RUN --mount=type=ssh is not supported; copy the sources into the build context")
            return None
        try:
            read = read_mount(mount.written, lambda word: expand(word, self._variables(), self._dockerfile.escape))
        except (MountError, WordError) as error:
            self._refuse(f"RUN --mount={mount.written}: {error}")
            return None
        return replace(read, target=read.target and posixpath.join(self._settings.working_dir, read.target))

    def _copy(self, copy: Copy) -> None:
        sources = tuple(self._expand(source) for source in copy.sources)
        if copy.kind == "ADD":
            for source in sources:
                if source.startswith(_REMOTE) or ".git#" in source or source.endswith(".git"):
                    self._refuse(
                        f"ADD {source}: remote sources are not supported; fetch it in a RUN, or put it in the context"
                    )
        elif remote := next((source for source in sources if source.startswith(_REMOTE[:2])), None):
            self._refuse(f"COPY {remote}: a source cannot be a URL; fetch it in a RUN")
        written = self._expand(copy.destination)
        destination = posixpath.normpath(posixpath.join(self._settings.working_dir, written))
        if written.endswith(("/", "/.", "/..")) or written in (".", ".."):
            destination = destination.rstrip("/") + "/"
        mode = self._mode(copy)
        self._steps.append(
            CopyStep(
                line=copy.line,
                text=_cut(f"{copy.kind} {' '.join((*sources, *(h.name for h in copy.inline), written))}"),
                folders=self._taken_folders(),
                sources=sources,
                inline=tuple((heredoc.name, self._content(heredoc)) for heredoc in copy.inline),
                destination=destination,
                source=None if copy.from_ is None else self.stage_named(self._expand(copy.from_)),
                owner=None if copy.chown is None else self._expand(copy.chown),
                mode=mode,
                excludes=tuple(self._expand(pattern) for pattern in copy.excludes),
                keeps_parents=copy.parents,
                unpacks=copy.kind == "ADD" and copy.unpack is not False,
            )
        )

    def _content(self, heredoc: Heredoc) -> bytes:
        if not heredoc.expands:
            return heredoc.content.encode()
        try:
            return expand_heredoc(heredoc.content, self._variables()).encode()
        except WordError as error:
            self._refuse(f"<<{heredoc.name}: {error}")
            return b""

    def _mode(self, copy: Copy) -> int | None:
        if copy.chmod is None:
            return None
        written = self._expand(copy.chmod)
        try:
            return int(written, 8) & 0o7777
        except ValueError:
            self._refuse(f"--chmod={written} is not supported; give the mode in octal, such as 755")
            return None

    def stage_named(self, name: str) -> int | str:
        """Return the number of an earlier stage of that name or number, or the name, which is an image's."""
        found = self._dockerfile.stage(name, before=self._number)
        if found is None and name.isdigit():
            self._refuse(f"--from={name}: no stage with that number is above this one")
        return name if found is None else found


def inputs_of(dockerfile: Dockerfile, number: int, step: Step) -> list[Input]:
    """Return what a step of a stage copies or mounts: one input for COPY, one for each bind mount of RUN."""
    if isinstance(step, CopyStep):
        return [Input(step.source, step.sources)]
    if not isinstance(step, RunStep):
        return []
    planner = _Planner(dockerfile, number, Settings(), {}, "")
    return [
        Input(None if mount.from_ is None else planner.stage_named(mount.from_), (mount.source or "/",))
        for mount in step.mounts
        if mount.type == "bind"
    ]


def _shown(command: str | tuple[str, ...], heredocs: Sequence[Heredoc]) -> str:
    text = command if isinstance(command, str) else " ".join(command)
    if not text.strip() and heredocs:
        text = heredocs[0].content
    return _cut(" ".join(text.split()))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
