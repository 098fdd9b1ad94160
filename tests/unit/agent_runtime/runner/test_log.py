"""`kubectl logs` of a runner: one JSON object per line for any message."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.engine.events import AttemptFailed, GroupFinished, JobEnded, JobStarted, JobSummary, RolloutSealed
from agent_runtime.runner.event_log import lines_of, log_event
from agent_runtime.runner.log import JsonLines
from rollout_api.records import Outcome, Result


def sealed(member: int) -> Result:
    return Result(
        index=member,
        group=0,
        member=member,
        task="fix",
        mode="Train",
        seed=0,
        outcome=Outcome.COMPLETED,
        reward=0.5,
        attempt=0,
        ended=0.0,
    )


def summary(*, completed: bool = False, aborted: str | None = None) -> JobSummary:
    return JobSummary("job", "f", "uri", 2, {}, None, completed, aborted, resumable=not completed)


@given(st.text(), st.dictionaries(st.text(min_size=1), st.text() | st.floats() | st.none()))
def test_any_message_is_one_line_that_a_collector_can_read(message: str, fields: dict[str, object]) -> None:
    record = logging.LogRecord("runner", logging.INFO, "", 0, "%s", (message,), None)
    record.fields = fields
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line).keys() >= {"time", "level", "message"}


def test_exception_is_logged_in_one_line() -> None:
    try:
        raise RuntimeError("bug\nin two lines")
    except RuntimeError as error:
        record = logging.LogRecord("runner", logging.ERROR, "", 0, "crashed", (), (type(error), error, None))
    line = JsonLines().format(record)
    assert "\n" not in line
    assert "RuntimeError" in json.loads(line)["traceback"]


def test_failures_are_warnings_and_single_rollouts_are_debug_messages() -> None:
    warned = JobStarted("job", "f", "uri", 4, 0, resumed=False, warnings=("no isolation of processes",))
    assert [level for level, _, _ in lines_of(warned)] == [logging.INFO, logging.WARNING]
    assert [level for level, _, _ in lines_of(RolloutSealed(sealed(0)))] == [logging.DEBUG]
    ((level, message, fields),) = lines_of(AttemptFailed(3, 1, "NodeLost", "node-7 is gone", retry=False))
    assert (level, fields["reason"], fields["why"]) == (logging.WARNING, "NodeLost", "node-7 is gone")
    assert "rollout 3" in message
    assert "last attempt" in message


def test_a_finished_group_shows_its_rewards() -> None:
    ((level, message, fields),) = lines_of(GroupFinished(0, "fix", (sealed(0), sealed(1))))
    assert (level, fields["rewards"]) == (logging.INFO, [0.5, 0.5])
    assert "fix" in message


def test_last_message_says_how_the_job_ended() -> None:
    texts = [
        next(iter(lines_of(JobEnded(end))))[1]
        for end in (summary(completed=True), summary(), summary(aborted="7 of 20 were lost"))
    ]
    assert texts == [
        "the shard is completed",
        "stopped; the rest can be resumed",
        "the job is aborted: 7 of 20 were lost",
    ]


def test_restarted_engine_does_not_log_results_of_earlier_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rollout.runner")
    before = (sealed(0), sealed(1))
    log_event(JobStarted("job", "f", "uri", 4, 2, resumed=True, results=before))
    log_event(GroupFinished(0, "fix", before, earlier=True))
    log_event(GroupFinished(1, "other", (sealed(2), sealed(3))))
    assert [record.getMessage() for record in caplog.records[1:]] == ["group 1 (other) is finished"]
