"""Totals of a rollout's records, and the durations of its parts (defined in docs/recording.md). Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from agent_runtime.engine.attempt.agent_clock import agent_seconds_of, union
from agent_runtime.engine.attempt.assignment import Rollout
from agent_runtime.recording.branches import branch_of, copied_turn, token_forks
from agent_runtime.recording.results import in_order
from agent_runtime.wall_clock import unix_time
from rollout_api.records import (
    AttemptRecord,
    AttemptSummary,
    FailedRecord,
    IntentRecord,
    ObservationsRecord,
    Outcome,
    Record,
    ResponseRecord,
    Result,
    StopRecord,
    Usage,
    Verdict,
)
from rollout_api.rollout_job import RolloutJob

R = TypeVar("R", bound=Record)
VERIFIER_MESSAGE_CHARACTERS = 300
SHOWN_OUTPUT = 2000
"""Characters shown of a verifier's output: a traceback or the end of a test report."""


def first_record(records: Iterable[Record], form: type[R]) -> R | None:
    return next((record for record in records if isinstance(record, form)), None)


def last_record(records: Sequence[Record], form: type[R]) -> R | None:
    return first_record(reversed(records), form)


def attempt_seconds(records: Sequence[Record], *, ended: float, verifier: float) -> dict[str, float]:
    """Return the durations of the parts of an attempt that ends at `ended` (Unix seconds). Turns copied from another
    rollout do not count.
    """
    begun = first_record(records, AttemptRecord)
    if begun is None:
        return {}
    stop = last_record(records, StopRecord)
    copied = copied_turn(records)
    answers = [record for record in records if isinstance(record, ResponseRecord) and record.turn > copied]
    calling = union([(answer.time - answer.seconds, answer.time) for answer in answers])
    phases = {
        "boot": begun.boot_seconds,
        "agent": agent_seconds_of(records) if stop is None else stop.agent_seconds,
        "verifier": verifier,
    }
    # The wall clock can be set back, but the phases are measured with a monotonic clock.
    total = max(ended - begun.time + begun.boot_seconds, sum(phases.values()))
    within = {
        "model": sum(end - begin for begin, end in calling),
        "tools": sum(r.seconds for r in records if isinstance(r, ObservationsRecord) and r.turn > copied),
    }
    parts = phases | {name: min(seconds, total) for name, seconds in within.items()}
    rounded = {name: round(seconds, 6) for name, seconds in parts.items()}
    return rounded | {"total": round(max(total, *rounded.values(), sum(rounded[name] for name in phases)), 6)}


def summarise(records: Sequence[Record], token_capture: str) -> dict[str, Any]:
    """Return the fields of a Result that derive from the journal, and from how the model records token ids."""
    copied = copied_turn(records)
    responses = [record for record in records if isinstance(record, ResponseRecord) and record.turn > copied]
    observations = [record for record in records if isinstance(record, ObservationsRecord) and record.turn > copied]
    intents = [record for record in records if isinstance(record, IntentRecord)]
    attempts = [record for record in records if isinstance(record, AttemptRecord)]
    stop = last_record(records, StopRecord)
    return {
        "stop_reason": stop.stop_reason if stop else None,
        "traceback": stop.traceback if stop else None,
        "tool_tracebacks": {
            result.tool: result.traceback
            for record in reversed(observations)
            for result in reversed(record.results)
            if result.traceback
        },
        "program_trajectory": stop.program_trajectory if stop else None,
        "turns": len(responses),
        "tool_calls": sum(len(record.results) for record in observations),
        "usage": usage_of(records),
        "branches": intents[-1].branch + 1 if intents else 1,
        "token_forks": token_forks(records),
        "policy_versions": in_order(span.version for r in responses for span in r.policy_spans if span.version),
        "token_capture": token_capture if all(r.completion_token_ids is not None for r in responses) else "TextOnly",
        "sandbox": attempts[-1].sandbox if attempts else {},
        "started": attempts[0].time - attempts[0].boot_seconds if attempts else None,
        "branched_from": branch_of(records),
    }


def usage_of(records: Sequence[Record]) -> Usage:
    """Return the tokens of an attempt, without the turns that a branch copied."""
    copied = copied_turn(records)
    return _sum(record.usage for record in records if isinstance(record, ResponseRecord) and record.turn > copied)


def _sum(usages: Iterable[Usage]) -> Usage:
    listed = list(usages)
    return Usage(**{field: sum(getattr(usage, field) for usage in listed) for field in Usage.model_fields})


def build_result(
    job: RolloutJob,
    rollout: Rollout,
    attempt: int,
    records: Sequence[Record],
    *,
    token_capture: str,
    outcome: Outcome,
    verdict: Verdict | None = None,
    failures: Sequence[tuple[int, FailedRecord]] = (),
    reason: str | None = None,
    message: str = "",
    stale: bool = False,
    verifier_seconds: float = 0.0,
) -> Result:
    """Return the result of one rollout. Only a Completed one has a stop reason and, once graded, a reward."""
    fields = summarise(records, token_capture)
    completed = outcome is Outcome.COMPLETED
    if not completed:
        fields["stop_reason"] = None
    now = unix_time()
    graded = verdict if completed else None
    return Result(
        index=rollout.index,
        group=rollout.group,
        member=rollout.member,
        task=rollout.task.name,
        tags=list(rollout.task.tags),
        mode=job.spec.mode.value,
        seed=rollout.seed,
        outcome=outcome,
        reason=reason,
        message=message,
        stale=stale,
        reward=graded.reward if graded else None,
        rewards=graded.rewards if graded else {},
        passed=graded.passed if graded else None,
        forgeable=graded.forgeable if graded else False,
        dropped=len(graded.dropped) if graded else 0,
        verifier_message=_verifier_message(rollout, graded),
        attempt=attempt,
        failed_attempts=[
            AttemptSummary(attempt=number, reason=failure.reason, message=failure.message)
            for number, failure in failures
        ],
        # The sealed attempt may be a lost one: the last of a rollout that stays without a result.
        lost_usage=_sum(failure.usage for number, failure in failures if number != attempt),
        seconds=attempt_seconds(records, ended=now, verifier=verifier_seconds),
        ended=now,
        batch=rollout.batch,
        **fields,
    )


def output_of(verdict: Verdict | None) -> str:
    """Return the end of what the verifier's commands printed."""
    printed = "\n".join(command.output for command in verdict.commands) if verdict else ""
    return printed[-SHOWN_OUTPUT:].strip()


def _verifier_message(rollout: Rollout, verdict: Verdict | None) -> str | None:
    # An environment's verdict always has a message: its number of steps.
    if verdict is None or verdict.passed or rollout.task.environment is not None:
        return None
    return verdict.message[:VERIFIER_MESSAGE_CHARACTERS] or None
