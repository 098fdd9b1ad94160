"""The operator's input to a runner pod: the job, its key, and the index of its shard."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from agent_runtime.engine.scheduling.shard import Shard
from rollout_api.base import problems_in
from rollout_api.cluster import JOB_FILE, KEY_FILE
from rollout_api.rollout_job import RolloutJob

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Variable that Kubernetes sets in the pods of an Indexed Job."""


class BadStart(Exception):
    """The pod was not created by an operator of this version."""


@dataclass(frozen=True)
class Start:
    """Input of a runner."""

    job: RolloutJob
    key: str = field(repr=False)
    """The job's key, from which the tokens of its executors derive."""
    shard: Shard


def read_start(folder: Path, environ: Mapping[str, str]) -> Start:
    """Read job, key and index. Raises BadStart that names the file or variable."""
    job = _job(folder / JOB_FILE)
    key = _text(folder / KEY_FILE).strip()
    count = job.spec.runners.replicas
    index = environ.get(INDEX_VARIABLE, "")
    if not index.isdecimal() or int(index) >= count:
        raise BadStart(
            f"environment variable {INDEX_VARIABLE} is {index!r}, expected 0 to {count - 1} (runners.replicas is "
            f"{count}); "
            "runners are started by an Indexed Job that the operator creates"
        )
    return Start(job, key, Shard(int(index), count))


def _job(path: Path) -> RolloutJob:
    try:
        job = RolloutJob.model_validate_json(_text(path))
    except ValidationError as error:
        problem = problems_in(error, "it")[0]
        raise BadStart(f"{path}: {problem}; use a runner image of the operator's version (runners.image)") from error
    if not (job.metadata.namespace and job.metadata.uid):
        raise BadStart(f"{path}: metadata.namespace or metadata.uid is missing; the operator must set them")
    return job


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise BadStart(
            f"{path} cannot be read ({error.strerror}); the operator mounts it from the job's Secret"
        ) from error
