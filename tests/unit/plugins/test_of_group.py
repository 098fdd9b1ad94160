"""A group is judged by its first members, whichever ends first, so that fast members have no advantage."""

from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_rollouts.plugins import GroupInfo
from agent_runtime.plugins.builtin import PerformanceStop, stop_reason
from agent_runtime.plugins.plugins import GroupPlugins, Plugins
from rollout_api.records import Result
from rollout_api.tasks import Task
from tests.support.full import examples

INFO = GroupInfo(0, Task(name="t", prompt="p"), 10)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50))
@given(st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=10, max_size=10), st.permutations(range(10)))
async def test_decision_does_not_depend_on_the_order_of_ends(
    make_result: Callable[..., Result], rewards: list[float | None], order: Sequence[int]
) -> None:
    plugins = Plugins.open([], [PerformanceStop])
    group = GroupPlugins(plugins, INFO, "run")
    ended: dict[int, Result] = {}
    decided_at = None
    for member in order:
        ended[member] = make_result(member, rewards[member])
        await group.judge(ended)
        if group.stopped and decided_at is None:
            decided_at = next(n for n in range(11) if n not in ended)
    plugins.close()

    def graded(first: int) -> list[float]:
        return [reward for reward in rewards[:first] if reward is not None]

    expected = next((first for first in range(1, 10) if stop_reason(graded(first), 0.8, 3, 10)), None)
    assert (group.stopped is not None) == (expected is not None)
    if expected is not None and decided_at is not None:
        assert decided_at >= expected, "not before all of the first members had ended"


async def test_manager_is_called_once_for_each_number_of_first_members(make_result: Callable[..., Result]) -> None:
    asked: list[tuple[int, str]] = []

    class Asked:
        def should_stop_group(self, results: Sequence[Result], key: str) -> None:
            asked.append((len(results), key))

    plugins = Plugins.open([], [Asked()])
    group = GroupPlugins(plugins, GroupInfo(3, INFO.task, 3), "run")
    results = {2: make_result(2, 1.0)}
    await group.judge(results)
    assert asked == []
    await group.judge(results | {0: make_result(0, 1.0), 1: make_result(1, 1.0)})
    await group.judge(results | {0: make_result(0, 1.0), 1: make_result(1, 1.0)})
    assert asked == [(1, "run/group-3:after-1"), (2, "run/group-3:after-2")]
    plugins.close()


async def test_changes_of_a_manager_to_results_reach_no_other_manager(make_result: Callable[..., Result]) -> None:
    seen: list[list[list[str]]] = []

    class Changing:
        def should_stop_group(self, results: list[Result]) -> None:
            seen.append([list(result.tags) for result in results])
            results[0].tags.append("changed")
            results.clear()

    plugins = Plugins.open([], [Changing(), type("Second", (Changing,), {})()])
    group = GroupPlugins(plugins, GroupInfo(3, INFO.task, 3), "run")
    await group.judge({0: make_result(0, 1.0), 1: make_result(1, 1.0)})
    assert seen == [[[]]] * 2 + [[[], []]] * 2
    plugins.close()
