"""Which groups of a job this process works on, and the seeds that follow from that of the manifest."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """One of `count` runners; a laptop has one."""

    index: int = 0
    count: int = 1

    def has(self, group: int) -> bool:
        """Whether a group is this runner's."""
        return group % self.count == self.index

    def groups(self, total: int) -> int:
        """How many of the job's groups are this runner's."""
        return len(range(self.index, total, self.count))


WHOLE_JOB = Shard()


def rollout_seed(job_seed: int, index: int) -> int:
    """The seed of a rollout, the same for all its attempts. 31 bits: some servers refuse more."""
    digest = hashlib.sha256(f"{job_seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one model call; equal prompts in two turns must not give equal samples by construction."""
    return (seed + turn) & 0x7FFF_FFFF
