"""How a runner ends, as its exit code: what `kubectl get pod` and the Job controller see."""

from enum import IntEnum


class Exit(IntEnum):
    """Only `REPORTED` completes the pod's index of the Job; after every other one Kubernetes starts another pod."""

    REPORTED = 0
    """The shard has its verdict, Completed or Aborted, and its RolloutShard has it."""
    CRASHED = 1
    """A bug, or a death by signal: the supervisor starts the engine again."""
    BAD_START = 2
    """The pod lacks what the operator gives it: job, key, index."""
    BAD_JOB = 3
    """The job cannot run as it is written; reported as Aborted by a shard that never worked."""
    STORAGE = 4
    """Object storage refuses, or was away for longer than the patience for it; or the tasks cannot be read."""
    MODEL = 5
    """The model endpoint refuses, or cannot be reached."""
    SANDBOXES = 6
    """No sandbox can be had at all."""
    SUPERSEDED = 7
    """Another runner works on this shard."""
    UNREPORTED = 8
    """The shard has its verdict, and the API server refuses to take it."""
    CANCELLED = 10
    """The RolloutJob is gone."""
    DRAINED = 11
    """Asked to stop: what ran is journaled, the next pod goes on with it."""


DECISIONS = frozenset(Exit) - {Exit.CRASHED}
"""Ends that the engine chose. Starting it again at once would come to the same."""
