"""`seal KEY` removes a task's tests from its image and stores them encrypted; `open KEY` restores them for grading.

R2E-Gym's images contain the tests, which an agent that runs as root could read. The key derives from data that only the
dataset has. The cipher is the output stream of SHAKE-256, which is in the standard library; each key encrypts a single
text.
"""
# ruff: noqa: UP031 (the Python of an image may be an old one)

import hashlib
import io
import os
import shutil
import sys
import tarfile

SEALED = ".rollout-sealed/tests"
SCRIPT, TESTS, OUTSIDE = "run_tests.sh", "r2e_tests", "/r2e_tests"


def crypt(key: str, data: bytes) -> bytes:
    """Encrypt or decrypt."""
    stream = hashlib.shake_256(key.encode()).digest(len(data))
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
    return mixed.to_bytes(len(data), "big")


def remove(path: str) -> None:
    """Remove the entry at a path."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def seal(key: str) -> None:
    """Pack the tests, and remove them."""
    if not os.path.exists(SCRIPT):
        sys.exit("%s has no %s; expected an image of R2E-Gym" % (os.getcwd(), SCRIPT))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(SCRIPT)
        tests = TESTS if os.path.isdir(TESTS) else OUTSIDE
        archive.add(os.path.realpath(tests), TESTS)
    os.makedirs(os.path.dirname(SEALED))
    with open(SEALED, "wb") as file:
        file.write(crypt(key, packed.getvalue()))
    for path in (SCRIPT, TESTS, OUTSIDE, os.path.realpath(tests)):
        remove(path)


def unseal(key: str) -> None:
    """Restore the tests, replacing whatever the agent left at their paths."""
    with open(SEALED, "rb") as file:
        packed = crypt(key, file.read())
    for path in (SCRIPT, TESTS):
        remove(path)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        archive.extractall()


if __name__ == "__main__":
    {"seal": seal, "open": unseal}[sys.argv[1]](sys.argv[2])
