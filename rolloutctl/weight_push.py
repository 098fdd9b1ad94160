"""For trainers that send weights to a ModelServer of mode `Push` with vLLM's own trainer engines
(`vllm.distributed.weight_transfer`). docs/weight-push.md has an example.
"""

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol, Self

log = logging.getLogger(__name__)

_MOST_BYTES: Final = 1 << 20
"""Limit of the operator's request, which has 200 bytes for each server."""


class WeightMetadata(Protocol):
    """One parameter, as vLLM's `WeightSource.metadata()` describes it (`ParamMeta`)."""

    @property
    def name(self) -> str:
        """Name in the checkpoint."""

    @property
    def dtype(self) -> Any:
        """Type in the transfer, such as `torch.bfloat16`."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the whole tensor."""


class WeightPushCancelled(Exception):
    """The operator does not wait for this push any longer."""


class WeightPush:
    """One push that the operator has asked for: a context in which its weights are sent. It is the `client` of vLLM's
    trainer engine, too: its four methods tell the operator what to send to the servers, and the operator sends it.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.version: int = request["policy"]["version"]
        """The version whose weights are to be sent. After a failed update, and for a server that has restarted, it is the
        version that the other servers have."""
        self._transfer: str = request["transfer"]
        self._workers: dict[str, int] = {server["name"]: server["worldSize"] for server in request["servers"]}
        self.world_size: int = 1 + sum(self._workers.values())
        """Processes of the group: the trainer's sender, rank 0, and all workers of all servers."""
        self._update: Mapping[str, Any] | None = None
        self._answer: tuple[int, Mapping[str, Any]] | None = None
        self._answered = threading.Event()
        self._cancelled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Leave a cancelled push, so that the next one can follow. An error of the trainer refuses the push."""
        # A server that has ended never joins, and then the engine fails after minutes. Meanwhile the operator asks for
        # the next push.
        if isinstance(error, WeightPushCancelled) or (self._cancelled and isinstance(error, Exception)):
            log.warning("version %s is not sent: %r", self.version, error)
            return True
        if error is not None:
            self.refuse(f"{type(error).__name__}: {error}")
        return False

    def client(self, metadata: Sequence[WeightMetadata]) -> Self:
        """Return the `client` for a trainer engine whose source has this `metadata()`.

        The operator needs the description of the weights before the servers join the group, and vLLM's engine gives it
        only after that.

        Raises WeightPushCancelled: once the engine has started, it may wait for the servers for minutes.
        """
        self._raise_if_cancelled()
        self._update = {
            "names": [weight.name for weight in metadata],
            "dtype_names": [str(weight.dtype).rsplit(".", maxsplit=1)[-1] for weight in metadata],
            "shapes": [list(weight.shape) for weight in metadata],
        }
        return self

    def refuse(self, reason: str) -> None:
        """Send no weights. The update fails with this reason, and the servers return to the version that they had."""
        self._respond(409, {"error": reason})

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Let the workers of all servers join the group. vLLM's engine calls it.

        Raises ValueError if its `world_size` is not that of this push, or without `client`; the update fails with the same
        message. Raises WeightPushCancelled.
        """
        try:
            if self._update is None:
                raise ValueError("the client of the trainer engine has no metadata: give it push.client(metadata)")
            if init_info["world_size"] != self.world_size:
                raise ValueError(f"world_size is {init_info['world_size']}; this push needs {self.world_size}")
        except ValueError as error:
            self.refuse(str(error))
            raise
        servers, rank = {}, 1
        for name, workers in self._workers.items():
            servers[name] = {"initInfo": {**init_info, "rank_offset": rank}}
            rank += workers
        self._respond(200, {"updates": [self._update], "servers": servers})
        self._raise_if_cancelled()

    def start_weight_update(self) -> None:
        """Do nothing: the operator starts the update of each server."""

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Check that the servers expect this update. vLLM's engine calls it while it sends. It does not wait until they have
        received it, so the engine must exist until the next push begins.

        Raises ValueError if `update_info` differs from the metadata that `client` got.
        """
        if update_info != self._update:
            raise ValueError("the weights to send are not those of the metadata that push.client() was given")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: the operator finishes the update of each server, and names its version."""

    def _respond(self, status: int, answer: Mapping[str, Any]) -> None:
        if self._answer is None:
            self._answer = status, answer
            self._answered.set()

    def _cancel(self) -> None:
        self._cancelled = True
        self._respond(410, {"error": "another push was requested since"})

    def _raise_if_cancelled(self) -> None:
        if self._cancelled:
            raise WeightPushCancelled("the operator has asked for another push since")

    def _is_for(self, request: Mapping[str, Any]) -> bool:
        return bool(self._transfer == request["transfer"])

    def _wait(self) -> tuple[int, Mapping[str, Any]]:
        self._answered.wait()
        assert self._answer is not None
        return self._answer


class WeightPushHook:
    """Serve `weightTransfer.push.hook`, at any path of `port` (0: any free one), and iterate over the pushes that the
    operator asks for. The iteration never ends.

        with WeightPushHook(port=8500) as hook:
            for push in hook:
                with push:
                    ...
    """

    def __init__(self, *, port: int, host: str = "0.0.0.0") -> None:
        self._changed = threading.Condition()
        self._latest: WeightPush | None = None
        self._taken: WeightPush | None = None
        self._server = ThreadingHTTPServer((host, port), _handler(self))
        self._server.daemon_threads = True
        self.port: int = self._server.server_port

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="weight-push-hook", daemon=True).start()
        return self

    def __exit__(self, *details: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        if self._latest is not None:
            self._latest._cancel()

    def __iter__(self) -> Iterator[WeightPush]:
        while True:
            with self._changed:
                while self._latest is self._taken:
                    self._changed.wait()
                self._taken = push = self._latest
            assert push is not None
            yield push

    def _asked(self, request: Mapping[str, Any]) -> WeightPush:
        """Return the push of a request; a repeated request is of the same one."""
        with self._changed:
            if self._latest is None or not self._latest._is_for(request):
                push = WeightPush(request)
                if self._latest is not None:
                    self._latest._cancel()
                self._latest = push
                self._changed.notify_all()
            return self._latest


def _handler(hook: WeightPushHook) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            try:
                if size > _MOST_BYTES:
                    raise ValueError(f"a request of {size} bytes; expected {_MOST_BYTES} or fewer")
                push = hook._asked(json.loads(self.rfile.read(size)))
            except (ValueError, LookupError, TypeError) as error:
                self._send(400, {"error": f"not a request of weightTransfer.push.hook: {error!r}"})
                return
            self._send(*push._wait())

        def _send(self, status: int, answer: Mapping[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    return Handler
