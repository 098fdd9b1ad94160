"""Client of a model server's control port: one method for each request, with time-outs, retries, and errors that name
server and route.

The gateway (`agent_runtime/serving`) listens on this port. It forwards the inference server's own routes, which
`rollout_api/inference` describes, and serves the routes below `/policy/` itself.
"""

import asyncio
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, TypeVar

import aiohttp
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from rollout_api.base import ApiModel
from rollout_api.cluster import ENGINE_PROCESS_HEADER
from rollout_api.inference.description import Answer, Description, Request, Sleep, Transfer, Updates, version_text
from rollout_api.inference.vllm import VLLM
from rollout_api.model_server import MOST_ADAPTERS, AdapterName, PolicySource
from rollout_api.nesting import estimated_values, json_object
from rollout_operator import clock
from rollout_operator.server_contact import AdapterFailure, LoadedAdapter, ServerReport, WantedAdapter
from rollout_operator.tenant_limits import MOST_CHARACTERS, ByteBudget, Held, pod_session, read_answer, shortened

OfferedT = TypeVar("OfferedT")

CONNECT_SECONDS = 10.0
CHECK_SECONDS = 10.0
# Time limits of one attempt, the same as in prime-rl (src/prime_rl/utils/client.py).
ENGINE_SECONDS = 300.0
LOAD_SECONDS = 720.0
TRIES = 3
BACKOFF_SECONDS = 1.0
"""Pause before the second attempt. It doubles with each further one."""
MOST_ANSWER = 2**20
"""Most bytes of a response. Tenants control their pods, and hundreds may respond at the same time."""
MOST_HOOK_ANSWER = 16 * 2**20
"""Most bytes of a hook's response. Names, types and shapes of 100,000 tensors take about 9 MB."""
MOST_VALUES: Final = 2**20
"""Most values of a response, of which each takes memory of the operator."""

VERSION_DIGITS: Final = len(str(2**53))
"""Most digits of `spec.policy.version`."""
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
"""A SHA-256 of weights, as a gateway reports it. Reports stay in memory, so nothing longer is kept."""
PROCESS_NAME: Final = re.compile(r"[\w-]{1,64}", re.ASCII)
"""Valid process names of an inference engine, as a gateway reports them. The name is sent back in a header."""

LOADING = "loading"
"""Version name of the weights while a load is in progress. The engine reports it, so a new operator also knows that the
weights may mix two versions.
"""

FALLING_ASLEEP, ASLEEP = "falling-asleep-", "asleep-"
"""Prefixes of the version name from before the request that releases the memory until it ends, and from then on."""

ENDED: Final = 412
"""Status with which a gateway refuses a request for an engine process that no longer runs."""


class ControlError(Exception):
    """A server, or the trainer's hook behind it, refused, failed, or returned an unusable response."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.message = shortened(message)
        """Message with the called server, the route and the response."""
        super().__init__(self.message)
        self.status = status
        """HTTP status; 0: no response."""

    @property
    def may_pass(self) -> bool:
        """Whether a retry may succeed: there was no response, or the server itself failed."""
        return self.status == 0 or self.status >= 500


@dataclass(frozen=True)
class Address:
    """Address of one server's control port."""

    namespace: str
    name: str
    url: str
    token: str = field(repr=False)
    process: str = ""
    """Engine process that may handle the requests; empty: any."""
    engine: Description = VLLM
    """The inference server behind the gateway."""

    @property
    def updates(self) -> Updates:
        return self.engine.updates


