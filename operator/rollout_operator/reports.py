"""What runners report, from the RolloutShards in the cache."""

from collections.abc import Iterator

from pydantic import ValidationError

from rollout_api.rollout_job import RunnerReport
from rollout_operator.actions import Manifest
from rollout_operator.cache import Cache


def report_of(shard: Manifest) -> RunnerReport | None:
    """The report in a RolloutShard; None before the first one."""
    try:
        return RunnerReport.model_validate(shard.get("status"))
    except ValidationError:
        return None


def reports_of(cache: Cache, namespace: str, job_uid: str) -> Iterator[RunnerReport]:
    """The reports of a job's runners, in no order."""
    for shard in cache.owned("RolloutShard", namespace, job_uid):
        if report := report_of(shard):
            yield report
