"""The built-in plugins PerformanceStop and TrajectoryAnalysis."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from agent_runtime.plugins.base import FinishedRollout, GroupInfo, RolloutManager, ToolUse, TrajectoryAnalyzer
from agent_runtime.statistics import mean, with_rewards
from rollout_api.records import Result


class PerformanceStop(RolloutManager):
    """Ends a group when the last `minEpisodes` graded members, in their order, all reach `threshold`.

    It ends the group after `maxEpisodes` members at the latest. Masked members do not count; the rest of the group is
    Cancelled.
    """

    def __init__(
        self,
        threshold: Annotated[float, Field(ge=0, le=1, description="Reward that counts as success.")] = 0.8,
        min_episodes: Annotated[int, Field(ge=1, description="Successes in a row that end the group.")] = 3,
        max_episodes: Annotated[
            int, Field(ge=1, description="Number of graded members that ends the group whatever their rewards.")
        ] = 10,
    ) -> None:
        self.threshold, self.min_episodes, self.max_episodes = threshold, min_episodes, max_episodes

    async def should_stop_group(self, group: GroupInfo, results: Sequence[Result]) -> str | None:
        rewards = [reward for _, reward in with_rewards(results)]
        return stop_reason(rewards, self.threshold, self.min_episodes, self.max_episodes)


def stop_reason(rewards: Sequence[float], threshold: float, least: int, most: int) -> str | None:
    """Return why the rewards so far suffice, or None. Pure."""
    last = rewards[-least:]
    if len(last) == least and all(reward >= threshold for reward in last):
        return f"the last {least} rewards reach {threshold:g}"
    if len(rewards) >= most:
        return f"{most} members are graded, which is maxEpisodes"
    return None


LAST_ERRORS = 5
ERROR_CHARACTERS = 200
"""Most characters of one stored error: enough to recognise it."""

_CATEGORIES = (
    ("refused", ("refused by",)),
    ("timeout", ("timed out", "timeout", "deadline")),
    ("permission", ("permission denied", "operation not permitted", "not allowed")),
    ("notFound", ("not found", "no such file", "does not exist")),
    ("import", ("importerror", "modulenotfounderror", "no module named")),
    ("syntax", ("syntaxerror", "syntax error")),
)
"""Kinds of errors, and words that identify them; the first match counts."""


class TrajectoryAnalysis(TrajectoryAnalyzer):
    """Reports for each rollout which tools it used, its errors, where its time went, and possible improvements."""

    def __init__(
        self,
        error_rate: Annotated[
            float, Field(ge=0, le=1, description="Share of failed calls above which a rollout gets a suggestion.")
        ] = 0.3,
        many_calls: Annotated[
            int, Field(ge=1, description="Number of tool calls above which a rollout gets a suggestion.")
        ] = 50,
        slow_seconds: Annotated[
            float, Field(gt=0, description="Mean seconds of a call above which a rollout gets a suggestion.")
        ] = 10,
    ) -> None:
        self.error_rate, self.many_calls, self.slow_seconds = error_rate, many_calls, slow_seconds

    async def analyze_trajectory(self, finished: FinishedRollout) -> Mapping[str, Any]:
        uses = finished.tool_uses
        analysis = analysis_of(uses)
        verdict = finished.verdict
        checks = (
            [test.passed for test in verdict.tests] or [c.exit_code == 0 for c in verdict.commands] if verdict else []
        )
        return {
            **analysis,
            "turns": finished.result.turns,
            "checks": {"passed": sum(checks), "failed": len(checks) - sum(checks)},
            "suggestions": self.suggestions(analysis, len(checks) - sum(checks)),
        }

    def suggestions(self, analysis: Mapping[str, Any], failed_checks: int) -> list[str]:
        said = []
        if analysis["errorRate"] > self.error_rate:
            said.append(f"{analysis['errorRate']:.0%} of the tool calls failed: see errors")
        if analysis["toolCalls"] > self.many_calls:
            said.append(f"{analysis['toolCalls']} tool calls: consider splitting the task")
        if analysis["seconds"]["mean"] > self.slow_seconds:
            said.append(f"a tool call takes {analysis['seconds']['mean']:.1f} s: see slowest")
        if failed_checks:
            said.append(f"{failed_checks} of the verifier's checks failed")
        return said


def analysis_of(uses: Sequence[ToolUse]) -> dict[str, Any]:
    """Return statistics of a rollout's tool calls. Pure."""
    results = [use.result for use in uses if use.result is not None]
    failed = [use.result for use in uses if use.result is not None and _has_failed(use)]
    seconds = [result.seconds for result in results]
    slowest = sorted(results, key=lambda result: -result.seconds)[:3]
    return {
        "toolCalls": len(uses),
        "byTool": dict(Counter(use.call.name for use in uses).most_common()),
        "errorRate": round(len(failed) / len(uses), 4) if uses else 0.0,
        "errorKinds": dict(Counter(category(result.content) for result in failed).most_common()),
        "errors": [
            {"tool": result.tool, "error": result.content[:ERROR_CHARACTERS]} for result in failed[-LAST_ERRORS:]
        ],
        "seconds": {
            "total": round(sum(seconds), 3),
            "mean": round(mean(seconds) or 0.0, 3),
            "max": round(max(seconds, default=0.0), 3),
        },
        "slowest": [{"tool": result.tool, "seconds": round(result.seconds, 3)} for result in slowest],
    }


def category(error: str) -> str:
    text = error.lower()
    return next((kind for kind, words in _CATEGORIES if any(word in text for word in words)), "other")


def _has_failed(use: ToolUse) -> bool:
    return use.result is not None and (use.result.error or use.result.data.get("exitCode") not in (None, 0))
