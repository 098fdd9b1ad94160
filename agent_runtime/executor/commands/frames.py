"""The frames of a connection that carries commands (docs/executor.md, "Commands"). Pure; both ends use it."""

import struct

# The protocol to which the connection is upgraded, in the Upgrade header of the call that attaches it.
UPGRADE = "rollout-commands"
# The header of every frame: the number of bytes that follow, and the command's number.
HEAD = struct.Struct(">II")
# deadline in seconds, or infinity; bytes kept of each stream's head, tail and middle; bytes of standard input; 1 if the
# command lives on and its input stays open; rows and columns of its terminal, or 0
ORDER = struct.Struct(">dIIQIBHH")
# kind; exit code, or -1; signal, or 0; bytes of the cause; seconds; then for each stream: total bytes, bytes of its
# head, bytes of its tail
ENDED = struct.Struct(">BhBBdQIIQII")
IS_ENDED, IS_RUNNING, IS_REFUSED = 0, 1, 2


def framed(number: int, content: bytes) -> bytes:
    """Return the frame with this content."""
    return HEAD.pack(HEAD.size - 4 + len(content), number) + content
