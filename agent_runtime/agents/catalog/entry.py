"""What the catalog knows about one agent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollout_api.rollout_job import TrajectoryFormat


@dataclass(frozen=True)
class Package:
    """A published package, and the program in it."""

    registry: Literal["npm", "PyPI"]
    name: str
    version: str
    """The version that is tested and installed by default."""
    program: str
    """The agent's command."""
    needs: str
    """What the image must have to install and run it."""
    companions: Sequence[str] = ()
    """Requirements with versions that the package does not declare."""
    version_command: str | None = None
    """Shell command that prints the version; None for `--version` of the program."""


@dataclass(frozen=True)
class Entry:
    """Facts about an agent. In `command`, `stdin`, `env` and `files`, these fields are replaced: `{prompt}`,
    `{promptFile}`, `{model}`, `{url}` (of the session proxy, without a path), `{home}` (the agent's home folder).
    """

    package: Package
    command: Sequence[str]
    """Program and arguments. `{arguments}` stands for those of the manifest."""
    protocol: str
    """The API by which it calls the model."""
    trajectory: str | None = None
    """Pattern of its session file, relative to its home folder; None if it writes none with a structure."""
    format: TrajectoryFormat | None = None
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration files by their path in the home folder; in them, values are escaped as in a JSON string."""
    exit_codes: Mapping[int, str] = field(default_factory=dict)
    """Meaning of exit codes besides 0. All of them are AgentError."""
