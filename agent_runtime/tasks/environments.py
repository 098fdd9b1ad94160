"""Groups of environments as tasks: each has a seed of its own, which all members of its group share."""

from collections.abc import Iterator, Sequence

from rollout_api.environments import TaskEnvironment
from rollout_api.tasks import EnvironmentGroups, Task


def environment_tasks(environments: Sequence[EnvironmentGroups]) -> list[Task]:
    """One task a group, in the order of the entries; `TAG-0`, `TAG-1` and so on."""
    return [task for entry in environments for task in _tasks(entry)]


def _tasks(entry: EnvironmentGroups) -> Iterator[Task]:
    for group in range(entry.groups):
        yield Task(
            name=f"{entry.label}-{group}",
            prompt=entry.prompt,
            tags=[entry.label],
            timeouts=entry.timeouts,
            environment=TaskEnvironment(
                id=entry.id,
                seed=entry.seed + group,
                max_steps=entry.max_steps,
                format_penalty=entry.format_penalty,
                config=entry.config,
                run_in=entry.run_in,
            ),
        )
