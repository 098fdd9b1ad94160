"""Builds the stages of Dockerfiles, and the setup of tasks, as layers over base images, in workspaces of a provider.

Each step is made in a new workspace with the layers below it. The workspace's changes are stored as a layer, under a key of
everything that the step depends on. A step whose key is stored is not made again; a stage is built only if a step that is
not stored copies from it. Nothing is kept in this process that a restarted runner would need.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import math
import os
import posixpath
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agent_runtime.builds.cache import BuildCache, Stored
from agent_runtime.builds.keys import Base, Keyed, Keys, Recipe, StageChain, digest, image_key, in_context, setup_key
from agent_runtime.builds.step_files import ROOT, StepFiles
from agent_runtime.builds.trees import Context, CopyProblem, File, Taken, context_tar
from agent_runtime.builds.workspaces import BuildWorkspaces
from agent_runtime.dockerfiles.patterns import Ignore
from agent_runtime.dockerfiles.plan import SCRATCH, SCRIPT, CopyStep, Input, PlanFailed, RunStep, Settings, inputs_of
from agent_runtime.recording.build_steps import BuildEntry
from agent_runtime.recording.layers import LayerTooLarge
from agent_runtime.sandboxes.base import (
    CommandResult,
    FileError,
    ImageSource,
    SandboxProvider,
    SetupFailed,
    StoredLayer,
    WorkspaceLimit,
    WorkspaceSpec,
    build_limits,
)
from agent_runtime.sandboxes.images.files import this_architecture
from agent_runtime.sandboxes.prepare import failed_command, prepared_id, setup_text
from agent_runtime.shared_tasks import has_failed, shared
from rollout_api.files import Dockerfile
from rollout_api.sandbox import NetworkAccess, Resources
from rollout_api.services import HealthCheck

# Docker's defaults of HEALTHCHECK: of interval and timeout, and of retries.
DOCKER_CHECK_SECONDS, DOCKER_CHECK_TRIES = 30.0, 3
# How shells, C programs, Python and Java report that they could not start a process or thread.
_NO_PROCESS = (os.strerror(errno.EAGAIN), "annot fork", "can't start new thread", "unable to create native thread")
_TOO_LARGE = (os.strerror(errno.EFBIG), str(signal.strsignal(signal.SIGXFSZ)))
# How programs report that they could not become another user, or give a file to one.
_NO_OTHER_USER = (os.strerror(errno.EINVAL), os.strerror(errno.EPERM))
# A shorter line of a secret, such as a brace, occurs in ordinary output.
_HIDDEN_LINE = 8


@dataclass(frozen=True)
class Made:
    """A stage that workspaces can start from."""

    image: str
    layers: tuple[StoredLayer, ...]
    settings: Settings
    key: str
    """Key of the uppermost step."""
    dockerfile: Dockerfile
    """Kept, so that no other one gets its id."""


@dataclass(frozen=True)
class BuildOptions:
    """What a job gives to all of its Dockerfiles."""

    bases: Mapping[str, str]
    """Images that replace those named in Dockerfiles."""
    arguments: Mapping[str, str]
    secrets: Mapping[str, bytes]
    label: str = "build"
    """First part of the names of its workspaces, different for each runner of a job."""
    on_step: Callable[[BuildEntry, bool], None] = lambda entry, was_stored: None
    """Called with each step that a build finds stored, and with each that it has made, once."""


class Builder:
    """Builds for one run. Equal steps that several tasks need at the same time are made once."""

    def __init__(self, provider: SandboxProvider, cache: BuildCache, options: BuildOptions) -> None:
        self._provider, self._cache, self._options = provider, cache, options
        machine = this_architecture()
        self._workspaces = BuildWorkspaces(provider, options.label, machine)
        self._keys = Keys(self._base, machine)
        self._bases: dict[str | None, asyncio.Task[Base]] = {}
        # By key and what is below, and then by limits: a task does not share the failure of another whose limits are lower.
        self._steps: dict[tuple[str, str], dict[object, asyncio.Task[BuildEntry]]] = {}
        # By group: what was made of its Dockerfiles and setup. Each attempt asks again.
        self._groups: dict[str, dict[object, asyncio.Task[Any]]] = {}

    async def completed(self, spec: WorkspaceSpec) -> WorkspaceSpec:
        """Return the specification with image, layers and settings of its Dockerfile, which is built if necessary.

        With `stores_setup`, a layer replaces files and setup. Raises SetupFailed with the failing instruction or command,
        SandboxFailure, StorageError.
        """
        if spec.services:
            # A layer of the setup has their names, and no volumes: those get what it has at their paths.
            alone = dataclasses.replace(spec, services=(), volumes={}, prepares_for=spec.services)
            own, *workspaces = await asyncio.gather(
                self.completed(alone), *(self.completed(service.workspace) for service in spec.services)
            )
            services = [
                dataclasses.replace(service, workspace=await self._within(own, service.name, workspace))
                for service, workspace in zip(spec.services, workspaces, strict=True)
            ]
            return dataclasses.replace(own, services=services, volumes=spec.volumes, prepares_for=())
        known, below = self._groups.setdefault(spec.group, {}), None
        # A lost layer is found when it is loaded; then all are looked up again.
        losses = self._cache.losses
        if spec.dockerfile is not None:
            make = partial(self._finished, spec.dockerfile, spec)
            made: Made = await self._once(known, (id(spec.dockerfile), losses), make)
            spec, below = completed_spec(spec, made), made.key
        # A start state replaces files and setup, and snapshots contain them.
        if not spec.stores_setup or spec.start is not None or not (spec.files or spec.setup):
            return dataclasses.replace(spec, stores_setup=False)
        layer = await self._once(known, (prepared_id(spec), losses), partial(self._set_up, spec, below))
        return dataclasses.replace(spec, layers=[*spec.layers, layer], files=(), setup=())

    async def _within(self, own: WorkspaceSpec, service: str, workspace: WorkspaceSpec) -> WorkspaceSpec:
        """Return a service's workspace for the sandbox of the task, whatever image that has. Raises SandboxFailure."""
        if workspace.image == own.image:
            return workspace
        if workspace.image is None or not isinstance(self._provider, ImageSource):
            raise SetupFailed(
                f"service {service!r} starts from image {workspace.image!r}, but the task from {own.image!r}; this "
                "provider needs the same base image for all Dockerfiles of a task (tasks.dockerfiles.bases)"
            )
        image = await self._provider.image_layers(workspace.image)
        has_own_program = bool(workspace.entrypoint)
        return dataclasses.replace(
            workspace,
            image=own.image,
            is_bare=True,
            layers=[*image.layers, *workspace.layers],
            env={**image.env, **workspace.env},
            user=workspace.user or image.user,
            entrypoint=workspace.entrypoint or image.entrypoint,
            command=workspace.command or (() if has_own_program else image.command),
        )

    def forget_group(self, group: str) -> None:
        """Forget Dockerfiles and setup of a group, which needs no further workspace."""
        self._groups.pop(group, None)

    async def close(self) -> None:
        """End all builds; what they have stored stays."""
        tasks: list[asyncio.Task[Any]] = [*self._bases.values()]
        for known in (*self._groups.values(), *self._steps.values()):
            tasks += known.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _finished(self, dockerfile: Dockerfile, spec: WorkspaceSpec) -> Made:
        recipe = await asyncio.to_thread(Recipe, dockerfile, self._options.arguments, self._options.bases)
        target = len(recipe.parsed.stages) - 1
        if dockerfile.target is not None:
            named = recipe.parsed.stage(dockerfile.target)
            if named is None:
                raise SetupFailed(f"Dockerfile: there is no stage {dockerfile.target!r}")
            target = named
        try:
            return await self._made(recipe, target, spec)
        except PlanFailed as failed:
            raise SetupFailed(f"Dockerfile: {failed}") from failed

    async def _made(self, recipe: Recipe, number: int, spec: WorkspaceSpec) -> Made:
        """Return a stage of a Dockerfile, made if necessary. The stages that it copies from are made too, because only their
        layers tell whether a stored step fits.
        """
        if number not in recipe.made:
            recipe.made[number] = await self._make_stage(recipe, number, spec)
        made: Made = recipe.made[number]
        return made

    async def _make_stage(self, recipe: Recipe, number: int, spec: WorkspaceSpec) -> Made:
        chain = await self._keys.chain(recipe, number, spec)
        stored = await asyncio.gather(*(self._cache.look_up(keyed.key) for keyed in chain.steps))
        layers: list[StoredLayer] = []
        for position, (keyed, found) in enumerate(zip(chain.steps, stored, strict=True)):
            copied = [needed.source for needed in inputs_of(recipe.parsed, keyed.stage, keyed.step)]
            sources = [await self._made(recipe, source, spec) for source in copied if isinstance(source, int)]
            over = digest_of(layers, *(source.layers for source in sources))
            below = chain.steps[position - 1].key if position else None
            make = partial(self._make, recipe, chain, keyed, below, over, tuple(layers), spec)
            limits = digest(recipe.seconds, build_limits(spec.resources).wire())
            entry = await self._find(keyed.key, over, found)
            layers.append(await self._layer(keyed.key, over, limits, entry, make))
        return Made(chain.image, tuple(layers), chain.settings, chain.key, recipe.dockerfile)

    async def _set_up(self, spec: WorkspaceSpec, below: str | None) -> StoredLayer:
        """Return the layer of a task's files and setup; `below` is the key of its Dockerfile's last step."""
        base = await self._base(spec.image, spec)
        key = setup_key(spec, below or image_key(spec.image, base), base)
        limits, over = digest(spec.setup_seconds, spec.resources.wire()), digest_of(spec.layers)
        make = partial(self._make_setup, spec, key, below, over, limits)
        entry = await self._find(key, over, await self._cache.look_up(key))
        return await self._layer(key, over, limits, entry, make)

    async def _layer(
        self, key: str, over: str, limits: str, found: BuildEntry | None, make: Callable[[], Any]
    ) -> StoredLayer:
        """Return the layer of a step that was found stored, or else is made."""
        if found is not None:
            self._options.on_step(found, True)
            return self._cache.stored(key, found)
        made = self._steps.setdefault((key, over), {})
        while others := [task for other, task in made.items() if other != limits and not has_failed(task)]:
            await asyncio.wait(others[:1])
            if not has_failed(others[0]):
                return self._cache.stored(key, others[0].result())
        return self._cache.stored(key, await self._once(made, limits, make))

    async def _make_setup(self, spec: WorkspaceSpec, key: str, below: str | None, over: str, limits: str) -> BuildEntry:
        """Prepare a workspace of the task and store what that changed. Raises SetupFailed, SandboxFailure, StorageError."""
        began = time.time()
        async with self._workspaces.prepared(spec, digest(key, limits)) as workspace:
            changes = workspace.snapshot((await workspace.layers())[0])
            try:
                entry = await self._cache.record(
                    key, changes, over=over, step=setup_text(spec), below=below, image=spec.image or "", began=began
                )
            except (FileError, WorkspaceLimit, LayerTooLarge) as error:
                raise SetupFailed(
                    f"what files and setup of the task change cannot be stored: {error}; leave out sandbox.storeSetup"
                ) from error
        self._options.on_step(entry, False)
        return entry

    async def _find(self, key: str, over: str, stored: Stored) -> BuildEntry | None:
        made = self._steps.get((key, over), {})
        if any(not task.done() for task in made.values()):
            return None
        before = dict(made)
        entry = await self._cache.find(key, over, stored)
        if entry is None:
            # Another runner of this run may have stored it since it was looked up.
            entry = await self._cache.find(key, over, await self._cache.look_up(key))
        if entry is None:
            # What this process made was lost since.
            for limits, task in before.items():
                if made.get(limits) is task:
                    del made[limits]
        return entry

    async def _once(self, tasks: dict[Any, asyncio.Task[Any]], key: object, make: Callable[[], Any]) -> Any:
        """Return the result of the one task for that key; a failed one is repeated by the next caller."""
        return await asyncio.shield(shared(tasks, key, make))

    async def _base(self, image: str | None, spec: WorkspaceSpec) -> Base:
        base: Base = await self._once(self._bases, image, partial(self._workspaces.read_base, image, spec))
        return base

    async def _make(
        self,
        recipe: Recipe,
        chain: StageChain,
        keyed: Keyed,
        below: str | None,
        over: str,
        layers: tuple[StoredLayer, ...],
        spec: WorkspaceSpec,
    ) -> BuildEntry:
        """Make one step and store its layer. Raises SetupFailed, SandboxFailure, StorageError."""
        step, began = keyed.step, time.time()
        where = f"Dockerfile, line {step.line}: {step.text}"
        if chain.image == SCRATCH:
            raise SetupFailed(f"{where}: FROM scratch is not supported, because a step needs the files of an image")
        network, limits = spec.network.get("setup", "None"), build_limits(spec.resources)
        try:
            with contextlib.ExitStack() as stack:
                # Before this step has a place: with few places, two builds could wait for each other's.
                taken = await self._inputs(recipe, keyed, spec, stack)
                async with self._workspaces.bare(chain.image, layers, spec, "build") as workspace:
                    hands = StepFiles(workspace, chain.base.has_one_user)
                    await hands.make_folders(step.folders, chain.base.user)
                    if isinstance(step, RunStep):
                        await self._run(step, hands, taken, recipe, where, network, limits, chain.base)
                    elif isinstance(step, CopyStep):
                        await hands.copy(step, taken[0])
                    await workspace.kill_all(key="4:end")
                    changes = workspace.snapshot()
                    entry = await self._cache.record(
                        keyed.key, changes, over=over, step=step.text, below=below, image=chain.image, began=began
                    )
                    self._options.on_step(entry, False)
                    return entry
        except WorkspaceLimit as error:
            hint = f"; {_disk_hint(limits)}" if error.cause == "Disk" else ""
            raise SetupFailed(f"{where}: {error}{hint}") from error
        except (FileError, CopyProblem, LayerTooLarge) as error:
            raise SetupFailed(f"{where}: {error}") from error

    async def _inputs(
        self, recipe: Recipe, keyed: Keyed, spec: WorkspaceSpec, stack: contextlib.ExitStack
    ) -> list[list[Taken]]:
        """Return the files that a step needs: one list for COPY, or one for each bind mount."""
        step = keyed.step
        taken = [
            await self._taken(needed, recipe, step.line, spec, stack)
            for needed in inputs_of(recipe.parsed, keyed.stage, step)
        ]
        if isinstance(step, CopyStep):
            inline = Context.of({name: File(data, 0o644) for name, data in step.inline}, Ignore.parse(""))
            taken[0] += (_from_context(inline, name, name) for name, _ in step.inline)
        return taken

    async def _taken(
        self, needed: Input, recipe: Recipe, line: int, spec: WorkspaceSpec, stack: contextlib.ExitStack
    ) -> list[Taken]:
        source = needed.source
        if source is None:
            return [
                _from_context(recipe.context, found, real)
                for path in needed.paths
                for found, real in in_context(recipe.context, path, line)
            ]
        if not needed.paths:
            return []
        if isinstance(source, int):
            made = await self._made(recipe, source, spec)
            image, layers = made.image, made.layers
        else:
            image, layers = recipe.image_of(source), ()
        async with self._workspaces.bare(image, layers, spec, "source") as workspace:
            hands = StepFiles(workspace, has_one_user=False)
            return [
                await hands.take(path, stack, name)
                for written in needed.paths
                for name, path in await hands.found(written)
            ]

    async def _run(
        self,
        step: RunStep,
        hands: StepFiles,
        taken: Sequence[Sequence[Taken]],
        recipe: Recipe,
        where: str,
        network: NetworkAccess,
        limits: Resources,
        base: Base,
    ) -> None:
        workspace, env = hands.workspace, dict(step.env)
        mounted, of_binds = [], iter(taken)
        for mount in step.mounts:
            secret, files = None, next(of_binds) if mount.type == "bind" else ()
            if mount.type == "secret":
                name = mount.id or posixpath.basename(mount.source or mount.target or "")
                secret = self._options.secrets.get(name)
                if secret is None:
                    if mount.required:
                        raise SetupFailed(f"{where}: needs the secret {name!r}; name it in tasks.dockerfiles.secrets")
                    continue
                if mount.env:
                    env[mount.env] = secret.decode(errors="surrogateescape")
                    if mount.target is None:
                        continue
            mounted.append(await hands.mount(mount, files, secret))
        if step.script is not None:
            await workspace.write(SCRIPT, step.script.encode(), key="2:script", mode="755", owner=ROOT)
        if network != "None" and step.has_network:
            await workspace.enter("setup", key="2:network")
        result = await workspace.run(
            list(step.command),
            key="3:run",
            deadline_seconds=recipe.seconds,
            cwd=step.working_dir,
            env=env,
            user=step.user or base.user,
        )
        if not result.ok:
            shown = _without(self._options.secrets.values(), result)
            message = failed_command(where, shown, seconds=recipe.seconds, limit="the task's build time limit")
            raise SetupFailed("\n".join([message, *_hints(shown, limits, base)]))
        await workspace.kill_all(key="3:end")
        if step.script is not None:
            await workspace.remove(SCRIPT, key="4:script", owner=ROOT)
        for undo in reversed(mounted):
            await undo()


