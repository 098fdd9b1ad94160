"""The keys of build steps: digests of everything that a step depends on. A step whose key is stored is not made again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_runtime.builds.trees import Context, CopyProblem, File, mode_of
from agent_runtime.dockerfiles.instructions import Dockerfile as Parsed
from agent_runtime.dockerfiles.parse import parse
from agent_runtime.dockerfiles.patterns import Ignore
from agent_runtime.dockerfiles.plan import (
    CopyStep,
    Input,
    RunStep,
    Settings,
    StagePlan,
    Step,
    bases,
    inputs_of,
    plan_stage,
)
from agent_runtime.sandboxes.base import SetupFailed, WorkspaceSpec
from agent_runtime.sandboxes.prepare import preparation
from agent_runtime.tasks.images import rewritten
from rollout_api.files import Dockerfile


@dataclass(frozen=True)
class Base:
    """Facts about a base image, from a workspace of it."""

    identity: str
    env: Mapping[str, str]
    working_dir: str
    user: str | None
    """The image's own user, as uid:gid; None for root."""
    has_one_user: bool
    """Whether all files belong to the workspace's root, as without root on a laptop."""


@dataclass(frozen=True)
class Keyed:
    """A step and its key."""

    key: str
    step: Step
    stage: int


@dataclass(frozen=True)
class StageChain:
    """The steps of a stage and of the stages below it, from the image up."""

    image: str
    base: Base
    steps: tuple[Keyed, ...]
    settings: Settings

    @property
    def key(self) -> str:
        return self.steps[-1].key if self.steps else image_key(self.image, self.base)


def digest(*parts: Any) -> str:
    """Return the digest of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def image_key(image: str | None, base: Base) -> str:
    """Return the key below the lowest step."""
    return digest("image", image, base.identity)


def setup_key(spec: WorkspaceSpec, below: str, base: Base) -> str:
    """Return the key of a task's files and setup over the step, or the image, with the key `below`."""
    of_image = [base.env, base.user, base.working_dir if spec.working_dir_of_image else None]
    return digest("setup", below, preparation(spec), of_image)


class Recipe:
    """One task's Dockerfile, parsed."""

    def __init__(self, dockerfile: Dockerfile, arguments: Mapping[str, str], bases: Mapping[str, str]) -> None:
        self.dockerfile = dockerfile
        self._bases = {**bases, **dockerfile.bases}
        self.parsed: Parsed = parse(dockerfile.text)
        self.arguments = {**arguments, **dockerfile.args}
        files = {
            posixpath.normpath(file.path): File(file.data(), mode_of(file.mode), file.link)
            for file in dockerfile.context
        }
        ignored = files.get("Dockerfile.dockerignore") or files.get(".dockerignore")
        text = ignored.data.decode(errors="replace") if ignored is not None else ""
        self.context = Context.of(files, Ignore.parse(text))
        self.seconds = float(dockerfile.seconds)
        self.chains: dict[int, StageChain] = {}
        self.made: dict[int, Any] = {}
        """`Made` of the stages that were made, by their number."""

    def image_of(self, name: str) -> str:
        """Return the image that is used for one named in the Dockerfile."""
        return rewritten(name, self._bases)


class Keys:
    """The keys of one run, on a machine of that architecture.

    `base_of` returns facts about an image.
    """

    def __init__(self, base_of: Callable[[str, WorkspaceSpec], Awaitable[Base]], machine: str) -> None:
        self._base_of, self._machine = base_of, machine

    async def chain(self, recipe: Recipe, number: int, spec: WorkspaceSpec) -> StageChain:
        """Return the keyed steps of a stage. Raises PlanFailed, SandboxFailure."""
        if number in recipe.chains:
            return recipe.chains[number]
        below = bases(recipe.parsed, recipe.arguments, self._machine)[number]
        if isinstance(below, int):
            start = await self.chain(recipe, below, spec)
            image, base, steps, settings = start.image, start.base, list(start.steps), start.settings
        else:
            image = recipe.image_of(below)
            base = await self._base_of(image, spec)
            steps, settings = [], Settings(env=base.env, working_dir=base.working_dir)
        parsed = _with_triggers(recipe.parsed, number, settings)
        plan: StagePlan = plan_stage(parsed, number, settings, recipe.arguments, self._machine)
        key = StageChain(image, base, tuple(steps), settings).key
        for step in plan.steps:
            key = await self._key(key, step, recipe, number, spec)
            steps.append(Keyed(key, step, number))
        found = recipe.chains[number] = StageChain(image, base, tuple(steps), plan.settings)
        return found

    async def _key(self, below: str, step: Step, recipe: Recipe, stage: int, spec: WorkspaceSpec) -> str:
        described = dataclasses.asdict(step)
        for field in ("line", "text"):
            del described[field]
        if isinstance(step, CopyStep):
            described["inline"] = [[name, hashlib.sha256(data).hexdigest()] for name, data in step.inline]
        elif isinstance(step, RunStep):
            described["network"] = spec.network.get("setup", "None") if step.has_network else "None"
        inputs = [
            await self._input_key(needed, recipe, step.line, spec) for needed in inputs_of(recipe.parsed, stage, step)
        ]
        return digest(type(step).__name__, below, described, inputs)

    async def _input_key(self, needed: Input, recipe: Recipe, line: int, spec: WorkspaceSpec) -> str:
        if isinstance(needed.source, int):
            return (await self.chain(recipe, needed.source, spec)).key
        if needed.source is not None:
            image = recipe.image_of(needed.source)
            return image_key(image, await self._base_of(image, spec))
        content_digest = hashlib.sha256()
        for path in needed.paths:
            for found, real in in_context(recipe.context, path, line):
                for name, file in recipe.context.tree(real):
                    content = "" if file is None else f"{file.mode:o} {hashlib.sha256(file.data).hexdigest()}"
                    linked = [] if file is None or file.link is None else [file.link]
                    content_digest.update(json.dumps([path, found, name, content, *linked]).encode())
        return content_digest.hexdigest()


def in_context(context: Context, path: str, line: int) -> list[tuple[str, str]]:
    """Return the files of a context that a step names, each with its real path. Raises SetupFailed."""
    try:
        return context.found(path)
    except CopyProblem as problem:
        raise SetupFailed(f"Dockerfile, line {line}: {problem}") from problem


def _with_triggers(parsed: Parsed, number: int, start: Settings) -> Parsed:
    """Return the Dockerfile with the ONBUILD instructions of a stage's base at its beginning."""
    if not start.on_build:
        return parsed
    text = "\n".join(["FROM base", *(trigger.instruction for trigger in start.on_build)])
    line = parsed.stages[number].start.line
    triggers = tuple(dataclasses.replace(instruction, line=line) for instruction in parse(text).stages[0].instructions)
    stage = parsed.stages[number]
    stages = list(parsed.stages)
    stages[number] = dataclasses.replace(stage, instructions=(*triggers, *stage.instructions))
    return dataclasses.replace(parsed, stages=tuple(stages))
