"""Data of dashboards and alerts: counted once, limited in number, and present from the start."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

from prometheus_client.parser import text_string_to_metric_families

from agent_runtime.engine.events import (
    AttemptFailed,
    Event,
    JobStarted,
    RolloutSealed,
    StorageRequested,
    ToolEnded,
    TurnEnded,
    WorkspaceAcquired,
)
from agent_runtime.engine.scheduling.shard import Shard
from agent_runtime.models.pool.model import ServedModel
from agent_runtime.runner.metrics import MOST_REASONS, USUAL_REASONS, RunnerMetrics
from agent_runtime.runner.report import ShardTally
from rollout_api.records import Outcome, Result, Usage

Sample = tuple[str, tuple[tuple[str, str], ...]]


class Shown:
    """A runner's metrics, and what Prometheus reads from them."""

    def __init__(self, *tools: str) -> None:
        self.tally = ShardTally(Shard(), 2)
        self.metrics = RunnerMetrics(self.tally, tools)

    def after(self, events: Iterable[Event]) -> "Shown":
        for event in events:
            self.tally.observe(event)
            self.metrics.observe(event)
        return self

    def samples(self) -> dict[Sample, float]:
        families = text_string_to_metric_families(self.metrics.exposition().decode())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}

    def value(self, name: str, **labels: str) -> float:
        return self.samples()[name, tuple(sorted(labels.items()))]


def sealed(index: int, outcome: Outcome, reward: float | None = None) -> RolloutSealed:
    group, member = divmod(index, 2)
    return RolloutSealed(
        Result(
            index=index,
            group=group,
            member=member,
            task="t",
            mode="Train",
            seed=0,
            outcome=outcome,
            reward=reward,
            attempt=0,
            ended=0.0,
        )
    )


def test_rollouts_rewards_and_the_fraction_that_an_alert_watches() -> None:
    before = sealed(0, Outcome.INFRA_FAILED).result
    shown = Shown().after(
        [
            JobStarted("job", "f", "uri", 8, 1, resumed=True, results=(before,)),
            sealed(1, Outcome.COMPLETED, 0.5),
            sealed(2, Outcome.CANCELLED),
            sealed(3, Outcome.COMPLETED, 1.0),
        ]
    )
    assert shown.value("rollout_rollouts_total", outcome="Completed") == 2
    assert shown.value("rollout_rollouts_total", outcome="InfraFailed") == 0, "an earlier process has counted it"
    assert (shown.value("rollout_reward_sum"), shown.value("rollout_reward_count")) == (1.5, 2)
    assert shown.value("rollout_infra_failure_fraction") == 1 / 3, "cancelled ones count for neither side"
    assert shown.value("rollout_groups_waiting") == 2


def test_forks_of_token_sequences_are_counted() -> None:
    result = sealed(0, Outcome.COMPLETED, 1.0).result
    forked = RolloutSealed(result.model_copy(update={"token_forks": 3}))
    assert Shown().after([forked, sealed(1, Outcome.COMPLETED, 1.0)]).value("rollout_token_forks_total") == 3


def test_replayed_turns_are_not_counted_again() -> None:
    usage = Usage(prompt_tokens=100, completion_tokens=7)
    shown = Shown().after([TurnEnded(0, 0, 1.0, usage, replayed=True), TurnEnded(0, 1, 2.0, usage, replayed=False)])
    assert shown.value("rollout_turns_total") == 1
    assert shown.value("rollout_tokens_total", kind="prompt") == 100
    assert shown.value("rollout_tokens_total", kind="completion") == 7
    assert shown.value("rollout_model_call_seconds_sum") == 2.0


def test_a_model_that_invents_tools_and_reasons_cannot_fill_prometheus() -> None:
    shown = Shown("bash").after(
        [
            ToolEnded(0, "bash", 0.01, error=False),
            *(ToolEnded(0, f"invented-{n}", 0.01, error=True) for n in range(1000)),
            *(AttemptFailed(0, n, f"Reason{n}", "", retry=True) for n in range(1000)),
        ]
    )
    assert shown.value("rollout_tool_call_seconds_count", tool="bash") == 1
    assert shown.value("rollout_tool_call_errors_total", tool="Other") == 1000
    reasons = [labels for name, labels in shown.samples() if name == "rollout_attempts_failed_total"]
    assert len(reasons) == MOST_REASONS + 1
    invented = MOST_REASONS - len(USUAL_REASONS)
    assert shown.value("rollout_attempts_failed_total", reason="Other") == 1000 - invented


def test_first_lost_attempt_shows_in_a_rate() -> None:
    """Prometheus computes no increase for a series that appears with its first count."""
    for reason in ("Evicted", "NodeLost", "ServerError", "Other"):
        assert Shown().after([]).value("rollout_attempts_failed_total", reason=reason) == 0


def test_storage_and_workspaces_are_timed_from_a_millisecond_on() -> None:
    shown = Shown().after(
        [
            StorageRequested("create", 0.03, failed=False),
            StorageRequested("create", 0.5, failed=True),
            WorkspaceAcquired(0, 0.0009),
        ]
    )
    assert shown.value("rollout_storage_request_seconds_count", operation="create") == 2
    assert shown.value("rollout_storage_errors_total", operation="create") == 1
    assert shown.value("rollout_workspace_acquire_seconds_bucket", le="0.001") == 1


def test_sandboxes_are_counted_when_prometheus_asks() -> None:
    shown, states = Shown(), {"Ready": 2}
    shown.metrics.watch_sandboxes(lambda: states)
    shown.metrics.sandbox_started(0.7)
    states["Starting"] = 1
    assert shown.value("rollout_sandboxes", state="Ready") == 2
    assert shown.value("rollout_sandboxes", state="Starting") == 1
    assert shown.value("rollout_sandbox_start_seconds_sum") == 0.7


def test_calls_to_a_model_server_are_counted_when_prometheus_asks() -> None:
    shown = Shown()
    model = SimpleNamespace(in_flight=7, waiting=2, spills=3, resent=4, gate_seconds=1.5)
    shown.metrics.watch_model(cast(ServedModel, model), "qwen")
    assert shown.value("rollout_model_calls_in_flight", model_server="qwen") == 7
    assert shown.value("rollout_model_calls_waiting", model_server="qwen") == 2
    model.spills = 5
    assert shown.value("rollout_model_spills_total", model_server="qwen") == 5
    assert shown.value("rollout_model_resent_calls_total", model_server="qwen") == 4
    assert shown.value("rollout_model_gate_seconds_total", model_server="qwen") == 1.5


def test_series_of_alert_rates_exist_before_their_first_count() -> None:
    names = {name for name, _ in Shown("bash").samples()}
    assert {"rollout_rollouts_total", "rollout_tokens_total", "rollout_turns_total", "rollout_reward_count"} <= names
