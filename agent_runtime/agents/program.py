"""Turn the agent of a manifest into the program that the engine runs: of `Command`, the manifest's own fields; of an
agent of the catalog, its entry.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent_runtime.agents.catalog import CATALOG
from agent_runtime.agents.catalog.entry import Package
from rollout_api.rollout_job import Agent, AgentTrajectory

PROMPT_FILE: Final = "{promptFile}"
FOLDER: Final = "/tmp/.rollout"
"""Folder in the workspace for the prompt, the agent's home and installed agents. No artifact is below it."""
HOME: Final = f"{FOLDER}/home"
_INSTALLED: Final = f"{FOLDER}/agents"
_ARGUMENTS: Final = "{arguments}"
_OF_COMMAND: Final = ("prompt", "promptFile", "model")
_OF_CATALOG: Final = (*_OF_COMMAND, "url", "home")


@dataclass(frozen=True)
class ProgramSpec:
    """A program and what it needs. Paths are those of a workspace whose root is `/`."""

    command: Sequence[str]
    fields: Sequence[str]
    """Names that are replaced, in braces, in `command`, `stdin`, `env` and `files`."""
    install: Sequence[str] = ()
    """Shell commands that install it, run in the working directory."""
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration files by their path below `HOME`, which exists if there are any."""
    search_path: str | None = None
    """Folder that is searched for programs first."""
    trajectory: AgentTrajectory | None = None
    """The agent's trajectory file; `*` in the path is any text without a slash."""

    @property
    def needs_prompt_file(self) -> bool:
        """Whether the prompt is given as a file."""
        return any(PROMPT_FILE in text for text in self.command)

    @property
    def needs_place(self) -> bool:
        """Whether the program is given absolute paths of the workspace."""
        return self.needs_prompt_file or "home" in self.fields

    def filled(self, values: Mapping[str, str]) -> "Filled":
        """Return the program with its fields replaced. `values` has the value of each field."""
        pattern = re.compile(rf"\{{({'|'.join(self.fields)})\}}")

        def fill(text: str, *, escape: bool = False) -> str:
            return pattern.sub(lambda found: _escaped(values[found[1]]) if escape else values[found[1]], text)

        return Filled(
            command=[fill(argument) for argument in self.command],
            stdin=fill(self.stdin),
            env={name: fill(value) for name, value in self.env.items()},
            files={posixpath.join(HOME, path): fill(text, escape=True) for path, text in self.files.items()},
        )


@dataclass(frozen=True)
class Filled:
    """A program for one rollout."""

    command: Sequence[str]
    stdin: str
    env: Mapping[str, str]
    files: Mapping[str, str]
    """Contents by path."""


def program_of(agent: Agent, working_dir: str) -> ProgramSpec | None:
    """Return the program of an agent; None if the agent runs in the engine. `working_dir` is that of the workspace."""
    if not agent.is_program:
        return None
    if (entry := CATALOG.get(agent.type)) is None:
        return ProgramSpec(agent.command, _OF_COMMAND, install=agent.install, trajectory=agent.trajectory)
    options = agent.catalog_options
    package = entry.package
    version = options.version or package.version
    trajectory = None
    if entry.trajectory is not None:
        trajectory = AgentTrajectory(path=f"{HOME}/{entry.trajectory}", format=entry.format)
    folder = f"{_INSTALLED}/{package.program}-{version}"
    return ProgramSpec(
        command=[
            given
            for argument in entry.command
            for given in (options.arguments if argument == _ARGUMENTS else [argument])
        ],
        fields=_OF_CATALOG,
        install=[_install_command(agent.type, package, version, folder, working_dir)],
        stdin=entry.stdin,
        env={"HOME": "{home}", **entry.env},
        files={".profile": "", **entry.files},
        search_path=f"{folder}/{_PROGRAMS[package.registry]}",
        trajectory=trajectory,
    )


_PROGRAMS: Final = {"npm": "node_modules/.bin", "PyPI": "bin"}
"""Folder of the programs of an installed package."""
_INSTALLER: Final = {"npm": "npm", "PyPI": "python3"}
_INSTALL_SCRIPT: Final = """\
# Install {program} {version}
here=$(pwd -P) && root=${{here%{working_dir}}} || exit 1
[ "$root" != "$here" ] || root=
folder=$root{folder} HOME=$root{setup_home}
PATH=$folder/{programs}:$PATH
export HOME PATH
mkdir -p "$HOME" || exit 1
{version_command} 2>/dev/null | grep -qwF -e {version} && exit 0
if ! command -v {installer} >/dev/null; then
  echo "agent.type {type}: {program} {version} is not on PATH, and neither is {installer} to install it. Use an image" \\
    "that has {program} {version}, or one that has: {needs}." >&2
  exit 1
fi
if ! {{ {install}; }}; then
  echo "agent.type {type}: {program} {version} is not on PATH, and its installation failed (above). It needs" \\
    "sandbox.network.setup: Public, and {needs} in the image. Or use an image that has {program} {version}." >&2
  exit 1
fi
rm -rf "$HOME"
"""


_NPM_RETRIES: Final = "--fetch-retries=2 --fetch-retry-mintimeout=1000 --fetch-retry-maxtimeout=5000"
"""Without a network, npm's own values take 70 s."""


def _install_command(kind: str, package: Package, version: str, folder: str, working_dir: str) -> str:
    """Return the shell command that installs a package, unless that version is on PATH already."""
    if package.registry == "npm":
        wanted = shlex.join([f"{package.name}@{version}", *package.companions])
        install = f'npm install --prefix "$folder" --no-audit --no-fund --loglevel=error {_NPM_RETRIES} {wanted}'
    else:
        wanted = shlex.join([f"{package.name}=={version}", *package.companions])
        pip = '"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir'
        install = f'python3 -m venv "$folder" && {pip} {wanted}'
    return _INSTALL_SCRIPT.format(
        working_dir=shlex.quote(working_dir.rstrip("/")), folder=folder, setup_home=f"{FOLDER}/setup",
        program=package.program, version=shlex.quote(version), installer=_INSTALLER[package.registry], type=kind,
        needs=package.needs, install=install, programs=_PROGRAMS[package.registry],
        version_command=package.version_command or f"{package.program} --version",
    )  # fmt: skip


def _escaped(value: str) -> str:
    """Return a value as in a JSON string, which TOML's basic strings and double-quoted YAML have in common."""
    return json.dumps(value)[1:-1]
