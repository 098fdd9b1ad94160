"""What a Dockerfile tells without being built: what this project cannot build in it, and facts about its image. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_runtime.dockerfiles.instructions import Problem, Stage, User, Workdir
from agent_runtime.dockerfiles.parse import parse
from agent_runtime.dockerfiles.plan import SCRATCH, PlanFailed, Settings, bases, plan_stage, read_bases
from agent_runtime.dockerfiles.words import WordError, expand

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


@dataclass(frozen=True)
class Facts:
    """What a Dockerfile tells about its image; None if it says nothing, or only a build can know it."""

    base: str | None = None
    working_dir: str | None = None
    user: str | None = None


def facts_of(text: str, arguments: Mapping[str, str], target: str | None) -> Facts:
    """Return facts about the last stage of a Dockerfile, or about the stage `target`."""
    parsed = parse(text)
    try:
        below, problems = read_bases(parsed, arguments, _ANY_MACHINE)
    except PlanFailed:
        return Facts()
    chain: list[Stage] = []
    base: int | str | None = len(below) - 1 if target is None else parsed.stage(target)
    while isinstance(base, int) and base >= 0:
        chain.insert(0, parsed.stages[base])
        base = below[base]
    # A relative path means that the folder of the base image is a part of it.
    working_dir, user = "", None
    for instruction in (instruction for stage in chain for instruction in stage.instructions):
        match instruction:
            case Workdir():
                path = _constant(instruction.path, parsed.escape)
                working_dir = "" if path is None else posixpath.normpath(posixpath.join(working_dir, path or "/"))
            case User():
                user = _constant(instruction.user, parsed.escape) or None
    return Facts(
        base=base if isinstance(base, str) and not problems else None,
        working_dir=working_dir if working_dir.startswith("/") else None,
        user=user,
    )


def _constant(word: str, escape: str) -> str | None:
    """Return the value of a word; None if it depends on variables."""
    try:
        return None if "$" in word else expand(word, {}, escape)
    except WordError:
        return None
