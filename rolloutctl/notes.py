"""What a person should know of a run beyond its numbers, said so that it makes sense without reading the code."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rollout_api.records import Outcome, Result, StopReason, Verdict
from rollout_api.tasks import VerifierMode

_STOPS = {
    StopReason.MAX_TURNS: "all turns were used (agent.maxTurns); what was there was graded.",
    StopReason.TOKEN_BUDGET: "all tokens were used (agent.tokenBudget); what was there was graded.",
    StopReason.CONTEXT_EXCEEDED: "the model's context was full; what was there was graded.",
    StopReason.CONTENT_FILTER: "the model server refused to answer; what was there was graded.",
    StopReason.EMPTY_ANSWER: "the model answered nothing; what was there was graded.",
    StopReason.AGENT_TIMEOUT: "the time was over (timeouts.agentSeconds); what was there was graded.",
    StopReason.TOOL_FORMAT: "too many tool calls in a row could not be read (agent.maxFormatErrors). The model saw each "
    "error and could have mended it, so the reward counts.",
    StopReason.RESOURCE_LIMIT: "more was used than a workspace may (sandbox.resources, verifier.artifactsLimit). That is "
    "the policy's doing, so the reward counts.",
    StopReason.AGENT_ERROR: "the agent's own code raised an exception; what was there was graded.",
}

_MASKED = {
    Outcome.INFRA_FAILED: "were lost to infrastructure after all attempts",
    Outcome.VERIFIER_FAILED: "could not be graded",
    Outcome.CANCELLED: "were cancelled",
}


def notes(results: Sequence[Result], verdicts: Mapping[int, Verdict]) -> list[str]:
    """One sentence or two for each thing that stands out; `verdicts` by index, where there are any."""
    said = []
    for outcome, words in _MASKED.items():
        members = [result for result in results if result.outcome is outcome]
        if members:
            reasons = Counter(result.reason or "no reason given" for result in members)
            said.append(
                f"{_rollouts(members)} {words} ({_counted(reasons)}): masked, outside every mean. {_look(members)}"
            )
    for stop, words in _STOPS.items():
        members = [result for result in results if result.outcome is Outcome.COMPLETED and result.stop_reason is stop]
        if members:
            said.append(f"{_rollouts(members)} ended with {stop.value}: {words} {_look(members)}")
    dropped = {result.index: names for result in results if (names := _dropped(verdicts.get(result.index)))}
    if dropped:
        files = Counter(file for names in dropped.values() for file in set(names))
        members = [result for result in results if result.index in dropped]
        said.append(
            f"{_rollouts(members)} wrote files that could decide the verdict, so they were left out of the grading: "
            f"{_counted(files, most=3)}. {_look(members)}"
        )
    forked = [result for result in results if result.token_forks]
    if forked:
        said.append(
            f"In {_rollouts(forked)} the model server encoded earlier answers to other token ids than it had sampled, "
            f"{sum(result.token_forks for result in forked)} times: what was sampled before each is a training sample of "
            f"its own (docs/token-exact.md). {_look(forked)}"
        )
    failed = Counter[str]()
    for result in results:
        failed.update({name: report.failed for name, report in result.plugins.items()})
    for name, times in failed.items():
        if times:
            members = [result for result in results if name in result.plugins and result.plugins[name].failed]
            said.append(
                f"Plugin {name} failed {times} times, first with {members[0].plugins[name].error}. Rewards are the "
                f"verifier's all the same; what the plugin should have done there is not done. {_look(members)}"
            )
    shared = [
        result
        for result in results
        if (verdict := verdicts.get(result.index)) is not None and verdict.mode is VerifierMode.SHARED
    ]
    if shared:
        said.append(
            f"{_rollouts(shared)} were graded in the agent's own workspace (verifier.mode: Shared): an agent could "
            "forge these rewards."
        )
    return said


def _dropped(verdict: Verdict | None) -> Sequence[str]:
    return verdict.dropped if verdict else []


def _rollouts(members: Sequence[Result]) -> str:
    return "1 rollout" if len(members) == 1 else f"{len(members)} rollouts"


def _counted(names: Mapping[str, int], most: int = 5) -> str:
    shown = sorted(names.items(), key=lambda item: (-item[1], item[0]))
    parts = [name if count == 1 else f"{name} ×{count}" for name, count in shown[:most]]
    return "; ".join(parts) + (f"; and {len(shown) - most} more" if len(shown) > most else "")


def _look(members: Iterable[Result]) -> str:
    indices = [str(result.index) for result in members]
    return f"Rollout{'s' if len(indices) > 1 else ''} {', '.join(indices[:5])}{', …' if len(indices) > 5 else ''}."
