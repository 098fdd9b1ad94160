"""Results as lines and as statistics: pure, and the same bytes whoever computes them. Masked rollouts count for no mean."""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout_api.records import Outcome, PluginReport, Result


def pass_at_k(graded: int, passed: int, k: int) -> float:
    """Chance that at least one of k rollouts, drawn without replacement from the graded ones, passed.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374). Needs 1 ≤ k ≤ graded.
    """
    return 1.0 - math.comb(graded - passed, k) / math.comb(graded, k)


def in_order(versions: Iterable[str]) -> list[str]:
    """Policy versions, each once, oldest first: they are whole numbers in decimal, so 10 comes after 9."""
    return sorted(set(versions), key=lambda version: (len(version), version))


def results_jsonl(results: Iterable[Result]) -> bytes:
    """`results.jsonl`: one result a line, by index."""
    return b"".join(
        result.model_dump_json(exclude_none=True).encode() + b"\n"
        for result in sorted(results, key=lambda result: result.index)
    )


def statistics_of(results: Iterable[Result]) -> dict[str, Any]:
    """`stats.json`. Rewards and pass@k are over graded Completed rollouts; times are seconds over all of them."""
    ordered = sorted(results, key=lambda result: result.index)
    graded = [result for result in ordered if result.outcome is Outcome.COMPLETED and result.reward is not None]
    return {
        "rollouts": len(ordered),
        "groups": len({result.group for result in ordered}),
        "outcomes": _counts(result.outcome.value for result in ordered),
        "stopReasons": _counts(result.stop_reason.value for result in ordered if result.stop_reason),
        "failureReasons": _counts(result.reason for result in ordered if result.reason),
        "reward": _spread([result.reward for result in graded if result.reward is not None]),
        "passAtK": _pass_at_k(graded),
        "turns": sum(result.turns for result in ordered),
        "toolCalls": sum(result.tool_calls for result in ordered),
        "promptTokens": sum(result.usage.prompt_tokens for result in ordered),
        "completionTokens": sum(result.usage.completion_tokens for result in ordered),
        "cachedTokens": sum(result.usage.cached_tokens for result in ordered),
        "failedAttempts": sum(len(result.failed_attempts) for result in ordered),
        "policyVersions": in_order(version for result in ordered for version in result.policy_versions),
        "tokenForks": sum(result.token_forks for result in ordered),
        "seconds": _seconds(ordered),
    } | ({"plugins": plugins} if (plugins := _plugins(ordered)) else {})


def stats_json(stats: Mapping[str, Any]) -> bytes:
    """`stats.json` as bytes."""
    return json.dumps(stats, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def _spread(values: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "count": len(values),
        "mean": statistics.fmean(values) if values else None,
        # Of the population: these rollouts are all there are, as GRPO takes it.
        "std": statistics.pstdev(values) if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
    }


def _pass_at_k(graded: Sequence[Result]) -> dict[str, float]:
    """For k = 1, 2, 4, … as far as the smallest group goes, so that every k is a mean over the same groups."""
    groups: dict[int, list[bool]] = defaultdict(list)
    for result in graded:
        groups[result.group].append(result.passed is True)
    most = min((len(members) for members in groups.values()), default=0)
    ks = [2**power for power in range(most.bit_length())]
    return {
        str(k): statistics.fmean(pass_at_k(len(members), sum(members), k) for members in groups.values()) for k in ks
    }


def _plugins(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """What each plugin did over all rollouts; its scores are over those that have them."""
    reports: dict[str, list[PluginReport]] = defaultdict(list)
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for name, report in result.plugins.items():
            reports[name].append(report)
            for score, value in report.scores.items():
                scores[name][score].append(value)
    return {
        name: {
            "calls": sum(report.calls for report in own),
            "seconds": math.fsum(report.seconds for report in own),
            "refused": sum(report.refused for report in own),
            "changed": sum(report.changed for report in own),
            "failed": sum(report.failed for report in own),
            "scores": {score: _spread(values) for score, values in sorted(scores[name].items())},
        }
        for name, own in sorted(reports.items())
    }


def _seconds(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    parts: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for part, seconds in result.seconds.items():
            parts[part].append(seconds)
    return {
        part: {
            "mean": statistics.fmean(values),
            "p50": statistics.median_low(values),
            "max": max(values),
            "total": math.fsum(values),
        }
        for part, values in sorted(parts.items())
    }
