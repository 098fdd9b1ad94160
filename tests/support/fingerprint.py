"""The content of a run without what may differ between two equal runs: times, places, epochs."""

import hashlib
import json
from typing import Any

from agent_runtime.recording.reader import open_run
from agent_runtime.recording.store import Store
from rollout_api.records import IntentRecord, ObservationsRecord, Record, ResponseRecord, StopRecord


def plain(record: Record) -> Any:
    """Return the content of a record."""
    match record:
        case IntentRecord():
            return ["intent", record.turn, record.keep, record.messages]
        case ResponseRecord():
            return ["response", record.turn, record.message]
        case ObservationsRecord():
            return ["observations", record.turn, [[r.call_id, r.tool, r.content, r.error] for r in record.results]]
        case StopRecord():
            return ["stop", record.stop_reason, record.message]
    return None


async def fingerprint(store: Store, name: str) -> dict[int, Any]:
    """Return, by rollout index, its result and everything in its journal. Two equal runs have equal fingerprints.

    Also checks that every object in a seal exists, with its digest.
    """
    run = await open_run(store, name)
    prints: dict[int, Any] = {}
    for index, seal in run.seals.items():
        for item in seal.objects:
            data = await run.store.get(item.key)
            assert data is not None, f"{item.key} is named by the seal and is not there"
            assert hashlib.sha256(data).hexdigest() == item.sha256, f"{item.key} was changed"
        records = [content for record in await run.records(index) if (content := plain(record)) is not None]
        result = seal.result
        prints[index] = {
            "outcome": result.outcome,
            "stop": result.stop_reason,
            "reward": result.reward,
            "verifier": [[c.command, c.exit_code, c.cause] for c in (seal.verdict.commands if seal.verdict else [])],
            "turns": result.turns,
            "tool_calls": result.tool_calls,
            "branches": result.branches,
            "records": json.loads(json.dumps(records)),
        }
    return prints
