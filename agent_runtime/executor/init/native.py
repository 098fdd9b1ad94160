"""Subreapers in C (subreaper.c), if compiled: in the executor's bundle, or if the package found a compiler.

Without it, commands.py does everything; with it, only unusual cases.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from agent_runtime.executor import kernel
from agent_runtime.executor.init.start_request import StartRequest, unpack

# subreaper.c: HEADER_BYTES, and enum result.
_HEADER_BYTES = 5
_GONE, _NOT_STARTED = 1, 3


def _compiled() -> ctypes.PyDLL | None:
    """Return the library unless its source has changed since. A fork must keep the interpreter's lock, hence PyDLL."""
    folder = os.path.dirname(__file__)
    source = f"{folder}/subreaper.c"
    for name in os.listdir(folder):
        if name.startswith("subreaper") and name.endswith(".so"):
            library = f"{folder}/{name}"
            if not os.path.exists(source) or os.path.getmtime(source) <= os.path.getmtime(library):
                found = ctypes.PyDLL(library, use_errno=True)
                # Resolved before the first fork, because the first use in a process copies pages.
                found.fork_subreaper.restype = ctypes.c_int32
                return found
    return None


_library = _compiled()


def is_compiled() -> bool:
    return _library is not None


class NativeSubreaper:
    """The forked subreaper process in Python, for a request that the C code does not handle."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library

    def serve(self) -> bool:
        """Continue in C; False if the executor has disconnected."""
        return bool(self._library.serve() != _GONE)

    def not_started(self) -> tuple[int, StartRequest, int] | None:
        """Return number, request and errno of a request whose program the kernel refused to execute; None if it still
        waits.
        """
        if self._whole("result") != _NOT_STARTED:
            return None
        packet = ctypes.addressof(ctypes.c_char.in_dll(self._library, "packet"))
        request = unpack(ctypes.string_at(packet, self._whole("packet_bytes"))[_HEADER_BYTES:])
        return self._whole("failed_number"), request, self._whole("failed_errno")

    def _whole(self, name: str) -> int:
        return ctypes.c_int32.in_dll(self._library, name).value


def fork_subreaper(told: Iterable[object]) -> int | NativeSubreaper | None:
    """Fork a subreaper: return its process id; or, in the child, its state when C leaves a request to Python. None
    without a library.

    `told` has the arguments of `listen_to` in subreaper.c, in order. Raises OSError.
    """
    library = _library
    if library is None:
        return None
    packed = "\0".join(map(str, (*told, ""))).encode("utf-8", "surrogateescape")
    pid = kernel.fork_by(lambda: int(library.fork_subreaper(packed, len(packed))), "a subreaper")
    return pid or NativeSubreaper(library)
