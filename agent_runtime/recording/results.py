"""Results as lines and as statistics, reproducible. Masked rollouts are excluded from all means."""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from agent_runtime.statistics import mean, pass_at_k, sample_std, standard_error
from rollout_api.records import Outcome, PluginReport, Result

_COUNTED: Final[Mapping[str, Callable[[Result], int]]] = {
    "turns": lambda result: result.turns,
    "toolCalls": lambda result: result.tool_calls,
    # Lost attempts are paid for too.
    "promptTokens": lambda result: result.usage.prompt_tokens + result.lost_usage.prompt_tokens,
    "completionTokens": lambda result: result.usage.completion_tokens + result.lost_usage.completion_tokens,
    "cachedTokens": lambda result: result.usage.cached_tokens + result.lost_usage.cached_tokens,
    "failedAttempts": lambda result: len(result.failed_attempts),
    "tokenForks": lambda result: result.token_forks,
}
"""Counts that `stats.json` adds up."""


def in_order(versions: Iterable[str]) -> list[str]:
    """Return policy versions, each once, oldest first: they are integers in decimal, so 10 comes after 9."""
    return sorted(set(versions), key=lambda version: (len(version), version))


def result_line(result: Result) -> bytes:
    """Return a line of `results.jsonl`."""
    return result.model_dump_json(exclude_none=True).encode() + b"\n"


def statistics_of(results: Iterable[Result]) -> dict[str, Any]:
    """Return `stats.json`, independent of the order of the results. Only numbers are kept in memory.

    Rewards and pass@k are over graded Completed rollouts; times are seconds over all of them.
    """
    outcomes: Counter[str] = Counter()
    stop_reasons: Counter[str] = Counter()
    failure_reasons: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    groups: set[int] = set()
    versions: set[str] = set()
    rewards: dict[int, list[float]] = defaultdict(list)
    passed: dict[int, list[bool]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    plugins: dict[str, _PluginSums] = defaultdict(_PluginSums)
    ended: float | None = None
    for result in results:
        outcomes[result.outcome.value] += 1
        stop_reasons.update([result.stop_reason.value] if result.stop_reason else [])
        failure_reasons.update([result.reason] if result.reason else [])
        groups.add(result.group)
        ended = max(filter(None, (ended, result.ended)), default=None)
        versions.update(result.policy_versions)
        if result.outcome is Outcome.COMPLETED and result.reward is not None:
            rewards[result.group].append(result.reward)
            passed[result.group].append(result.passed is True)
        for field, count in _COUNTED.items():
            sums[field] += count(result)
        for part, value in result.seconds.items():
            seconds[part].append(value)
        for name, report in result.plugins.items():
            plugins[name].add(report)
    return {
        "rollouts": outcomes.total(),
        "groups": len(groups),
        "ended": ended,
        "outcomes": dict(sorted(outcomes.items())),
        "stopReasons": dict(sorted(stop_reasons.items())),
        "failureReasons": dict(sorted(failure_reasons.items())),
        "reward": {
            **_spread([reward for group in rewards.values() for reward in group]),
            "standardError": standard_error(list(rewards.values())),
        },
        "passAtK": _pass_at_k(passed),
        **{field: sums[field] for field in _COUNTED},
        "policyVersions": in_order(versions),
        "seconds": {part: _times(values) for part, values in sorted(seconds.items())},
    } | ({"plugins": {name: own.stats() for name, own in sorted(plugins.items())}} if plugins else {})


def with_groups(stats: Mapping[str, Any], shards: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Return the statistics with plugins' totals for whole groups, added up from the shards' verdicts."""
    plugins: dict[str, dict[str, Any]] = dict(stats.get("plugins", {}))
    for shard in shards:
        for name, sums in shard.items():
            known = plugins.get(name, {})
            plugins[name] = known | {key: round(known.get(key, 0) + value, 6) for key, value in sums.items()}
    return {**stats, **({"plugins": plugins} if plugins else {})}


def stats_json(stats: Mapping[str, Any]) -> bytes:
    """Return `stats.json` as bytes."""
    return json.dumps(stats, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _spread(values: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "count": len(values),
        "mean": mean(values),
        "std": sample_std(values),
        "min": min(values, default=None),
        "max": max(values, default=None),
    }


def _pass_at_k(passed: Mapping[int, Sequence[bool]]) -> dict[str, float]:
    """Return pass@k for k = 1, 2, 4, … up to the size of the smallest group, so that every such k is a mean over the same
    groups; and for the size of the largest group, over those of that size.
    """
    sizes = [len(members) for members in passed.values()]
    ks = [2**power for power in range(min(sizes, default=0).bit_length())]
    found = {}
    for k in dict.fromkeys([*ks, max(sizes, default=0)]):
        groups = [members for members in passed.values() if len(members) >= k > 0]
        if groups:
            found[str(k)] = mean([pass_at_k(len(members), sum(members), k) for members in groups])
    return {k: value for k, value in found.items() if value is not None}


class _PluginSums:
    """Totals of one plugin over all rollouts. Score statistics cover the rollouts that have scores."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter(dict.fromkeys(("calls", "refused", "changed", "failed"), 0))
        self._seconds: list[float] = []
        self._scores: dict[str, list[float]] = defaultdict(list)

    def add(self, report: PluginReport) -> None:
        for field in self._sums:
            self._sums[field] += getattr(report, field)
        self._seconds.append(report.seconds)
        for score, value in report.scores.items():
            self._scores[score].append(value)

    def stats(self) -> dict[str, Any]:
        return {
            **self._sums,
            "seconds": math.fsum(self._seconds),
            "scores": {score: _spread(values) for score, values in sorted(self._scores.items())},
        }


def _times(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": mean(values), "p50": statistics.median_low(values), "max": max(values), "total": math.fsum(values)}
