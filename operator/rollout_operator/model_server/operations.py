"""Errands to model servers: which requests each is made of, and who is busy with one.

A load takes minutes, and a worker of the loop must not wait for it. So an errand is a task of its own, at most one a
server; when it is over, the ModelServer is looked at again. What is kept here is what servers said last: an operator that
has just started knows nothing, and asks.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from rollout_api.model_server import PullForm, TransferMode
from rollout_operator.actions import Ref
from rollout_operator.model_server.control import ENDED, LOADING, Address, Control, ControlError
from rollout_operator.model_server.policy_seen import Call, Errand, Failure, Said

log = logging.getLogger(__name__)

Key = tuple[str, int]
"""A pod's uid, and how often its engine has started again."""

LEADER_CHECK_SECONDS = 1.0
"""How soon errands end when another replica may begin its own; the lease leaves five (lease.py)."""


@dataclass(frozen=True)
class How:
    """What a ModelServer's spec says about loads."""

    mode: TransferMode
    form: PullForm
    model: str
    """Name under which it is served. An adapter gets the same: vLLM looks among adapters first, so clients need not know
    (vllm/entrypoints/openai/engine/serving.py: _maybe_get_adapters)."""
    fetch_seconds: float
    hook: str | None
    push_seconds: float
    world_size: int
    """Accelerators of one server."""
    update: int
    """`status.policy.update`, for the trainer's logs."""
    token: str = field(repr=False)


@dataclass(frozen=True)
class Target:
    """One server that an errand goes to."""

    name: str
    key: Key
    control_url: str
    url: str


@dataclass(frozen=True)
class Known:
    """What is known of a server from asking it."""

    said: Said | None = None
    busy: Errand | None = None
    failures: Mapping[Call, Failure] = field(default_factory=dict)


