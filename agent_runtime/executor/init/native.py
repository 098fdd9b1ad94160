"""Python interface of the subreaper in C (subreaper.c). The executor's bundle has it compiled; elsewhere it needs a
compiler at installation.

Without it, commands.py handles all commands; with it, only those that the C code does not support.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from agent_runtime.executor import kernel
from agent_runtime.executor.init.channel import StartRequest, unpack

# subreaper.c: HEADER_BYTES, and enum result.
_HEADER_BYTES = 5
_DISCONNECTED, _NOT_STARTED = 1, 3


def _load_library() -> ctypes.PyDLL | None:
    """Return the library; None if it is missing or older than its source. A fork must keep the interpreter's lock,
    hence PyDLL.
    """
    folder = os.path.dirname(__file__)
    source = f"{folder}/subreaper.c"
    for name in os.listdir(folder):
        if name.startswith("subreaper") and name.endswith(".so"):
            library = f"{folder}/{name}"
            if not os.path.exists(source) or os.path.getmtime(source) <= os.path.getmtime(library):
                found = ctypes.PyDLL(library, use_errno=True)
                # Look the function up before the first fork, because the first use in a process copies memory pages.
                found.fork_subreaper.restype = ctypes.c_int32
                return found
    return None


_library = _load_library()


def is_compiled() -> bool:
    return _library is not None


class NativeSubreaper:
    """Access to the C code from a forked subreaper, when Python must handle a request."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library

    def serve(self) -> bool:
        """Continue in C; False if the executor has disconnected."""
        return bool(self._library.serve() != _DISCONNECTED)

    def not_started(self) -> tuple[int, StartRequest, int] | None:
        """Return number, request and errno if the kernel refused to execute the program; None if the request is still
        queued.
        """
        if self._read_int("result") != _NOT_STARTED:
            return None
        packet = ctypes.addressof(ctypes.c_char.in_dll(self._library, "packet"))
        request = unpack(ctypes.string_at(packet, self._read_int("packet_bytes"))[_HEADER_BYTES:])
        return self._read_int("failed_number"), request, self._read_int("failed_errno")

    def _read_int(self, name: str) -> int:
        return ctypes.c_int32.in_dll(self._library, name).value


def fork_subreaper(arguments: Iterable[object]) -> int | NativeSubreaper | None:
    """Fork a subreaper and return its process id; None without a library. In the child, return a NativeSubreaper when C
    leaves a request to Python.

    `arguments` are the values that `parse_settings` in subreaper.c reads, in order. Raises OSError.
    """
    library = _library
    if library is None:
        return None
    packed = "\0".join(map(str, (*arguments, ""))).encode("utf-8", "surrogateescape")
    pid = kernel.fork_by(lambda: int(library.fork_subreaper(packed, len(packed))), "a subreaper")
    return pid or NativeSubreaper(library)
