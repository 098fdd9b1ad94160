"""The Events of a job: what happened since its status was last written, in the words of `kubectl describe`."""

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_operator.actions import Event
from rollout_operator.rollout_job.observe import Observed
from rollout_operator.rollout_job.status import RESTARTED, Findings
from rollout_operator.rollout_job.verdict import last_failure


def story(seen: Observed, found: Findings, status: Mapping[str, Any]) -> tuple[Event, ...]:
    """What is new in a status that is about to be written."""
    return tuple(_events(seen, found, {condition["type"]: condition for condition in status["conditions"]}))


def _events(seen: Observed, found: Findings, now: Mapping[str, Mapping[str, Any]]) -> Iterator[Event]:
    def begins(kind: str) -> bool:
        return _holds(now.get(kind, {})) and not _holds(seen.condition(kind))

    if (invalid := now.get("Invalid")) and invalid["message"] != seen.condition("Invalid").get("message"):
        yield Event("Warning", "InvalidSpec", invalid["message"])
    if begins("Progressing") and found.verdict is None and not seen.suspend:
        yield from _started(seen, found)
    if _restarted(seen, found, now["Progressing"]):
        yield Event("Warning", "RunnerRestarted", f"a runner failed and is started again: {last_failure(seen)}")
    if begins("Suspended"):
        yield Event("Normal", "Suspended", f"no runner is left and all sandboxes are given back; {found.totals}")
    if begins("Succeeded"):
        yield Event("Normal", "Succeeded", f"{_summary(found)}; results are in {found.result_uri}")
    if begins("Failed"):
        failed = now["Failed"]
        yield Event("Warning", "Failed", f"{failed['reason']}: {failed['message']}; {_summary(found)}")


def _started(seen: Observed, found: Findings) -> Iterator[Event]:
    if _holds(seen.condition("Suspended")):
        yield Event("Normal", "Resumed", f"runners go on where they were: {found.totals}")
    else:
        runners = "1 runner" if seen.replicas == 1 else f"{seen.replicas} runners"
        rollouts = f" for {found.totals.total} rollouts" if found.totals.total is not None else ""
        yield Event("Normal", "Started", f"starting {runners}{rollouts}; results go to {found.result_uri}")


def _restarted(seen: Observed, found: Findings, progressing: Mapping[str, Any]) -> bool:
    if found.verdict is not None or seen.suspend or seen.held:
        return False
    said = seen.condition("Progressing")
    if found.failures:
        return bool(progressing["reason"] == RESTARTED and progressing["message"] != said.get("message"))
    # A new result came together with the failure, which was not told of yet.
    before, after = seen.restarts, found.restarts
    if before is None or after is None or said.get("reason") == RESTARTED:
        return False
    return after.failed_pods > before.failed_pods


def _summary(found: Findings) -> str:
    totals = found.totals
    by_outcome = ", ".join(f"{count} {outcome}" for outcome, count in totals.outcomes.items())
    reward = f"mean reward {totals.mean_reward:g}" if totals.mean_reward is not None else ""
    return "; ".join(filter(None, (str(totals), by_outcome, reward)))


def _holds(condition: Mapping[str, Any]) -> bool:
    return bool(condition.get("status") == "True")
