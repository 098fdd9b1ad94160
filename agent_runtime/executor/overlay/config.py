"""The configuration of a host of workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# Longer than most model calls, so that a workspace at work does not rest between two of its commands.
REST_SECONDS = 60.0
MODES = ("Auto", "Overlay", "Plain")


class Bind(NamedTuple):
    """A file or folder of the machine that every workspace has at `target`, after the masks."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class HostConfig:
    """Settings with the keys of `docs/executor.md`; `state_dir` is absolute and exists.

    `environment` is the default environment of every command: in a container, the image's own.
    """

    state_dir: str
    mode: str = "Auto"
    places: int = 1
    root: str = "/"
    root_layers: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    binds: tuple[Bind, ...] = ()
    user: str | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    rest_seconds: float | None = REST_SECONDS
    """After so much time without a command, a workspace without processes ends its init; None: never."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}: one of {', '.join(MODES)} expected")
        if self.places < 1:
            raise ValueError(f"places is {self.places}: at least 1 expected")
        paths = [("stateDir", self.state_dir), ("root", self.root), *(("masks", mask) for mask in self.masks)]
        paths += [("rootLayers", layer) for layer in self.root_layers]
        if self.root_layers and self.mode != "Overlay":
            raise ValueError(f"mode is {self.mode!r}: rootLayers are only supported in Overlay")
        for source, target, _ in self.binds:
            paths += [("binds.source", source), ("binds.target", target)]
        for name, path in paths:
            if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
                raise ValueError(f"{name} is {path!r}: an absolute path without '..' expected")
