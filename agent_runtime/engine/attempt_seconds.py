"""How long the parts of an attempt took, from its records: pure. docs/recording.md defines the parts."""

from collections.abc import Sequence

from agent_runtime.engine.agent_clock import agent_seconds_of, union
from agent_runtime.recording.branches import branch_of
from rollout_api.records import AttemptRecord, ObservationsRecord, Record, ResponseRecord, StopRecord


def attempt_seconds(records: Sequence[Record], *, ended: float, verifier: float) -> dict[str, float]:
    """The parts, of an attempt that ends at `ended` (Unix seconds). Turns copied from another rollout are not counted."""
    begun = next((record for record in records if isinstance(record, AttemptRecord)), None)
    if begun is None:
        return {}
    stop = next((record for record in records if isinstance(record, StopRecord)), None)
    branch = branch_of(records)
    copied = -1 if branch is None else branch.turn
    answers = [record for record in records if isinstance(record, ResponseRecord) and record.turn > copied]
    calling = union([(answer.time - answer.seconds, answer.time) for answer in answers])
    phases = {
        "boot": begun.boot_seconds,
        "agent": agent_seconds_of(records) if stop is None else stop.agent_seconds,
        "verifier": verifier,
    }
    # The wall clock may be set back; the phases were measured by another one.
    total = max(ended - begun.time + begun.boot_seconds, sum(phases.values()))
    within = {
        "model": sum(end - begin for begin, end in calling),
        "tools": sum(r.seconds for r in records if isinstance(r, ObservationsRecord) and r.turn > copied),
    }
    parts = phases | {name: min(seconds, total) for name, seconds in within.items()}
    rounded = {name: round(seconds, 6) for name, seconds in parts.items()}
    return rounded | {"total": round(max(total, *rounded.values(), sum(rounded[name] for name in phases)), 6)}
