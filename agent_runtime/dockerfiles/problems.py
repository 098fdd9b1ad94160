"""What this project cannot build in a Dockerfile, and its base image, found without building it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_runtime.dockerfiles.instructions import Problem
from agent_runtime.dockerfiles.parse import parse
from agent_runtime.dockerfiles.plan import SCRATCH, PlanFailed, Settings, bases, plan_stage

_ANY_MACHINE = "amd64"


def problems_of(text: str, arguments: Mapping[str, str]) -> Sequence[Problem]:
    """Return what is wrong or unsupported in a Dockerfile, by line."""
    parsed = parse(text)
    try:
        below = bases(parsed, arguments, _ANY_MACHINE)
    except PlanFailed as failed:
        return failed.problems
    found: list[Problem] = []
    settings: list[Settings] = []
    for number, base in enumerate(below):
        start = settings[base] if isinstance(base, int) else Settings()
        if base == SCRATCH:
            line = parsed.stages[number].start.line
            found.append(Problem(line, "FROM scratch is not supported: a step needs the files of an image; name one"))
        try:
            start = plan_stage(parsed, number, start, arguments, _ANY_MACHINE).settings
        except PlanFailed as failed:
            found += failed.problems
        settings.append(start)
    return sorted(dict.fromkeys(found), key=lambda problem: problem.line)


def base_of(text: str, arguments: Mapping[str, str], target: str | None) -> str | None:
    """Return the image below the last stage of a Dockerfile, or below the stage `target`; None if it cannot be read."""
    parsed = parse(text)
    try:
        below = bases(parsed, arguments, _ANY_MACHINE)
    except PlanFailed:
        return None
    base: int | str | None = len(below) - 1 if target is None else parsed.stage(target)
    while isinstance(base, int):
        base = below[base]
    return base
