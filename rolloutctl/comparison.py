"""Two runs compared by task."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from agent_runtime.recording.job_record import TaskList, differences
from agent_runtime.recording.reader import RunFolder
from agent_runtime.recording.seals import SealedResults
from agent_runtime.statistics import Difference, mean, paired_difference, with_rewards


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
        difference = self.difference
        return {
            "before": self.before,
            "after": self.after,
            "tasks": {task: {"before": before, "after": after} for task, (before, after) in self.tasks.items()},
            "onlyBefore": self.only_before,
            "onlyAfter": self.only_after,
            "meanBefore": None if difference is None else difference.before,
            "meanAfter": None if difference is None else difference.after,
            "difference": None if difference is None else difference.mean,
            "confidenceInterval": None if difference is None else difference.interval,
            "manifest": self.manifest,
        }


async def compare(before: RunFolder, after: RunFolder) -> Comparison:
    """Compare two runs. Raises RecordCorrupt."""
    first, second = await _rewards(before), await _rewards(after)
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


async def _rewards(run: RunFolder) -> Mapping[str, list[float]]:
    """Return the rewards of graded rollouts by task."""
    rewards = defaultdict[str, list[float]](list)
    with contextlib.closing(SealedResults(run.store)) as sealed:
        await sealed.load()
        for result, reward in with_rewards(sealed.values()):
            rewards[result.task].append(reward)
    return rewards
