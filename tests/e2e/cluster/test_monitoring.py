"""A real Prometheus scrapes the real operator and runners: every panel of the dashboard and every alert has data."""

import re
from collections.abc import Callable, Iterator

import pytest
import yaml

from tests.support.chart import NAMESPACE, alerts, dashboard_queries, render
from tests.support.cluster import QUICKSTART_IMAGE, Cluster, Job, Object, eventually
from tests.support.prometheus import Prometheus, monitors_of, scrape

pytestmark = pytest.mark.full

# Members that end at once, others that end when the runner has been scraped (a rate needs a value before and after), and
# others that go on for minutes.
BUSY = f"""
apiVersion: rollout.dev/v1alpha1
kind: RolloutJob
metadata: {{name: busy}}
spec:
  mode: Eval
  groupSize: 2
  agent: {{type: ToolCalling, tools: [bash, finish], maxTurns: 1000}}
  sandbox: {{image: "{QUICKSTART_IMAGE}"}}
  runners: {{concurrency: 3}}
  tasks:
    inline:
      - {{name: short, prompt: p, verifier: {{commands: ["true"]}}}}
      - {{name: long, prompt: p, verifier: {{commands: ["true"]}}}}
      - {{name: later, prompt: p, verifier: {{commands: ["true"]}}}}
  model:
    scripted:
      tasks:
        - task: short
          members:
            - turns: [{{toolCalls: [{{name: bash, arguments: {{command: "false"}}}}]}}, {{toolCalls: [{{name: finish}}]}}]
        - task: long
          members: [{{turns: [{{toolCalls: [{{name: bash, arguments: {{command: sleep 0.5}}}}]}}]}}]
        - task: later
          members:
            - turns: [{{toolCalls: [{{name: bash, arguments: {{command: sleep 20}}}}]}}, {{toolCalls: [{{name: finish}}]}}]
"""

# A metric with its label matchers in a query, except for reasons of failures, which a test cannot all cause.
SELECTOR = re.compile(r"\brollout_(?!job\b)\w+(?:\{[^}]*\})?")
REASONS = re.compile(r'\{reason=~"[^"]*"\}')


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    monitors = monitors_of(render("--set", "monitoring.scrape=true"))
    assert [monitor["kind"] for monitor in monitors] == ["ServiceMonitor", "PodMonitor"]
    with scrape(cluster, monitors, tmp_path_factory.mktemp("prometheus")) as server:
        yield server


def test_every_panel_and_every_alert_has_data(prometheus: Prometheus, new_job: Callable[[Object], Job]) -> None:
    wanted = {f"panel: {name}": query for name, query in dashboard_queries().items()} | {
        f"alert {alert['alert']}: {selector}": selector
        for alert in alerts()
        for selector in SELECTOR.findall(REASONS.sub("", alert["expr"]))
    }
    busy = new_job(yaml.safe_load(BUSY)).apply()
    busy.wait_sealed(2)
    # The attempts of the long group are lost with their sandbox, and begin anew in another one.
    for pod in busy.pods("sandbox"):
        busy.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", busy.namespace, "--wait=false")

    missing = dict(wanted)

    def all_seen() -> bool | None:
        for name in [name for name, query in missing.items() if usable(prometheus.query(query))]:
            del missing[name]
        return not missing or None

    def describe() -> str:
        queries = "\n".join(f"{name}: {query}" for name, query in missing.items())
        return f"no data for\n{queries}\n{busy.describe()}"

    eventually(all_seen, 180, describe)
    assert prometheus.query('sum(rollout_rollouts_running{rollout_job="busy"})')


def usable(series: list[Object]) -> bool:
    """Whether a panel would show a value. A quantile without data is a series with the value NaN."""
    return any(one["value"][1] != "NaN" for one in series)


def test_prometheus_evaluates_every_alert(prometheus: Prometheus) -> None:
    def evaluated() -> list[Object] | None:
        rules = prometheus.rules()
        return rules if rules and all(rule["health"] != "unknown" for rule in rules) else None

    rules = eventually(evaluated, 60, lambda: str(prometheus.rules()))
    assert {rule["name"]: rule["health"] for rule in rules} == {alert["alert"]: "ok" for alert in alerts()}


def test_only_the_leading_operator_reports_itself_as_leader(prometheus: Prometheus, cluster: Cluster) -> None:
    replicas = len(cluster.list("pods", NAMESPACE, "app.kubernetes.io/component=operator"))
    eventually(lambda: len(prometheus.query("rollout_leader")) == replicas or None, 30, str)
    eventually(lambda: prometheus.query("sum(rollout_leader)")[0]["value"][1] == "1" or None, 30, str)