def digest_of(*stacks: Sequence[StoredLayer]) -> str:
    """Return the digest of the layers of several stacks."""
    return digest(*([layer.digest for layer in layers] for layers in stacks))


def completed_spec(spec: WorkspaceSpec, made: Made) -> WorkspaceSpec:
    """Return a specification that starts from a stage; the task's own settings override those of the Dockerfile."""
    settings = made.settings
    return dataclasses.replace(
        spec,
        dockerfile=None,
        image=made.image,
        layers=made.layers,
        env={**settings.own_env, **spec.env},
        user=spec.user or settings.user,
        # The root cannot be carried into a grading, so it is no working folder unless the task asks for it.
        working_dir=settings.working_dir
        if spec.working_dir_of_image and settings.working_dir != "/"
        else spec.working_dir,
        working_dir_of_image=False,
        entrypoint=settings.entrypoint or (),
        command=settings.command or (),
        health=_health_check(settings),
    )


def _health_check(settings: Settings) -> HealthCheck | None:
    """Return the check of HEALTHCHECK, with the times after which Docker calls a container unhealthy."""
    given = settings.healthcheck
    if given is None or given.command is None:
        return None
    command = given.command if isinstance(given.command, str) else shlex.join(given.command)
    timeout = given.timeout or DOCKER_CHECK_SECONDS
    tries = (given.retries or DOCKER_CHECK_TRIES) * ((given.interval or DOCKER_CHECK_SECONDS) + timeout)
    return HealthCheck(
        command=command, seconds=math.ceil((given.start_period or 0) + tries), timeout_seconds=math.ceil(timeout)
    )


