"""The process that removes the layers of workspaces that are over, so that nobody waits for their files to be gone.

A fork of the keeper, in its namespaces. Several layers go side by side, a few files of each in turn: a small one does not
wait for a large one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
from collections.abc import Generator
from typing import NoReturn

from agent_runtime.executor.init.channel import Channel
from agent_runtime.executor.init.trees import removal

# Of one layer, before the next one has its turn: as many as a layer has in which nothing was written.
_STEPS = 30


def serve(channel: Channel) -> NoReturn:
    """Remove the layers that are asked for, from the folder that this process is in, until the executor has gone."""
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
            with contextlib.suppress(OSError):  # what cannot be removed stays, until an executor starts here again
                steps = sum(1 for _ in itertools.islice(files, _STEPS))
            if steps < _STEPS:
                del removals[number]
                channel.send(number, {})
