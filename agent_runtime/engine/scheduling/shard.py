"""The groups of a job that this process runs, and seeds derived from the manifest's."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """One of `count` runners; a laptop has one."""

    index: int = 0
    count: int = 1

    def has(self, group: int) -> bool:
        """Whether a group belongs to this runner."""
        return group % self.count == self.index

    def groups(self, total: int) -> int:
        """Return the number of the job's groups that belong to this runner."""
        return len(range(self.index, total, self.count))


WHOLE_JOB = Shard()


def derived_seed(seed: int, of: str) -> int:
    """Return another seed. 31 bits: some servers refuse more. A server gives equal answers to equal prompts with equal
    seeds, so `of` names what no other sample has.
    """
    digest = hashlib.sha256(f"{seed}/{of}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def rollout_seed(job_seed: int, index: int, origin: str = "") -> int:
    """Return the seed of a rollout, the same for all its attempts. A branch's `origin` keeps it from repeating the
    continuation of its source, which may have the same index.
    """
    return derived_seed(job_seed, f"{index}/{origin}" if origin else str(index))


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of one model call. It differs between turns, so that equal prompts do not force equal samples."""
    return (seed + turn) & 0x7FFF_FFFF
