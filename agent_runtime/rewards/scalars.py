"""Results as scalars for a training curve: pure. Masked rollouts count for nothing but their own share."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from agent_runtime.rewards.statistics import mean, sample_std
from rollout_api.records import Outcome, Result


def scalars(results: Sequence[Result]) -> dict[str, float]:
    """Means over these rollouts, and the same by first tag as `env/TAG/...`; seconds are of wall time."""
    found = {"rollouts": float(len(results))}
    if results:
        found["masked"] = sum(result.outcome is not Outcome.COMPLETED for result in results) / len(results)
        found |= _means("rollout", results)
    by_tag: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.tags:
            by_tag[result.tags[0]].append(result)
    for tag, members in sorted(by_tag.items()):
        found |= _means(f"env/{tag}", members)
    return found


def _means(prefix: str, results: Sequence[Result]) -> dict[str, float]:
    completed = [result for result in results if result.outcome is Outcome.COMPLETED]
    values: Mapping[str, Sequence[float]] = {
        "reward": [result.reward for result in completed if result.reward is not None],
        "passed": [float(result.passed) for result in completed if result.passed is not None],
        "turns": [result.turns for result in completed],
        "completion_tokens": [result.usage.completion_tokens for result in completed],
        "seconds": [result.seconds["total"] for result in completed if "total" in result.seconds],
    }
    named: dict[str, list[float]] = defaultdict(list)
    for result in completed:
        for name, value in result.rewards.items():
            named[name].append(value)
    means = {
        f"{prefix}/{name}": found
        for name, listed in (*values.items(), *named.items())
        if (found := mean(listed)) is not None
    }
    if (std := sample_std(values["reward"])) is not None:
        means[f"{prefix}/reward_std"] = std
    return means
