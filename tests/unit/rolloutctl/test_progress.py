"""The display of a run shows what happened."""

import dataclasses
import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent_runtime.engine.events import (
    AgentFailed,
    AttemptFailed,
    Event,
    JobStarted,
    ModelCallFailing,
    ModelSilent,
    PluginFailed,
    RolloutSealed,
    RolloutStarted,
    StepBuilt,
    ToolEnded,
    VerifierFailed,
)
from rollout_api.records import Outcome, Result
from rolloutctl.ui.progress import PLAIN_SECONDS, Plain, Tally


class Clock:
    """A clock that stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def sealed(index: int, outcome: Outcome = Outcome.COMPLETED, reward: float | None = None) -> RolloutSealed:
    return RolloutSealed(
        Result(index=index, group=0, member=0, task="t", mode="Eval", seed=0, outcome=outcome, reward=reward, attempt=1)
    )


def started(total: int | None, done: int = 0) -> JobStarted:
    return JobStarted("job", "job-1", "out/job-1", total, done, resumed=done > 0)


def test_rate_and_time_left_do_not_include_results_of_an_earlier_process() -> None:
    clock = Clock()
    tally = Tally(clock)
    tally.add(started(100, done=50))
    clock.now += 60
    for index in range(50, 60):
        tally.add(RolloutStarted(index, "t", 0, 1))
        tally.add(sealed(index, reward=0.5))
    assert tally.line() == "60/100 rollouts, 0 running, 10 Completed, mean reward 0.5, 10/min, 240 s left".replace(
        "240 s", "4 min"
    )


def test_mean_and_outcomes_of_a_resumed_run_include_earlier_rollouts() -> None:
    clock = Clock()
    tally = Tally(clock)
    earlier = [sealed(0, reward=0.0).result, sealed(1, Outcome.INFRA_FAILED).result]
    tally.add(JobStarted("job", "job-1", "out/job-1", 4, 2, resumed=True, results=earlier))
    clock.now += 60
    tally.add(sealed(2, reward=1.0))
    assert "3/4 rollouts, 0 running, 2 Completed, 1 InfraFailed, mean reward 0.5, 1/min" in tally.line()


def test_a_stream_without_an_end_promises_none() -> None:
    tally = Tally(Clock())
    tally.add(started(None))
    tally.add(sealed(0))
    assert "left" not in tally.line()
    assert tally.line().startswith("1/? rollouts")


def test_tally_shows_rollouts_that_wait_for_the_model() -> None:
    tally = Tally(Clock())
    tally.add(started(4))
    for index in (0, 1, 1):
        tally.add(ModelCallFailing(index, "Unreachable: connection refused"))
    assert "2 waiting for the model" in tally.line()
    for index in (0, 1):
        tally.add(ModelCallFailing(index, None))
    assert "waiting" not in tally.line()


outcomes = st.lists(st.tuples(st.sampled_from(list(Outcome)), st.none() | st.floats(0, 1)), max_size=30)


@given(outcomes)
def test_counts_and_mean_equal_those_of_the_events(ended: list[tuple[Outcome, float | None]]) -> None:
    tally = Tally(Clock())
    tally.add(started(len(ended)))
    for index, (outcome, reward) in enumerate(ended):
        tally.add(RolloutStarted(index, "t", 0, 1))
        tally.add(sealed(index, outcome, reward))
    assert (tally.sealed, len(tally.running)) == (len(ended), 0)
    assert sum(tally.outcomes.values()) == len(ended)
    graded = [reward for _, reward in ended if reward is not None]
    assert (tally.mean_reward is None) == (not graded)
    if tally.mean_reward is not None:
        assert abs(tally.mean_reward - sum(graded) / len(graded)) < 1e-9


def plain(events: Sequence[Event], clock: Clock | None = None) -> str:
    text = io.StringIO()
    with Plain(Console(file=text, width=200), clock or Clock()) as display:
        for event in events:
            display(event)
    return text.getvalue()


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end() -> None:
    clock = Clock()
    text = io.StringIO()
    with Plain(Console(file=text, width=200), clock) as display:
        display(started(300))
        for index in range(300):
            clock.now += PLAIN_SECONDS / 100
            display(sealed(index))
    lines = [line for line in text.getvalue().splitlines() if " running" in line]
    assert 3 <= len(lines) <= 4
    assert lines[-1].startswith("300/300")


def test_the_same_failure_over_and_over_does_not_flood_the_log() -> None:
    failures = [AttemptFailed(index, 1, "SandboxLost", "node gone", retry=True) for index in range(100)]
    text = plain([started(100), *failures])
    assert text.count("node gone") == 5
    assert "not shown" in text


def test_failing_model_call_is_printed_once_until_its_reason_changes() -> None:
    reasons = ["RateLimited: status 429"] * 3 + ["ServerError: status 500", None, "ServerError: status 500"]
    text = plain([started(1), *(ModelCallFailing(0, reason) for reason in reasons)])
    assert (text.count("status 429"), text.count("status 500")) == (1, 2)


def test_steps_that_were_found_and_made_are_counted_once_each_at_the_end() -> None:
    found, made = StepBuilt("RUN a", 5, 10, was_stored=True), StepBuilt("RUN b", 5, 10)
    text = plain([started(2), found, found, made, dataclasses.replace(made, was_stored=True)])
    assert text.count("Built in") == 1
    assert text.endswith("Steps of Dockerfiles and setups: 1 found stored, 1 made.\n")
    assert "Steps of" not in plain([started(2)])


@pytest.mark.parametrize(
    "event",
    [
        ToolEnded(3, "search", 0.1, error=True, traceback="Traceback …\nKeyError: 'q'"),
        PluginFailed("mine:Plugin", "before_turn", "run/rollout-3-0", "KeyError: 'q'", "Traceback …\nKeyError: 'q'"),
        VerifierFailed("fix", 0, "check.py:3: KeyError: 'q'", "Traceback …\nKeyError: 'q'"),
    ],
)
def test_first_traceback_of_a_tool_plugin_or_verifier_is_printed_at_once_and_only_once(event: Event) -> None:
    for events in ([event], [event] * 3):
        assert plain([started(100), *events]).count("Traceback …\nKeyError: 'q'") == 1


def test_first_traceback_of_each_hook_of_a_plugin_is_printed() -> None:
    failures = [
        PluginFailed("mine:Plugin", hook, "run/rollout-3-0", "KeyError: 'q'", f"Traceback of {hook}")
        for hook in (*["before_turn"] * 9, *["after_rollout"] * 2)
    ]
    text = plain([started(100), *failures])
    assert (text.count("Traceback of before_turn"), text.count("Traceback of after_rollout")) == (1, 1)


def test_lost_rollout_is_always_reported() -> None:
    failures = [AttemptFailed(index, 3, "SandboxLost", "node gone", retry=False) for index in range(20)]
    assert plain([started(100), *failures]).count("no attempts are left") == 20


def test_warnings_of_the_provider_are_shown() -> None:
    warned = JobStarted("job", "job-1", "out", 1, 0, resumed=False, warnings=("no overlay here: \x1b[2J",))
    assert "Warning: no overlay here" in plain([warned])
    assert "\x1b" not in plain([warned])


def test_missing_isolation_is_one_short_line() -> None:
    def line(*isolation: str) -> str:
        lines = plain([JobStarted("job", "job-1", "out", 1, 0, resumed=False, isolation=isolation)]).splitlines()
        return next(line for line in lines if "Isolation" in line)

    assert line("no image") == "Warning: Isolation: no image. See `rolloutctl doctor` and docs/workspaces.md."
    assert "… (and 2 more). See `rolloutctl doctor` and docs/workspaces.md." in line("x" * 300, "b", "c")
    assert len(line("x" * 300, "b", "c")) <= 160


def test_complete_run_is_reported_with_the_command_that_runs_it_again() -> None:
    assert "Nothing is left to run. To run the job again" in plain([started(4, done=4)])
    assert "Nothing is left" not in plain([started(4, done=3)])


def test_silent_model_is_reported_once_and_shown_until_it_answers() -> None:
    silent = [ModelSilent("http://model/v1", 8, seconds, has_answered=False) for seconds in (10.0, 20.0)]
    text = plain([started(8), *silent])
    assert (
        text.count("8 calls have waited for 10 s for an answer of http://model/v1; no call has been answered yet.") == 1
    )
    tally = Tally(Clock())
    tally.add(silent[1])
    assert "no answer from the model for 20 s" in tally.line()
    tally.add(ModelSilent("http://model/v1", 0, 0.0, has_answered=True))
    assert "no answer" not in tally.line()


def test_the_first_exception_of_the_agents_code_is_printed_at_once_and_no_further_one() -> None:
    shown = plain([started(8), AgentFailed("fix", 3, "KeyError: 'a'"), AgentFailed("fix", 4, "KeyError: 'b'")])
    assert "The agent's own code raised in fix/3 (AgentError):" in shown
    assert "KeyError: 'a'" in shown
    assert "KeyError: 'b'" not in shown
