"""Two runs compared by task."""

import contextlib
import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.recording.job_record import TaskList, differences
from agent_runtime.recording.reader import RunFolder
from agent_runtime.recording.seals import SealedResults
from agent_runtime.statistics import Difference, mean, paired_difference, with_rewards

Rewards = Mapping[str, Sequence[float]]
"""Rewards of graded rollouts by task."""


@dataclass(frozen=True)
class Comparison:
    """Two runs by task. Means are of graded rollouts."""

    before: str
    after: str
    tasks: Mapping[str, tuple[float, float]]
    """Mean reward before and after, of the tasks that both runs have graded."""
    only_before: list[str]
    only_after: list[str]
    difference: Difference | None
    """None without a common task."""
    manifest: list[str]
    """How the manifest, or what it refers to, changed: lines `field: before → after`."""

    def wire(self) -> dict[str, object]:
        """Return the comparison as JSON."""
        return {
            **self._facts(),
            "tasks": {task: {"before": before, "after": after} for task, (before, after) in self.tasks.items()},
            "onlyBefore": self.only_before,
            "onlyAfter": self.only_after,
        }

    def part(self, show: str, most: int) -> dict[str, Any]:
        """Return what a page shows as JSON: how many tasks changed how, and those that are `all`, `changed`, `better` or
        `worse`, the worst `most` of them. Raises KeyError for another name.
        """
        rows = [(after - before, task, before, after) for task, (before, after) in self.tasks.items()]
        found = {
            "all": rows,
            "changed": [row for row in rows if row[0]],
            "better": [row for row in rows if row[0] > 0],
            "worse": [row for row in rows if row[0] < 0],
        }
        return {
            **self._facts(),
            "counts": {name: len(listed) for name, listed in found.items()},
            "tasks": [
                {"task": task, "before": before, "after": after}
                for _, task, before, after in heapq.nsmallest(most, found[show])
            ],
            "onlyBefore": len(self.only_before),
            "onlyAfter": len(self.only_after),
        }

    def _facts(self) -> dict[str, object]:
        difference = self.difference
        return {
            "before": self.before,
            "after": self.after,
            "meanBefore": None if difference is None else difference.before,
            "meanAfter": None if difference is None else difference.after,
            "difference": None if difference is None else difference.mean,
            "confidenceInterval": None if difference is None else difference.interval,
            "manifest": self.manifest,
        }


async def compare(before: RunFolder, after: RunFolder) -> Comparison:
    """Compare two runs. Raises RecordCorrupt."""
    return compared(before, await _rewards(before), after, await _rewards(after))


def compared(before: RunFolder, first: Rewards, after: RunFolder, second: Rewards) -> Comparison:
    """Compare two runs of which the rewards of graded rollouts are known."""
    common = [task for task in first if task in second]
    return Comparison(
        before=before.folder,
        after=after.folder,
        tasks={task: (mean(first[task]) or 0.0, mean(second[task]) or 0.0) for task in common},
        only_before=[task for task in first if task not in second],
        only_after=[task for task in second if task not in first],
        difference=paired_difference([(first[task], second[task]) for task in common]),
        manifest=[
            *differences(before.job_file.manifest["spec"], after.job_file.manifest["spec"], "spec"),
            *_changed_tasks(before.job_file.tasks, after.job_file.tasks),
        ],
    )


def _changed_tasks(before: TaskList, after: TaskList) -> list[str]:
    """Return a line if tasks of the same names have other contents: rewards by name are then of different tasks."""
    is_changed = before.names == after.names and before.digest != after.digest
    return ["tasks: prompts, files or verifiers of tasks with the same names"] * is_changed


async def _rewards(run: RunFolder) -> Rewards:
    with contextlib.closing(SealedResults(run.store)) as sealed:
        await sealed.load()
        return by_task((result.task, reward) for result, reward in with_rewards(sealed.values()))


def by_task(rewards: Iterable[tuple[str, float]]) -> Rewards:
    """Return rewards with their tasks by task."""
    found = defaultdict[str, list[float]](list)
    for task, reward in rewards:
        found[task].append(reward)
    return found
