"""Which groups of a job this process works on: all about a group is decided in one process."""

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
