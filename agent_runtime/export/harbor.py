"""A run as trial folders in Harbor's layout, for its viewer, analysis and uploads.

The format is that of Harbor 0.25 (`TrialResult`, `TrialConfig`, `TrialLock`, artifacts/manifest.json), with a folder
for each rollout.
"""

import hashlib
import json
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent_runtime.recording.artifacts import open_artifacts
from agent_runtime.recording.extraction import extract_all
from agent_runtime.recording.messages import model_of
from agent_runtime.recording.reader import RunReader
from rollout_api.records import Outcome, Record, Seal, StepRecord, Verdict
from rollout_api.tasks import VerifierMode
from rollout_api.version import VERSION


async def write_trials(run: RunReader, folder: Path) -> int:
    """Write every sealed rollout below a folder; return the number of trials. Raises RecordCorrupt, OSError,
    FileExistsError.
    """
    for index, seal in run.seals.items():
        trial = folder / f"{seal.result.task}__{index}"
        trial.mkdir(parents=True)
        records = await run.records(index)
        _write_json(trial / "result.json", _result(run, trial, seal, records))
        _write_json(trial / "config.json", _config(run, trial, seal))
        _write_json(trial / "lock.json", _lock(run, trial, seal))
        if (trajectory := await run.trajectory(index)) is not None:
            _write_json(trial / "agent" / "trajectory.json", trajectory)
        steps = [record for record in records if isinstance(record, StepRecord) and record.verdict is not None]
        for step in steps:
            _write_verdict(trial / "steps" / step.step / "verifier", step.verdict)
        if not steps:
            _write_verdict(trial / "verifier", seal.verdict)
        await _write_artifacts(run, records, trial / "artifacts")
        if seal.result.outcome is not Outcome.COMPLETED:
            (trial / "exception.txt").write_text(f"{seal.result.reason}: {seal.result.message}\n", encoding="utf-8")
    return len(run.seals)


def _result(run: RunReader, trial: Path, seal: Seal, records: list[Record]) -> dict[str, Any]:
    result, model = seal.result, model_of(records)
    failed = result.outcome is not Outcome.COMPLETED
    steps = [record for record in records if isinstance(record, StepRecord) and record.ended]
    usage = {
        "n_input_tokens": result.usage.prompt_tokens,
        "n_cache_tokens": result.usage.cached_tokens,
        "n_output_tokens": result.usage.completion_tokens,
        "metadata": {"rollout": result.wire()},
    }
    exception = {
        "exception_type": result.reason or result.outcome.value,
        "exception_message": result.message,
        "exception_traceback": "",
        "occurred_at": _time(result.ended or 0.0),
    }
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{run.job_file.uid}/{result.index}")),
        "task_name": result.task,
        "trial_name": trial.name,
        "trial_uri": trial.resolve().as_uri(),
        "task_id": {"path": result.task},
        "source": run.job.metadata.name,
        "task_checksum": _digest(run, seal),
        "config": _config(run, trial, seal),
        "agent_info": {
            "name": run.job.spec.agent.type,
            "version": VERSION,
            "model_info": None if model is None else {"name": model, "provider": None},
        },
        "agent_result": None if steps else usage,
        "verifier_result": None if seal.verdict is None else {"rewards": _rewards(seal.verdict)},
        "verifier_environment_mode": None if steps or seal.verdict is None else _mode(seal),
        "exception_info": exception if failed else None,
        "started_at": None if result.started is None else _time(result.started),
        "finished_at": None if result.ended is None else _time(result.ended),
        "step_results": [
            {
                "step_name": step.step,
                "verifier_result": None if step.verdict is None else {"rewards": _rewards(step.verdict)},
            }
            for step in steps
        ]
        or None,
    }


def _config(run: RunReader, trial: Path, seal: Seal) -> dict[str, Any]:
    source = run.job.spec.tasks.from_
    return {
        "task": {"path": seal.result.task, "source": None if source is None else source.uri},
        "trial_name": trial.name,
        "trials_dir": str(trial.parent),
        "agent": {"name": run.job.spec.agent.type},
        "job_id": str(uuid.uuid5(uuid.NAMESPACE_URL, run.job_file.uid)),
    }


def _lock(run: RunReader, trial: Path, seal: Seal) -> dict[str, Any]:
    task = {
        "name": seal.result.task,
        "type": "local",
        "digest": f"sha256:{_digest(run, seal)}",
        "path": seal.result.task,
    }
    return {
        "task": task,
        "agent": _config(run, trial, seal)["agent"],
        "environment": {},
        "verifier": {"environment_mode": _mode(seal) if seal.verdict is not None else None},
    }


def _digest(run: RunReader, seal: Seal) -> str:
    """Return a digest that differs if the tasks of the run differ. A run stores no digest of a single task."""
    return hashlib.sha256(f"{run.job_file.tasks.digest} {seal.result.task}".encode()).hexdigest()


def _mode(seal: Seal) -> str:
    return "shared" if seal.verdict and seal.verdict.mode is VerifierMode.SHARED else "separate"


def _rewards(verdict: Verdict) -> dict[str, float]:
    return {**verdict.rewards, "reward": verdict.reward}


def _write_verdict(folder: Path, verdict: Verdict | None) -> None:
    if verdict is None:
        return
    folder.mkdir(parents=True)
    if verdict.rewards:
        _write_json(folder / "reward.json", _rewards(verdict))
    else:
        (folder / "reward.txt").write_text(repr(verdict.reward).removesuffix(".0") + "\n", encoding="utf-8")
    (folder / "test-stdout.txt").write_text("\n".join(command.output for command in verdict.commands), encoding="utf-8")


async def _write_artifacts(run: RunReader, records: list[Record], folder: Path) -> None:
    """Unpack the graded artifacts. They come from the policy, so nothing may leave the folder or be a device."""
    folder.mkdir(parents=True)
    entries: list[dict[str, Any]] = []
    async with open_artifacts(run.store, records) as archive:
        if archive is not None:
            workspace = folder / "workspace"
            workspace.mkdir()
            skipped = extract_all(archive, workspace)
            status = "failed" if skipped else "ok" if any(workspace.iterdir()) else "empty"
            entries = [{"source": ".", "destination": "workspace", "type": "directory", "status": status}]
    _write_json(folder / "manifest.json", entries)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", errors="replace")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