def _disk_hint(limits: Resources) -> str:
    return (
        f"a build step may write {limits.disk} and as much as it leaves free, and in a sandbox pod what the pod may; "
        "write less, raise sandbox.resources.disk, or free some disk"
    )


def _hints(result: CommandResult, limits: Resources, base: Base) -> Iterable[str]:
    """Yield what may explain that a command failed, by the kernel's refusals that programs report."""
    output = result.end_of_output
    if result.cause == "Processes" or any(said in output for said in _NO_PROCESS):
        most = limits.processes or "8,192, the default,"
        yield f"A build step may have {most} processes and threads: start fewer, or raise sandbox.resources.processes."
    if result.signal == signal.SIGXFSZ or any(said in output for said in _TOO_LARGE):
        yield f"A file is larger than allowed: {_disk_hint(limits)}."

    if base.has_one_user and (result.start_error is not None or any(said in output for said in _NO_OTHER_USER)):
        yield (
            "Without root, a build has one user, to whom all files belong: it cannot change owners or run as another user. "
            "Run as root, or in a cluster, or leave this step out."
        )


def _without(secret_values: Iterable[bytes], result: CommandResult) -> CommandResult:
    """Return a result in whose output each secret, and each longer line of one, is replaced by `***`."""
    hidden = {value.strip() for value in secret_values} | {
        line.strip() for value in secret_values for line in value.splitlines() if len(line.strip()) >= _HIDDEN_LINE
    }
    stdout, stderr = result.stdout, result.stderr
    # The longest first, because one may be a part of another.
    for text in sorted(hidden - {b""}, key=len, reverse=True):
        stdout, stderr = stdout.replace(text, b"***"), stderr.replace(text, b"***")
    return dataclasses.replace(result, stdout=stdout, stderr=stderr)


def _from_context(context: Context, name: str, path: str) -> Taken:
    return Taken(name, path in context.folders, lambda: context_tar(context, path))