class Control:
    """Client of control ports, over one session. Every method raises ControlError."""

    def __init__(self, backoff_seconds: float = BACKOFF_SECONDS, budget: ByteBudget | None = None) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._backoff = backoff_seconds
        self.budget = budget or ByteBudget()
        """Counts the bytes of large answers."""

    async def close(self) -> None:
        """Close all connections and fail the pending requests."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def server_report(self, server: Address) -> ServerReport:
        """Return the state of one server. All parts of it come from the same engine process."""
        served = await self._get(replace(server, process=""), "/policy/served")
        process, opened, calls = served.get("engine"), served.get("version"), served.get("calls", 0)
        if not isinstance(process, str) or not PROCESS_NAME.fullmatch(process):
            raise ControlError(f"{server.name}: GET /policy/served answered {served}; expected the engine's process")
        if opened is not None and type(opened) is not int:
            raise ControlError(f"{server.name}: GET /policy/served answered {served}; expected a version or null")
        if type(calls) is not int:
            raise ControlError(f"{server.name}: GET /policy/served answered {served}; expected a number of calls")
        server = replace(server, process=process)
        updates = server.updates
        paused, weights = await self._look(server, updates.paused), await self._look(server, updates.weights)
        is_paused = updates.is_paused(paused)
        try:
            name = updates.weights_name(weights)
        except KeyError:
            is_paused = None
        if is_paused is None:
            raise ControlError(
                f"{server.name}: GET {updates.paused.path} and {updates.weights.path} answered {dict(paused.body)} and "
                f"{dict(weights.body)}; is it {server.engine.type} {version_text(server.engine.supports_updates)} or "
                "newer?"
            )
        asleep, name = split_name(name)
        now, adapters = clock.now(), served.get("adapters")
        return ServerReport(
            now,
            is_paused,
            version_of(name),
            process=process,
            opened=opened,
            calls=calls,
            asleep=asleep,
            adapters=_adapters(server, adapters, now) if adapters else {},
        )

    async def open(self, server: Address, version: int) -> None:
        """Tell the gateway to accept calls, because this engine process was verified to serve this version."""
        await self._post(server, "/policy/served", {"engine": server.process, "version": version})

    async def pause(self, server: Address) -> None:
        """Pause all requests in progress; `resume` continues them. Has no effect on a paused engine."""
        await self._send(server, server.updates.pause)

    async def resume(self, server: Address, *, sleeps: bool = False) -> None:
        """Continue all requests. `sleeps`: the engine may have slept before."""
        if sleeps:
            await self._send(server, _sleep(server).resume)
        await self._send(server, server.updates.resume)

    async def sleep(self, server: Address) -> None:
        """Pause all requests in progress, and release the accelerators' memory."""
        _, name = await self._weights_name(server)
        await self.name_weights(server, FALLING_ASLEEP + name)
        await self._send(server, _sleep(server).sleep)
        await self.name_weights(server, ASLEEP + name)

    async def wake(self, server: Address) -> None:
        """Take back the memory of the weights, which can be replaced then. The engine stays paused."""
        asleep, name = await self._weights_name(server)
        if asleep is None:
            # An engine that did not sleep continues its calls when it is asked to wake. Its weights may be replaced
            # next, so abort the calls first; runners send them again.
            await self._send(server, server.updates.abort)
        await self._send(server, _sleep(server).wake)
        if asleep is None:
            await self._send(server, server.updates.pause)
        await self.name_weights(server, name)

    async def _weights_name(self, server: Address) -> tuple[bool | None, str]:
        return split_name(server.updates.weights_name(await self._look(server, server.updates.weights)))

    async def fetch(self, server: Address, source: PolicySource, seconds: float) -> str:
        """Tell the gateway to fetch a version unless it has it. Returns the folder in the engine's file system."""
        answer = await self._ask(server, "/policy/fetch", source.wire(), seconds=seconds)
        path = answer.get("path")
        if not isinstance(path, str):
            raise ControlError(f"{server.name}: POST /policy/fetch answered {answer}; expected a path")
        return path

    async def name_weights(self, server: Address, version: str) -> None:
        """Set the version name that the engine reports for its weights."""
        await self._send(server, server.updates.name_weights(version))

    async def reload(self, server: Address, path: str) -> None:
        """Load weights from a folder."""
        await self._send(server, server.updates.reload(path, LOAD_SECONDS))

    async def want_adapters(self, server: Address, adapters: Sequence[WantedAdapter], seconds: float) -> None:
        """Tell the gateway which versions of adapters it should load; the others are unloaded. It does so by itself."""
        wanted = {
            adapter.name: {"current": adapter.current, "versions": [source.wire() for source in adapter.sources]}
            for adapter in adapters
        }
        await self._post(server, "/policy/adapters", {"adapters": wanted, "seconds": seconds})

    async def begin_transfer(self, server: Address, init: bytes | None) -> None:
        """Prepare an engine to receive tensors. `init` is the body of the request that initializes it (`hook.py`)."""
        transfer = transfer_of(server)
        if init is not None:
            await self._first(server, transfer.leave)
            await self._send(server, transfer.init({}), init)
        await self._first(server, transfer.start)

    async def _first(self, server: Address, request: Request) -> None:
        """Send a request that an engine refuses while an earlier transfer is unfinished, because its trainer or its operator
        has ended.
        """
        try:
            await self._send(server, request, tries=1)
        except ControlError as error:
            if error.status in request.also:
                return
            await self._send(server, transfer_of(server).cancel, tries=1)
            await self._send(server, request, tries=1)

    async def transfer(self, server: Address, update: bytes, seconds: float) -> None:
        """Receive the tensors that the body `update` describes (`hook.py`). Not retried, because the trainer sends them
        once.
        """
        await self._send(server, replace(transfer_of(server).update({}), seconds=seconds), update, tries=1)

    async def finish_transfer(self, server: Address, version: int) -> None:
        """Finish a transfer and set the version of the weights."""
        await self._send(server, transfer_of(server).finish(str(version)))

    async def digest(self, server: Address) -> str | None:
        """Return a SHA-256 over the engine's checksums of its weights; None if it has none."""
        try:
            answer = await self._ask(server, "/policy/digest", {})
        except ControlError as error:
            if error.status in (404, 405, 501):
                return None
            raise
        digest = answer.get("digest")
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise ControlError(f"{server.name}: POST /policy/digest answered {answer}; expected a SHA-256")
        return digest

    async def ask_hook(
        self, server: Address, url: str, question: Mapping[str, Any], seconds: float, held: Held
    ) -> dict[str, Any]:
        """Call the trainer's hook through a server's gateway. The response describes the tensors that the trainer will
        send. `held` then counts twice its bytes.

        The operator does not call the URL itself: it comes from a manifest, and the operator can connect to more than the
        manifest's author. It sends requests only to the API server and to control ports of pods.
        """
        body = {"url": url, "question": question, "seconds": seconds}
        seconds += CONNECT_SECONDS
        return await self._ask(server, "/policy/hook", body, seconds=seconds, most=MOST_HOOK_ANSWER, held=held)

    async def _look(self, server: Address, request: Request) -> Answer:
        """Send a GET request of a description. Its `also` are statuses that the description reads itself."""
        try:
            data = await self._request("GET", server, request.path, None, CHECK_SECONDS)
        except ControlError as error:
            if error.status not in request.also:
                raise
            return Answer(error.status)
        return Answer(200, _json(server, "GET", request.path, data) if data else {})

    async def _send(self, server: Address, request: Request, body: bytes | None = None, **options: Any) -> None:
        """Send a POST request of a description. `body` is JSON that replaces the request's own body."""
        seconds = ENGINE_SECONDS if request.seconds is None else request.seconds
        sent = request.body if body is None else body
        await self._post(server, request.path, sent, seconds=seconds, query=request.query, **options)

    async def _get(self, server: Address, route: str) -> dict[str, Any]:
        return _json(server, "GET", route, await self._request("GET", server, route, None, CHECK_SECONDS))

    async def _ask(self, server: Address, route: str, body: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        return _json(server, "POST", route, await self._post(server, route, body, **options))

    async def _post(
        self,
        server: Address,
        route: str,
        body: Mapping[str, Any] | bytes | None = None,
        seconds: float = ENGINE_SECONDS,
        tries: int = TRIES,
        **options: Any,
    ) -> bytes:
        """Send a POST request. The response may be plain text."""
        for number in range(1, tries + 1):
            try:
                return await self._request("POST", server, route, body, seconds, **options)
            except ControlError as error:
                if number == tries or not error.may_pass:
                    raise
            await asyncio.sleep(self._backoff * 2 ** (number - 1))
        raise AssertionError("unreachable")

    async def _request(
        self,
        method: str,
        server: Address,
        route: str,
        body: Mapping[str, Any] | bytes | None,
        seconds: float,
        query: Mapping[str, str] | None = None,
        most: int = MOST_ANSWER,
        held: Held | None = None,
    ) -> bytes:
        """Return the response. `held` then counts twice its bytes."""
        if held is None:
            async with self.budget.hold(server.namespace) as held:
                return await self._request(method, server, route, body, seconds, query, most, held)
        if self._session is None:
            self._session = pod_session()
        url = server.url + route
        what = f"{server.name}: {method} {url}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        # From a file, the body is sent in pieces. Bytes would be copied for each server that reads slowly.
        sent: dict[str, Any] = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        headers = _headers(server) | ({"Content-Type": "application/json"} if isinstance(body, bytes) else {})
        held.shrink(0)
        try:
            # No redirects: a server must not choose where the operator sends requests and the token.
            async with (
                asyncio.timeout(seconds),
                self._session.request(
                    method, url, params=query, headers=headers, timeout=timeout, allow_redirects=False, **sent
                ) as response,
            ):
                data = await read_answer(response, most, held)
        except TimeoutError as error:
            if held.waits:
                words = "the answers of other servers take all memory that the operator has for them"
                raise ControlError(
                    f"{what}: its answer was not read within {seconds:.0f} s, because {words}"
                ) from error
            raise ControlError(f"{what} did not answer within {seconds:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ControlError(f"{what} cannot be reached: {error}") from error
        if data is None:
            raise ControlError(f"{what} answered more than {most} bytes")
        if response.status >= 300:
            words = " ".join(data[:500].decode(errors="replace").split())
            raise ControlError(f"{what} answered {response.status}: {words or response.reason}", response.status)
        return data


def _offered(server: Address, offered: OfferedT | None, what: str) -> OfferedT:
    if offered is None:  # ModelServerSpec refuses it, so only an object from before that rule comes here
        raise ControlError(f"{server.name}: {server.engine.type} does not support {what}")
    return offered


def _sleep(server: Address) -> Sleep:
    return _offered(server, server.updates.sleep, "asleep")


def transfer_of(server: Address) -> Transfer:
    """Return the requests with which the server receives tensors. Raises ControlError."""
    return _offered(server, server.updates.transfer, "weightTransfer.mode Push")


def _json(server: Address, method: str, route: str, data: bytes) -> dict[str, Any]:
    if estimated_values(data) > MOST_VALUES:
        raise ControlError(f"{server.name}: {method} {route} answered more than {MOST_VALUES} values")
    try:
        return json_object(data)
    except ValueError as error:
        raise ControlError(f"{server.name}: {method} {route} answered with {error}: {data[:100]!r}") from error


class ReportedFailure(ApiModel):
    """A version that a gateway could not load."""

    version: int
    message: Annotated[str, StringConstraints(max_length=MOST_CHARACTERS)]
    fetched: bool
    seconds: Annotated[float, Field(ge=0)]
    """Time since then."""


class ReportedAdapter(ApiModel):
    """An adapter in a gateway's report."""

    current: int
    loaded: Annotated[list[int], Field(max_length=2)]
    loading: Annotated[list[int], Field(max_length=2)]
    failed: Annotated[list[ReportedFailure], Field(max_length=2)]


_REPORTED: Final = TypeAdapter(Annotated[dict[AdapterName, ReportedAdapter], Field(max_length=MOST_ADAPTERS)])


def _adapters(server: Address, reported: Any, now: datetime) -> dict[str, LoadedAdapter]:
    try:
        found = _REPORTED.validate_python(reported)
        return {
            name: LoadedAdapter(
                adapter.current,
                tuple(adapter.loaded),
                tuple(adapter.loading),
                {
                    failure.version: AdapterFailure(
                        now - timedelta(seconds=failure.seconds), failure.message, failure.fetched
                    )
                    for failure in adapter.failed
                },
            )
            for name, adapter in found.items()
        }
    except (ValidationError, OverflowError, ValueError) as error:
        words = shortened(" ".join(str(error).split()))
        raise ControlError(f"{server.name}: GET /policy/served answered adapters of another form: {words}") from error


def split_name(name: str | None) -> tuple[bool | None, str]:
    """Return whether the memory is released (None: unknown), and the name of the weights without the prefix for that."""
    text = name or "default"
    if text.startswith(FALLING_ASLEEP):
        return None, text.removeprefix(FALLING_ASLEEP)
    return text.startswith(ASLEEP), text.removeprefix(ASLEEP)


def version_of(name: Any) -> int | None:
    """Return the policy version that an engine's weight name stands for.

    A new engine process reports a default name, which stands for version 0: the model's first weights.
    """
    text = "" if name is None else str(name)
    if text.isascii() and text.isdigit() and len(text) <= VERSION_DIGITS:
        return int(text)
    return None if text.startswith(LOADING) else 0


def _headers(server: Address) -> dict[str, str]:
    meant = {ENGINE_PROCESS_HEADER: server.process} if server.process else {}
    return {"Authorization": f"Bearer {server.token}", **meant}
