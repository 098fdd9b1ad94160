"""Statistics of the groups of a run, and anomalies. Masked rollouts are excluded from all means."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent_runtime.extensions import raised_in
from agent_runtime.statistics import mean, pass_at_k, sample_std, with_rewards
from rollout_api.records import Outcome, Result, Seal, StopReason
from rollout_api.tasks import VerifierMode
from rolloutctl.ui.console import amount


@dataclass(frozen=True)
class GroupFigures:
    """Statistics of one task. Means are None without a graded rollout; `pass_at_k` is None with fewer than k of them."""

    task: str
    graded: int
    mean: float | None
    std: float | None
    pass_at_1: float | None
    pass_at_k: float | None
    outcomes: dict[str, int]
    """Number of rollouts by stop reason if Completed, else by outcome."""


def how_it_ended(result: Result) -> str:
    """Return the stop reason of a Completed rollout, or the outcome of a masked one."""
    if result.outcome is Outcome.COMPLETED and result.stop_reason is not None:
        return result.stop_reason.value
    return result.outcome.value


def group_figures(results: Iterable[Result], k: int) -> list[GroupFigures]:
    """Return the statistics of each group in order. Results must be sorted by index."""
    groups = itertools.groupby(results, key=lambda result: result.group)
    return [_group(list(members), k) for _, members in groups]


def _group(members: Sequence[Result], k: int) -> GroupFigures:
    graded = list(with_rewards(members))
    rewards = [reward for _, reward in graded]
    passed = sum(result.passed is True for result, _ in graded)
    return GroupFigures(
        task=members[0].task,
        graded=len(graded),
        mean=mean(rewards),
        std=sample_std(rewards),
        pass_at_1=mean([result.passed is True for result, _ in graded]),
        pass_at_k=pass_at_k(len(graded), passed, k) if len(graded) >= k else None,
        outcomes=dict(Counter(map(how_it_ended, members)).most_common()),
    )


SHOWN = 5
REASON_CHARACTERS = 200

_STOPS = {
    StopReason.MAX_TURNS: "the limit of turns was reached (agent.maxTurns); the work so far was graded.",
    StopReason.TOKEN_BUDGET: "the limit of tokens was reached (agent.tokenBudget); the work so far was graded.",
    StopReason.CONTEXT_EXCEEDED: "the model's context was full; the work so far was graded.",
    StopReason.CONTENT_FILTER: "the model server refused to answer; the work so far was graded.",
    StopReason.EMPTY_ANSWER: "the model returned an empty answer; the work so far was graded.",
    StopReason.AGENT_TIMEOUT: "the time limit was reached (timeouts.agentSeconds); the work so far was graded.",
    StopReason.TOOL_FORMAT: "too many consecutive tool calls were malformed (agent.maxFormatErrors). The model saw each "
    "error and could have corrected it, so the reward counts.",
    StopReason.RESOURCE_LIMIT: "a limit was exceeded (sandbox.resources, verifier.artifactsLimit). "
    "The policy caused that, so the reward counts.",
    StopReason.AGENT_ERROR: "the agent's own code raised, or the model failed at its requests in two attempts; the work so "
    "far was graded.",
}

_MASKED = {
    Outcome.INFRA_FAILED: "lost to infrastructure after all attempts",
    Outcome.VERIFIER_FAILED: "not graded, because the verifier failed",
    Outcome.CANCELLED: "cancelled",
}


def shortened_line(text: str | None) -> str:
    """Return the first line of a message, cut to REASON_CHARACTERS."""
    line = (text or "").strip().partition("\n")[0]
    return line if len(line) <= REASON_CHARACTERS else f"{line[: REASON_CHARACTERS - 1]}…"


class _Members:
    """Collects rollouts with a common property: their number, the first indices, counted words, and a total of events."""

    def __init__(self) -> None:
        self.count, self.times = 0, 0
        self.words: Counter[str] = Counter()
        self._first: list[int] = []

    def add(self, index: int, words: Iterable[str] = (), times: int = 0) -> None:
        self.count += 1
        self.times += times
        self.words.update(words)
        if len(self._first) < SHOWN:
            self._first.append(index)

    @property
    def rollouts(self) -> str:
        """Format a count: `1 rollout`, `9 rollouts`."""
        return amount(self.count, "rollout")

    @property
    def rollouts_were(self) -> str:
        """Format a count with its verb: `1 rollout was`, `9 rollouts were`."""
        return f"{self.rollouts} {'was' if self.count == 1 else 'were'}"

    @property
    def references(self) -> str:
        """Format the first indices: `Rollouts 0, 1, 2.`"""
        listed = ", ".join(map(str, self._first))
        return f"Rollout{'s' if self.count > 1 else ''} {listed}{', …' if self.count > SHOWN else ''}."

    def counted(self, most: int = 5) -> str:
        shown = sorted(self.words.items(), key=lambda item: (-item[1], item[0]))
        parts = [name if count == 1 else f"{name} ×{count}" for name, count in shown[:most]]
        return "; ".join(parts) + (f"; and {len(shown) - most} more" if len(shown) > most else "")


def notes(seals: Iterable[Seal]) -> list[str]:
    """Return a text for each anomaly. Reads the seals once and keeps none in memory."""
    by_outcome, by_stop, by_plugin, by_filter, by_tool = (defaultdict[str, _Members](_Members) for _ in range(5))
    first_lost: dict[Outcome, str] = {}
    dropped, forked, shared, unjudged = (_Members() for _ in range(4))
    for seal in seals:
        result = seal.result
        if result.outcome is not Outcome.COMPLETED:
            by_outcome[result.outcome].add(result.index, [result.reason or "no reason given"])
            first_lost.setdefault(result.outcome, shortened_line(result.message))
        elif result.stop_reason is not None:
            by_stop[result.stop_reason].add(result.index)
        if seal.verdict and seal.verdict.dropped:
            dropped.add(result.index, set(seal.verdict.dropped))
        if result.verifier_message:
            unjudged.add(result.index, [shortened_line(result.verifier_message)])
        if result.token_forks:
            forked.add(result.index, times=result.token_forks)
        for name, report in result.plugins.items():
            if report.failed:
                by_plugin[name].add(result.index, [str(report.error)], report.failed)
            if result.tool_calls and report.refused >= result.tool_calls:
                by_filter[name].add(result.index, times=report.refused)
        for name, traceback in result.tool_tracebacks.items():
            by_tool[name].add(result.index, [raised_in(traceback)])
        if seal.verdict and seal.verdict.mode is VerifierMode.SHARED:
            shared.add(result.index)
    found = []
    for outcome, words in _MASKED.items():
        if members := by_outcome.get(outcome):
            found.append(
                f"{members.rollouts_were} {words} ({members.counted()}), and masked: excluded from every mean. "
                f"{members.references}" + (f" First: {first_lost[outcome]}" if first_lost[outcome] else "")
            )
    for stop, words in _STOPS.items():
        if members := by_stop.get(stop):
            found.append(f"{members.rollouts} ended with {stop.value}: {words} {members.references}")
    if dropped.count:
        found.append(
            f"{dropped.rollouts} wrote files that could change the verdict, so these files were not carried into the "
            f"grading: {dropped.counted(most=3)}. {dropped.references}"
        )
    if unjudged.count:
        found.append(
            f"{unjudged.rollouts} got a failed verdict because the verifier raised or wrote no usable report: "
            f"{unjudged.counted(most=3)}. `rolloutctl show` has the verifier's output. {unjudged.references}"
        )
    if forked.count:
        found.append(
            f"In {forked.rollouts} the model server encoded earlier answers to other token ids than it had sampled, "
            f"{forked.times} times. The tokens before each such change are a separate training sample "
            f"(docs/token-exact.md). {forked.references}"
        )
    for name, members in by_plugin.items():
        is_filter = any(word.startswith("filter_tool_call:") for word in members.words)
        effect = "tool calls that it could not filter were not run" if is_filter else "the failed calls had no effect"
        found.append(
            f"Plugin {name} failed {members.times} times, first with {next(iter(members.words))}. Rewards still come "
            f"from the verifier, but {effect}. {members.references}"
        )
    for name, members in by_filter.items():
        found.append(
            f"Plugin {name} refused every tool call of {members.rollouts}: {amount(members.times, 'call')}. The model saw "
            f"the refusals, so the reward counts. {members.references}"
        )
    for name, members in by_tool.items():
        found.append(
            f"The code of tool {name} raised in {members.rollouts}. The model saw the error, so the reward counts. "
            f"{members.references} First error: {next(iter(members.words))}"
        )
    if shared.count:
        found.append(
            f"{shared.rollouts_were} graded in the agent's own workspace (verifier.mode: Shared), so an agent could "
            "forge these rewards."
        )
    return found
