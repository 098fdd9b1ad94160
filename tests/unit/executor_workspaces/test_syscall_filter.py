"""The BPF program of a workspace, run by an interpreter: its answer to each system call of each ABI."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.executor.syscall_filter import AARCH64, ABIS, ARM, I386, REFUSED_FAMILIES, X86_64, filter_program

X32_BIT = 0x40000000
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
PROGRAM: list[tuple[int, int, int, int]] = [
    struct.unpack("=HBBI", row) for row in (filter_program()[at : at + 8] for at in range(0, len(filter_program()), 8))
]

# What builds, tests, debuggers and package managers use, and Docker's default profile restricts or allows: it has to work.
NEEDED = {
    X86_64: {"clone": 56, "unshare": 272, "clone3": 435, "ptrace": 101, "personality": 135, "chroot": 161, "mount": 165}
    | {
        "seccomp": 317,
        "execve": 59,
        "inotify_init1": 294,
        "socketpair": 53,
        "process_vm_readv": 310,
        "memfd_create": 319,
    },
    I386: {"clone": 120, "unshare": 310, "clone3": 435, "ptrace": 26, "personality": 136, "chroot": 61, "mount": 21}
    | {"seccomp": 354, "execve": 11, "inotify_init1": 332, "socketcall": 102, "memfd_create": 356},
    AARCH64: {"clone": 220, "unshare": 97, "clone3": 435, "ptrace": 117, "personality": 92, "chroot": 51, "mount": 40}
    | {"seccomp": 277, "execve": 221, "inotify_init1": 26, "socketpair": 199, "memfd_create": 279},
    ARM: {"clone": 120, "unshare": 337, "clone3": 435, "ptrace": 26, "personality": 136, "chroot": 61, "mount": 21}
    | {"seccomp": 383, "execve": 11, "inotify_init1": 360, "socketpair": 288, "memfd_create": 385},
}
IO_URING = {425, 426, 427}
REFUSED = {
    # add_key, request_key, keyctl, fanotify_init, userfaultfd, bpf, perf_event_open, syslog, kexec_load, kexec_file_load
    X86_64: IO_URING | {248, 249, 250, 300, 323, 321, 298, 103, 246, 320, 528},
    I386: IO_URING | {286, 287, 288, 338, 374, 357, 336, 103, 283},
    AARCH64: IO_URING | {217, 218, 219, 262, 282, 280, 241, 116, 104, 294},
    ARM: IO_URING | {309, 310, 311, 367, 388, 386, 364, 103, 347, 401},
}
SOCKET = {X86_64: 41, I386: 359, AARCH64: 198, ARM: 281}


def answer(abi: int, number: int, first_argument: int = 0) -> int:
    """Run the program on a struct seccomp_data, as kernel/seccomp.c does."""
    data = struct.pack("=IIQQ", number, abi, 0, first_argument) + bytes(40)
    at, held = 0, 0
    while True:
        code, if_equal, otherwise, value = PROGRAM[at]
        at += 1
        match code:
            case 0x20:  # load a word
                (held,) = struct.unpack_from("=I", data, value)
            case 0x54:  # and
                held &= value
            case 0x15:  # jump if equal
                at += if_equal if held == value else otherwise
            case 0x06:  # return
                return value
            case _:
                raise AssertionError(f"the kernel cannot precompute instruction {code:#x}")


@given(st.sampled_from(sorted(REFUSED)), st.integers(0, 600), st.booleans(), st.integers(0, 2**64 - 1))
def test_exactly_the_listed_system_calls_are_refused(abi: int, number: int, is_x32: bool, argument: int) -> None:
    is_refused = number in REFUSED[abi] or (number == SOCKET[abi] and argument & 0xFFFFFFFF in REFUSED_FAMILIES)
    asked = number | X32_BIT if is_x32 and abi == X86_64 else number
    assert answer(abi, asked, argument) == (EPERM if is_refused else ALLOW)


@pytest.mark.parametrize("abi", REFUSED)
def test_system_calls_of_builds_and_debuggers_are_allowed(abi: int) -> None:
    assert {name for name, number in NEEDED[abi].items() if answer(abi, number) != ALLOW} == set()


@pytest.mark.parametrize(
    ("abi", "number"), [(abi, number) for abi, numbers in REFUSED.items() for number in sorted(numbers)]
)
def test_refused_system_calls_fail_as_in_a_container(abi: int, number: int) -> None:
    assert answer(abi, number) == EPERM


@pytest.mark.parametrize("abi", SOCKET)
@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_sockets_outside_of_network_namespaces_are_refused(abi: int, family: int) -> None:
    assert answer(abi, SOCKET[abi], family) == EPERM
    assert answer(abi, SOCKET[abi], family - 1 if family == 38 else family + 1) == ALLOW


@given(st.integers(0, 2**32 - 1).filter(lambda abi: abi not in ABIS), st.integers(0, 600))
def test_an_unknown_abi_is_refused(abi: int, number: int) -> None:
    """Otherwise it would bypass the tables of the others."""
    assert answer(abi, number) == ENOSYS


def test_filter_program_fits_and_every_path_returns() -> None:
    assert len(PROGRAM) <= 4096  # BPF_MAXINSNS
    for at, (code, if_equal, otherwise, _) in enumerate(PROGRAM):
        assert code == 0x06 or at + 1 + max(if_equal, otherwise) < len(PROGRAM)
    assert PROGRAM[-1][0] == 0x06
