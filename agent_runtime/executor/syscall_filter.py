"""The seccomp filter of a workspace, as a classic BPF program. Pure; `kernel.set_syscall_filter` installs it.

All workspaces of an executor have the same users. So the kernel has one limit for the memory of io_uring, keys and
fanotify groups of all of them, and one workspace could use it up. The filter refuses the system calls that count
against such a limit, and others that expose much of the kernel. Docker's default profile (github.com/moby/profiles,
`seccomp/default.json`) refuses the same calls with the same error (EPERM) to a container with these capabilities. So
programs that run in a container run here.

A 64-bit kernel also accepts the system calls of 32-bit ABIs, which have other numbers: each ABI has a table. The numbers
come from the kernel's `syscall*.tbl` and `asm-generic/unistd.h`, the AUDIT_ARCH values from `linux/audit.h`.
"""

from __future__ import annotations

import errno
import struct
from typing import Final, NamedTuple

# Offsets in struct seccomp_data, of linux/seccomp.h. The low half of an argument comes first on all machines below.
_NUMBER, _ABI, _FIRST_ARGUMENT = 0, 4, 16
# From linux/bpf_common.h. The kernel precomputes the answer for system calls that are allowed without a check of
# arguments (kernel/seccomp.c, seccomp_is_const_allow): such a call never runs the filter.
_LOAD, _JUMP_IF_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN = 0x00050000 | errno.ENOSYS
# x32 uses the numbers of x86-64 with this bit set, and has further ones.
_X32_BIT = 0x40000000

# AF_ALG and AF_VSOCK: network namespaces do not isolate these sockets. i386 programs can still create them by
# `socketcall`, as in a container: 32-bit programs need that call, and its arguments are in memory, which a filter
# cannot read.
REFUSED_FAMILIES: Final = (38, 40)


class Abi(NamedTuple):
    """The numbers of one ABI: of `socket`, and of the refused system calls."""

    socket: int
    refused: dict[str, int]
    ignored_bits: int = 0


_IO_URING = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
X86_64, I386, AARCH64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028
ABIS: Final = {
    # also used for x32
    X86_64: Abi(
        41,
        _IO_URING
        | {"add_key": 248, "request_key": 249, "keyctl": 250, "fanotify_init": 300, "userfaultfd": 323, "bpf": 321}
        | {"perf_event_open": 298, "syslog": 103, "kexec_load": 246, "kexec_file_load": 320, "kexec_load of x32": 528},
        ignored_bits=_X32_BIT,
    ),
    I386: Abi(
        359,
        _IO_URING
        | {"add_key": 286, "request_key": 287, "keyctl": 288, "fanotify_init": 338, "userfaultfd": 374, "bpf": 357}
        | {"perf_event_open": 336, "syslog": 103, "kexec_load": 283},
    ),
    AARCH64: Abi(
        198,
        _IO_URING
        | {"add_key": 217, "request_key": 218, "keyctl": 219, "fanotify_init": 262, "userfaultfd": 282, "bpf": 280}
        | {"perf_event_open": 241, "syslog": 116, "kexec_load": 104, "kexec_file_load": 294},
    ),
    ARM: Abi(
        281,
        _IO_URING
        | {"add_key": 309, "request_key": 310, "keyctl": 311, "fanotify_init": 367, "userfaultfd": 388, "bpf": 386}
        | {"perf_event_open": 364, "syslog": 103, "kexec_load": 347, "kexec_file_load": 401},
    ),
}


def _instruction(code: int, value: int, if_equal: int = 0, otherwise: int = 0) -> bytes:
    """Return one struct sock_filter of linux/filter.h; the last two arguments are the numbers of instructions that a
    jump skips.
    """
    return struct.pack("=HBBI", code, if_equal, otherwise, value)


def _answer(abi: Abi) -> list[bytes]:
    """Return the part of the program for one ABI; it always returns."""
    lines = [_instruction(_LOAD, _NUMBER)]
    if abi.ignored_bits:
        lines.append(_instruction(_AND, ~abi.ignored_bits & 0xFFFFFFFF))
    refused, families = sorted(abi.refused.values()), REFUSED_FAMILIES
    # After the numbers come one jump for `socket`, the load of its family, a jump for each family, allow, refuse.
    rest = 2 + len(families)
    for index, number in enumerate(refused):
        lines.append(_instruction(_JUMP_IF_EQUAL, number, if_equal=len(refused) - index + rest))
    lines.append(_instruction(_JUMP_IF_EQUAL, abi.socket, otherwise=1 + len(families)))
    lines.append(_instruction(_LOAD, _FIRST_ARGUMENT))
    for index, family in enumerate(families):
        lines.append(_instruction(_JUMP_IF_EQUAL, family, if_equal=len(families) - index))
    return [*lines, _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _REFUSE)]


def filter_program() -> bytes:
    """Return an array of struct sock_filter that allows a system call, or refuses it; ENOSYS for an unknown ABI."""
    lines = [_instruction(_LOAD, _ABI)]
    for value, abi in ABIS.items():
        part = _answer(abi)
        lines += [_instruction(_JUMP_IF_EQUAL, value, otherwise=len(part)), *part]
    return b"".join([*lines, _instruction(_RETURN, _UNKNOWN)])