class Errands:
    """Who is asked what, and what they said last."""

    def __init__(self, control: Control, may_ask: Callable[[], bool]) -> None:
        self._control, self._may_ask = control, may_ask
        self.known: dict[Key, Known] = {}
        self.on_done: Callable[[Ref], None] = lambda ref: None
        """Called when an errand for an object is over."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, ref: Ref, errand: Errand, targets: Sequence[Target], how: How) -> None:
        """Send an errand to servers. While one of them is busy, nothing is sent."""
        if any(self._of(target).busy is not None for target in targets):
            return
        for target in targets:
            self.known[target.key] = replace(self._of(target), busy=errand)
        task = asyncio.create_task(self._run(ref, errand, targets, how))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, pod_uid: str) -> None:
        """A pod is gone."""
        for key in [key for key in self.known if key[0] == pod_uid]:
            del self.known[key]

    async def run(self) -> None:
        """Until cancelled: end all errands as soon as another replica may lead, and forget what was said."""
        try:
            while True:
                await asyncio.sleep(LEADER_CHECK_SECONDS)
                if not self._may_ask() and self.known:
                    await self._stop()
        finally:
            await self._stop()
            await self._control.close()

    async def _stop(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.known.clear()

    async def _run(self, ref: Ref, errand: Errand, targets: Sequence[Target], how: How) -> None:
        try:
            if errand.call is Call.LOAD and how.mode is TransferMode.PUSH and _version(errand) > 0:
                await self._push(errand, targets, how)
            else:
                await asyncio.gather(*(self._one(errand, target, how) for target in targets))
        except Exception as error:
            # Without a failure on record the same would be asked again at once.
            log.exception("%s of %s", errand.call.value, ref)
            for target in targets:
                self._failed(target, errand, ControlError(f"{target.name}: {errand.call.value} failed: {error!r}"))
        finally:
            for target in targets:
                if target.key in self.known:
                    self.known[target.key] = replace(self.known[target.key], busy=None)
            self.on_done(ref)

    async def _one(self, errand: Errand, target: Target, how: How) -> None:
        server = self._address(target, how)
        touched = False
        digest: tuple[bool, str | None] | None = None
        fetched: int | None = None
        try:
            match errand.call:
                case Call.LOOK:
                    pass
                case Call.PAUSE:
                    await self._control.pause(server)
                case Call.RESUME:
                    await self._control.resume(server)
                case Call.CHECK:
                    digest = True, await self._control.digest(server)
                case Call.OPEN:
                    await self._control.open(server, _version(errand))
                case Call.FETCH:
                    await self._fetch(server, errand, how)
                    fetched = _version(errand)
                case Call.LOAD:
                    path = await self._fetch(server, errand, how)
                    fetched = _version(errand)
                    touched = True
                    await self._load(server, _version(errand), path, how)
                    digest = False, None
        except ControlError as error:
            self._failed(target, errand, error, untouched=not touched and errand.call in (Call.LOAD, Call.FETCH))
        else:
            self._went_well(target, errand)
        await self._look(server, target, digest, fetched)

    async def _fetch(self, server: Address, errand: Errand, how: How) -> str | None:
        assert errand.source is not None
        # The model's own weights are there since the engine started.
        if how.mode is TransferMode.PUSH or errand.source.uri is None:
            return None
        return await self._control.fetch(server, errand.source, how.fetch_seconds)

    async def _load(self, server: Address, version: int, path: str | None, how: How) -> None:
        await self._control.name_weights(server, f"{LOADING}-{version}")
        if how.form is PullForm.ADAPTER and how.mode is TransferMode.PULL:
            if path is None:
                await self._control.unload_adapter(server, how.model)
            else:
                await self._control.load_adapter(server, how.model, path)
        else:
            await self._control.reload(server, path)
        await self._control.name_weights(server, str(version))

    async def _push(self, errand: Errand, targets: Sequence[Target], how: How) -> None:
        """All servers together: a trainer's broadcast has all of them as its members."""
        deadline = asyncio.get_running_loop().time() + how.push_seconds
        try:
            answer = await self._ask_hook(errand, targets, how)
        except ControlError as error:
            for target in targets:
                self._failed(target, errand, error, untouched=True)
            await asyncio.gather(*(self._look(self._address(target, how), target) for target in targets))
            return
        await asyncio.gather(*(self._receive(errand, target, answer, deadline, how) for target in targets))

    async def _ask_hook(self, errand: Errand, targets: Sequence[Target], how: How) -> "HookAnswer":
        """Through the first gateway that answers."""
        assert how.hook is not None
        question = _question(errand, targets, how)
        for target in targets:
            try:
                answer = await self._control.ask_hook(self._address(target, how), how.hook, question, how.push_seconds)
                return HookAnswer.model_validate(answer)
            except ValidationError as error:
                raise ControlError(f"weightTransfer.push.hook answered {str(answer)[:200]}: {error}") from error
            except ControlError as error:
                if error.status or target is targets[-1]:
                    raise
        raise AssertionError("unreachable")

    async def _receive(self, errand: Errand, target: Target, answer: "HookAnswer", deadline: float, how: How) -> None:
        server, sent = self._address(target, how), answer.of(target.name)
        try:
            async with asyncio.timeout_at(deadline):
                await self._control.name_weights(server, f"{LOADING}-{_version(errand)}")
                await self._control.begin_transfer(server, sent.init_info)
                for update in sent.updates or ():
                    await self._control.transfer(server, update, how.push_seconds)
                await self._control.finish_transfer(server, _version(errand))
        except TimeoutError:
            words = f"{target.name}: the weights were not there {how.push_seconds:.0f} s after the trainer's hook was called"
            self._failed(target, errand, ControlError(words))
        except ControlError as error:
            self._failed(target, errand, error)
        else:
            self._went_well(target, errand)
        await self._look(server, target, digest=(False, None))

    async def _look(
        self,
        server: Address,
        target: Target,
        digest: tuple[bool, str | None] | None = None,
        fetched: int | None = None,
    ) -> None:
        """Ask how it stands now: nothing is concluded from what was asked before."""
        old = self._of(target)
        try:
            now = await self._control.look(server)
        except ControlError as error:
            self.known[target.key] = replace(old, said=None)
            self._failed(target, Errand(Call.LOOK), error)
            return
        said = Said(_now(), now.paused, now.version, process=now.process, opened=now.opened)
        if old.said is not None:
            said = replace(said, fetched=old.said.fetched)
            if (old.said.process, old.said.version) == (now.process, now.version):
                said = replace(said, checked=old.said.checked, digest=old.said.digest)
        if digest is not None and server.process == now.process:
            said = replace(said, checked=digest[0], digest=digest[1])
        if fetched is not None:
            said = replace(said, fetched=fetched)
        self.known[target.key] = replace(old, said=said)
        self._went_well(target, Errand(Call.LOOK))

    def _address(self, target: Target, how: How) -> Address:
        """For the process of its engine that an errand was decided on; one that came after it needs another errand."""
        said = self._of(target).said
        return Address(target.name, target.control_url, how.token, "" if said is None else said.process)

    def _of(self, target: Target) -> Known:
        return self.known.get(target.key, Known())

    def _failed(self, target: Target, errand: Errand, error: ControlError, *, untouched: bool = False) -> None:
        log.warning("%s of %s: %s", errand.call.value, target.name, error.message)
        if error.status == ENDED and errand.call is not Call.LOOK:
            return  # It says nothing against the one that runs now.
        known = self._of(target)
        failure = Failure(_now(), errand, error.message, untouched)
        self.known[target.key] = replace(known, failures={**known.failures, errand.call: failure})

    def _went_well(self, target: Target, errand: Errand) -> None:
        known = self._of(target)
        failures = {call: failure for call, failure in known.failures.items() if call is not errand.call}
        self.known[target.key] = replace(known, failures=failures)


class Transfer(BaseModel):
    """What one server, or each of them, is sent."""

    model_config = ConfigDict(alias_generator=to_camel)

    init_info: dict[str, Any] | None = None
    """Body of vLLM's `/init_weight_transfer_engine`; None: the engine was made ready before."""
    updates: list[dict[str, Any]] | None = None
    """Bodies of `/update_weights`, in order: names, types and shapes, as the backend wants them."""


class HookAnswer(Transfer):
    """What a trainer is about to send: `{"initInfo"?, "updates": [...], "servers"?: {name: the same}}`."""

    servers: dict[str, Transfer] = {}
    """Fields of an entry replace those for all servers."""

    @model_validator(mode="after")
    def _has_updates(self) -> Self:
        transfers: list[Transfer] = [self, *self.servers.values()]
        if not any(transfer.updates for transfer in transfers):
            raise ValueError("expected `updates`, a list with the update_info of each call of /update_weights")
        return self

    def of(self, server: str) -> Transfer:
        """What this server is sent."""
        own = self.servers.get(server, Transfer())
        return self.model_copy(update=own.model_dump(exclude_unset=True))


def _question(errand: Errand, targets: Sequence[Target], how: How) -> dict[str, Any]:
    assert errand.source is not None
    return {
        "transfer": secrets.token_hex(8),
        "modelServer": how.model,
        "update": how.update,
        "policy": errand.source.wire(),
        "servers": [
            {"name": target.name, "uid": target.key[0], "url": target.url, "worldSize": how.world_size}
            for target in targets
        ],
    }


def _version(errand: Errand) -> int:
    assert errand.source is not None
    return errand.source.version


def _now() -> datetime:
    return datetime.now(UTC)
