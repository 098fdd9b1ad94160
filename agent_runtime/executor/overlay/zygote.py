"""The zygote: the process from which every workspace is forked. Its memory has no data of the executor, because
`start_zygote` forks it before the executor does anything else. To become an overlay host, it forks a keeper, which
enters its own namespaces and serves in its place. If the mode Auto falls back to Plain, the unchanged zygote resumes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from agent_runtime.executor import kernel
from agent_runtime.executor.init import processes
from agent_runtime.executor.init.channel import Channel, Message
from agent_runtime.executor.init.commands import WorkspaceSettings
from agent_runtime.executor.init.init import Init
from agent_runtime.executor.init.trees import disk_use, removal, remove
from agent_runtime.executor.overlay.base_layers import BaseLayers, Impossible, prepare, write_maps
from agent_runtime.executor.overlay.view import HELLO, IDS, build, process_limits, raise_own_limits
from agent_runtime.executor.syscall_filter import filter_program

# Steps of removing one layer before the next layer's turn: enough to remove an unused layer.
_STEPS = 30


def remove_layers(channel: Channel) -> NoReturn:
    """Remove the requested layers in the background until the executor disconnects.

    A fork of the keeper does this. Several layers are removed in turn, a few files each, so that a small one never
    waits for a large one.
    """
    layers = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    removals: dict[int, Generator[None, None, None]] = {}
    poll = select.poll()
    poll.register(channel.end, select.POLLIN)
    while True:
        if poll.poll(0 if removals else None):
            received = channel.receive()
            if received is None:
                os._exit(0)
            number, request, _ = received
            removals[number] = removal(layers, request["layer"], missing_ok=True)
        for number, files in list(removals.items()):
            steps = 0
            with contextlib.suppress(OSError):  # the rest stays until an executor starts here again
                steps = sum(1 for _ in itertools.islice(files, _STEPS))
            if steps < _STEPS:
                del removals[number]
                channel.send(number, {})


_GIVEN_UP = 10
# Python ignores these signals; commands.py restores their defaults for commands.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
# Spares are created after this much time without requests, so that they do not delay requested workspaces.
_CALM_SECONDS = 0.1
_unused: list[tuple[int, socket.socket]] = []


def start_zygote() -> None:
    """Fork the zygote. Call this first in the process, before threads, event loops and secrets."""
    raise_own_limits()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            _run_zygote(theirs)
        finally:
            os._exit(1)
    theirs.close()
    ours.setblocking(False)
    _unused.append((pid, ours))


def take_zygote() -> tuple[int, socket.socket]:
    """Return (pid, the executor's end of its channel) of the started zygote, or start one now."""
    if not _unused:
        start_zygote()
    return _unused.pop()


def _run_zygote(end: socket.socket) -> NoReturn:
    # In its own session, this process does not get a terminal's Ctrl-C; the executor does, and then stops this process.
    os.setsid()
    # Commands must not inherit ignored signals from the shell or supervisor (nohup, a script's `&`).
    for number in range(1, signal.NSIG):
        if number not in _IGNORED_BY_PYTHON:
            with contextlib.suppress(
                OSError
            ):  # raised for SIGKILL, SIGSTOP and the two signals reserved by the C library
                signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # If this process was started without standard streams, the channel may have got their numbers.
    end = socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    kernel.close_all_but([end.fileno()])
    kernel.hide_from_tools()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    sys.setrecursionlimit(300)
    gc.disable()
    gc.freeze()
    os.umask(0o022)
    _Zygote(Channel(end)).serve()


@dataclass
class _Spare:
    """A process in reserve, which becomes the init of the next workspace, and the layer of that workspace. `process` is
    its pid descriptor.
    """

    pid: int
    process: int
    channel: Channel
    layer: str
    is_mapped: bool = False
    is_taken: bool = False


class _Zygote:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._base: BaseLayers | None = None
        self._spares: list[_Spare] = []
        # The wanted number of spares, and when to create the next. They are created one by one, while no spare is being
        # prepared.
        self._wanted, self._calm_at = 0, 0.0
        self._layers = itertools.count(1)
        # The lower layers of the last two workspaces; then a spare that is prepared with the same ones.
        self._recent_layers: deque[Message] = deque(maxlen=2)
        self._prepared: tuple[Message, _Spare] | None = None
        # Spares that are preparing and will need their ids mapped, by the descriptor on which they report it.
        self._unmapped: dict[int, _Spare] = {}
        # Layers of discarded spares, by the descriptors that report the spares' end.
        self._dropped: dict[int, str] = {}
        self._poll = select.poll()
        self._poll.register(channel.end, select.POLLIN)

    def serve(self) -> NoReturn:
        """Answer the executor until it disconnects; then end all remaining processes."""
        signal.signal(signal.SIGCHLD, self._reap)
        while True:
            left = max(0.0, self._calm_at - time.monotonic())
            is_short = len(self._spares) < self._wanted and not self._unmapped
            ready = self._poll.poll(1000 * left if is_short else None)
            if not ready and self._base is not None:
                self._restock(self._base)
            for descriptor, _ in ready:
                if descriptor == self._channel.end.fileno():
                    self._take_request()
                elif self._base is not None and descriptor in self._unmapped:
                    self._map_ids(self._base, descriptor)
                elif descriptor in self._dropped:
                    self._remove_dropped_layer(descriptor)

    def _take_request(self) -> None:
        received = self._channel.receive()
        if received is None:
            self._end_everything()
        number, request, descriptors = received
        try:
            self._handle(number, request, descriptors)
        except OSError as error:
            self._channel.send(number, {"error": f"{request['do']}: {error.strerror}"})
        for descriptor in descriptors:
            os.close(descriptor)

    def _handle(self, number: int, request: Message, descriptors: list[int]) -> None:
        match request["do"]:
            case "prepare":
                self._prepare(number, request)
            case "give up":
                os._exit(_GIVEN_UP)
            case "create" if self._base is not None:
                self._take_spare(self._base, number, request, descriptors)
            case "create":
                self._fork(number, request, lambda: self._create(number, request, descriptors))
            case "spares":
                self._set_wanted(request["spares"])
            case "measure":
                self._fork(number, request, lambda: self._measure(number, request))
            case "sweep":
                self._channel.send(number, {"gone": processes.kill_below(_proc(), os.getpid())})

    def _fork(self, number: int, request: Message, work: Callable[[], object]) -> None:
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                work()
                os._exit(0)
            except OSError as error:
                self._channel.send(number, {"error": f"{request['do']}: {error.strerror}"})
            finally:
                os._exit(1)

    def _take_spare(self, base: BaseLayers, number: int, request: Message, descriptors: list[int]) -> None:
        """Pass the request to a spare, or to a new process if none waits. Killed spares are skipped."""
        self._set_wanted(request["spares"])
        lower_layers = {key: request[key] for key in ("chain", "view_of", "is_bare", "resumed")}
        ends, joined = descriptors[:2], descriptors[2:]
        if not joined and request["resumed"] is None:
            self._recent_layers.append(lower_layers)
        spare = self._spare_with_layers(base, lower_layers, joined)
        while not spare.channel.send(number, request, ends):
            self._drop(spare)
            spare = self._spare_with_layers(base, lower_layers, joined)
        self._channel.send(number, {"pid": spare.pid, "layer": spare.layer}, [spare.process])
        spare.is_taken = True
        if spare.is_mapped:
            self._release(base, spare)

    def _set_wanted(self, spares: int) -> None:
        self._wanted, self._calm_at = spares, time.monotonic() + _CALM_SECONDS

    def _restock(self, base: BaseLayers) -> None:
        """Create one more spare; after a failure, none until a request needs one."""
        try:
            self._spares.append(self._fork_spare(base))
        except OSError:
            self._wanted = 0

    def _spare_with_layers(self, base: BaseLayers, lower_layers: Message, joined: list[int]) -> _Spare:
        """Return a spare that has mounted these lower layers, or will mount them.

        `joined` are the descriptors of what it shares, if it joins a workspace (`view.Shared`).
        """
        if not joined and self._prepared is not None and self._prepared[0] == lower_layers:
            spare, self._prepared = self._prepared[1], None
            return spare
        return self._send_layers(base, lower_layers, joined)

    def _send_layers(self, base: BaseLayers, lower_layers: Message, joined: Sequence[int] = ()) -> _Spare:
        """Send the lower layers to a spare, which mounts them; return the spare."""
        while True:
            spare = self._spares.pop(0) if self._spares else self._fork_spare(base)
            if spare.channel.send(IDS, lower_layers, joined):
                self._unmapped[spare.channel.end.fileno()] = spare
                self._poll.register(spare.channel.end, select.POLLIN)
                return spare
            self._drop(spare)

    def _map_ids(self, base: BaseLayers, descriptor: int) -> None:
        """Map the ids of a spare that has entered its user namespace, and let it continue."""
        spare = self._unmapped.pop(descriptor)
        self._poll.unregister(descriptor)
        received = spare.channel.receive()
        if received is not None:
            with contextlib.suppress(OSError):  # it has died: the caller that waits for its HELLO gets an error
                if not received[1]["is_mapped"]:
                    write_maps(spare.pid, base.uid_map, base.gid_map)
                spare.channel.send(IDS, {})
        spare.is_mapped = True
        if spare.is_taken:
            self._release(base, spare)

    def _release(self, base: BaseLayers, spare: _Spare) -> None:
        """Forget a spare that has become a workspace. If the last two workspaces have the same lower layers, prepare
        another spare with them.
        """
        spare.channel.end.close()
        os.close(spare.process)
        recent = list(self._recent_layers)
        if len(recent) < 2 or recent[0] != recent[1] or (self._prepared and self._prepared[0] == recent[1]):
            return
        if self._prepared is not None:
            self._drop(self._prepared[1])
        self._prepared = None
        with contextlib.suppress(OSError):
            self._prepared = recent[1], self._send_layers(base, recent[1])

    def _drop(self, spare: _Spare) -> None:
        """Discard the spare process and its layer."""
        if self._unmapped.pop(spare.channel.end.fileno(), None):
            self._poll.unregister(spare.channel.end)
        spare.channel.end.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(spare.process, signal.SIGKILL)
        self._dropped[spare.process] = spare.layer
        self._poll.register(spare.process, select.POLLIN)

    def _remove_dropped_layer(self, process: int) -> None:
        """Remove the layer of a discarded spare that has ended."""
        self._poll.unregister(process)
        os.close(process)
        with contextlib.suppress(OSError):
            remove(self._dropped.pop(process))

    def _fork_spare(self, base: BaseLayers) -> _Spare:
        """Fork a process that becomes the init of one workspace on request, and ends with its channel."""
        layer = f"{next(self._layers):x}"
        pid, end = _fork_with_channel(
            lambda: kernel.fork_into(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID, "mount and pid"),
            lambda channel: build(base, channel, layer),
        )
        return _Spare(pid, os.pidfd_open(pid), Channel(end), layer)

    def _reap(self, *_: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def _end_everything(self) -> NoReturn:
        processes.kill_below(_proc(), os.getpid())
        spares = [*self._spares, *([self._prepared[1]] if self._prepared else [])]
        for layer in [*self._dropped.values(), *(spare.layer for spare in spares)]:
            with contextlib.suppress(OSError):
                remove(layer)
        os._exit(0)

    def _prepare(self, number: int, request: Message) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        keeper = os.fork()
        if keeper:
            _, status = os.waitpid(keeper, 0)
            if os.waitstatus_to_exitcode(status) != _GIVEN_UP:
                self._end_everything()
            signal.signal(signal.SIGCHLD, self._reap)
            return
        try:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            self._base = prepare(
                request["layers"], request["root"], request["rootLayers"], request["masks"], request["binds"]
            )
            kernel.set_syscall_filter(filter_program())
            signal.signal(signal.SIGCHLD, self._reap)
            _, end = _fork_with_channel(os.fork, remove_layers)
            with end:
                self._channel.send(number, {}, [end.fileno()])
        except (Impossible, OSError) as error:
            reason = str(error) if isinstance(error, Impossible) else f"{error.filename or 'prepare'}: {error.strerror}"
            self._channel.send(number, {"error": reason})
            os._exit(_GIVEN_UP)

    def _create(self, number: int, request: Message, ends: list[int]) -> None:
        self._channel.send(number, {"pid": os.getpid()}, [os.pidfd_open(os.getpid())])
        self._channel.end.close()
        channel, starts = (Channel(socket.socket(fileno=end)) for end in ends)
        channel.send(HELLO, {})
        root = request["root"].rstrip("/")
        settings = WorkspaceSettings(
            isolated=False,
            root=root,
            user=request["user"] or str(os.geteuid()),
            working_dir=request["workingDir"],
            nice=request["nice"],
            environment=request["environment"],
            rlimits=process_limits(request, own_users=False),
        )
        Init(channel, starts, settings, _proc()).serve()

    def _measure(self, number: int, request: Message) -> None:
        # In `Plain`, after its processes were killed: a tool with our user may have made folders unreadable.
        makes_readable = request["since"] is not None and request["least"] > 0
        counted = disk_use(
            request["folder"],
            least=request["least"],
            since=request["since"],
            makes_readable=makes_readable,
            enough=request["enough"],
        )
        self._channel.send(number, counted._asdict())


def _fork_with_channel(fork: Callable[[], int], work: Callable[[Channel], NoReturn]) -> tuple[int, socket.socket]:
    """Fork a process that runs `work` with only its end of a channel; return its id and the other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            kernel.close_all_but([theirs.fileno()])
            work(Channel(theirs))
        finally:
            os._exit(1)
    theirs.close()
    return pid, ours


def _proc() -> int:
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
